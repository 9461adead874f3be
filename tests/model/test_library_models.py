"""Models of transformers behind dtt's contract: their logits, losses, documents and roles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.library_types import HEADS, JOINED, SIZES, TYPES, built, exact, ids, initialized
from support.quantized import rounded

from dtt.base.errors import DttError
from dtt.base.ranks import Ranks
from dtt.base.targets import IGNORE_INDEX
from dtt.config.adapter import LoraConfig
from dtt.evaluate.tasks.scorer import Option, Scorer
from dtt.mesh.dist import start
from dtt.model import count
from dtt.model.adapted_layers import adaptable
from dtt.model.architecture import BuiltArchitecture
from dtt.model.contract import Model
from dtt.model.decoder import make_model, params_of
from dtt.model.generate import generate
from dtt.model.init import initialize
from dtt.model.library.family import TransformersFamily
from dtt.model.library.model import LibraryModel
from dtt.model.lora import attach
from dtt.model.output import Output
from dtt.train.warm_start import take_base

MOE_OF_64 = {"moe_intermediate_size": 64}
JAMBA = {
    "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4, "mamba_dt_rank": 64,
    "mamba_d_state": 8,
}  # fmt: skip
"""It multiplies with the weight of `dt_proj` itself."""


@pytest.fixture(scope="module", params=TYPES)
def model(request: pytest.FixtureRequest) -> Any:
    return initialized(built(request.param))


@torch.no_grad()
def test_logits_are_those_of_the_library(model: Any) -> None:
    tokens = ids(2, 16)
    expected = model.library(input_ids=tokens).logits
    torch.testing.assert_close(model(tokens), expected, rtol=1e-5, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "more"), [("lfm2", {}), ("glm4_moe", MOE_OF_64), ("jamba", JAMBA)]
)
def test_a_base_in_4_bits_computes_with_the_rounded_weights(
    kind: str, more: dict[str, int]
) -> None:
    arch = built(kind, intermediate_size=128, **more)
    plain, quantized = initialized(arch), initialized(arch)
    attach(quantized, LoraConfig(base="nf4", targets=("self_attn.q_proj",)), torch.float32)
    take_base(quantized, plain.state_dict(), "the other")
    initialize(quantized, seed=0)
    for name in adaptable(arch):
        weight = plain.get_parameter(name)
        weight.copy_(rounded(weight))
    torch.testing.assert_close(quantized(ids(2, 16)), plain(ids(2, 16)), rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_packed_documents_are_separate_or_known_not_to_be(model: Any) -> None:
    tokens = ids(2, 16)
    packed = model(tokens, doc_ids_BT=(torch.arange(16) // 9).expand(2, 16))
    alone = torch.cat([model(tokens[:, :9]), model(tokens[:, 9:])], dim=1)
    difference = float((packed - alone).abs().max() / alone.abs().max())
    assert (difference < 1e-5) == (model.config.model_type not in JOINED)


def test_generation_with_the_librarys_cache_gives_the_tokens_of_whole_passes(model: Any) -> None:
    prompt, how = ids(9).tolist(), {"temperature": 0, "top_k": None, "top_p": 1.0}
    cached = [*generate(model, prompt, max_new_tokens=7, **how)]
    assert model._caches
    read = Model.reader(model)  # which computes all tokens again
    assert cached == [int(read(torch.tensor(new)).argmax()) for new in (prompt, *zip(cached[:-1]))]


def test_a_cache_that_changes_logits_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = initialized(built("lfm2"))
    monkeypatch.setattr("dtt.model.library.model.CACHES", ("nothing",))
    prompt, how = ids(9).tolist(), {"temperature": 0, "top_k": None, "top_p": 1.0}
    with caplog.at_level("WARNING", logger="dtt"):
        found = [*generate(model, prompt, max_new_tokens=3, **how)]
    assert "the cache of lfm2 cannot be used" in caplog.text
    assert found == [*generate(initialized(built("lfm2")), prompt, max_new_tokens=3, **how)][:3]


@torch.no_grad()
def test_options_are_scored_as_whole_passes_score_them(model: Any) -> None:
    asked = [
        [Option((1, 2, 3), (4, 5)), Option((1, 2, 3), (6,))],
        [Option((9,), (8, 7, 6, 5))],
    ]
    scores = Scorer(model, start(Ranks(), "cpu"), batch_tokens=7).score(asked)
    assert scores is not None
    for options, found in zip(asked, scores, strict=True):
        for option, score in zip(options, found, strict=True):
            tokens = torch.tensor([*option.context, *option.continuation])
            nats_TV = model(tokens[None, :-1])[0].log_softmax(-1)[len(option.context) - 1 :]
            expected = nats_TV.gather(1, tokens[len(option.context) :, None]).sum()
            assert score.log_likelihood == pytest.approx(float(expected), rel=1e-5)


def test_each_trained_parameter_gets_a_gradient_and_has_a_role(model: Any) -> None:
    tokens = ids(4, 32)
    output = model(tokens, tokens)
    output.loss.backward()
    params = params_of(model)
    roles = {name: param.role for name, param in params.items()}
    without = [name for name, param in params.items() if param.tensor.grad is None]
    assert {roles[name] for name in without} <= {"balance"}
    assert {"embed", "matrix"} <= set(roles.values())
    assert ("head" in roles.values()) == (not model.tied)
    for name, param in params.items():
        assert (roles[name] == "matrix") <= (param.tensor.ndim in (2, 3)), name
    model.zero_grad()


@pytest.mark.parametrize("separate", [False, True], ids=["joined", "separate"])
def test_three_steps_are_those_of_a_plain_loop(model: Any, *, separate: bool) -> None:
    """In fp64, but for the parts that the library computes in fp32 whatever is asked for."""
    if separate and model.config.model_type in JOINED:
        return  # refused at the start: no mask and no positions separate its documents
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    tolerance = exact(model.config.model_type, separate=separate)
    model.double()
    for step in range(3):
        inputs, targets = ids(2, 16)[:, :-1].roll(step, 1), ids(2, 16)[:, 1:].roll(step, 1)
        documents = (torch.arange(15) // 9).expand(2, 15) if separate else None
        output = model(inputs, targets, doc_ids_BT=documents)
        assert isinstance(output, Output)
        (output.loss / 30).backward()
        named = dict(model.named_parameters())
        ours = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
        model.zero_grad()
        # The library's model itself, of each document alone.
        parts = inputs.tensor_split([9], dim=1) if separate else [inputs]
        logits = torch.cat([model.library(input_ids=one).logits for one in parts], dim=1)
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        assert float(output.loss.detach() / 30) == pytest.approx(float(expected), abs=tolerance)
        expected.backward()
        with torch.no_grad():
            for name, parameter in named.items():
                if parameter.grad is not None:
                    torch.testing.assert_close(
                        ours[name], parameter.grad, rtol=tolerance, atol=tolerance
                    )
                    parameter -= 0.1 * parameter.grad
        model.zero_grad()
    model.float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(before[name])


@pytest.mark.parametrize(
    ("kind", "more", "factor", "cap"),
    [
        ("lfm2", {}, 1.0, None),
        ("cohere2", {"logit_scale": 0.25}, 0.25, None),
        ("granite", {"logits_scaling": 8.0}, 0.125, None),
        ("gemma2", {"final_logit_softcapping": 2.0}, 1.0, 2.0),
    ],
)
def test_training_has_the_factor_and_the_cap_of_the_logits(
    kind: str, more: dict[str, float], factor: float, cap: float | None
) -> None:
    """And no others: without both, logits are the product of hidden states and head."""
    model = initialized(built(kind, **more), torch.float64)
    with torch.no_grad():
        model.head_weight().mul_(20)  # else a cap would change little
    tokens, targets = ids(2, 16), ids(3, 2, 16)[2]
    product = model.body(input_ids=tokens, use_cache=False).last_hidden_state
    product = product @ model.head_weight().T
    expected = product * factor
    if cap is not None:
        expected = cap * torch.tanh(expected / cap)
        assert float(product.detach().abs().max()) > cap
    loss = F.cross_entropy(expected.flatten(0, 1), targets.flatten())
    output = model(tokens, targets)
    exactly: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-9}
    torch.testing.assert_close(output.loss / targets.numel(), loss, **exactly)
    torch.testing.assert_close(model(tokens), expected, **exactly)
    named = [p for p in model.parameters() if p.requires_grad]
    both = [
        torch.autograd.grad(one, named, allow_unused=True)
        for one in (output.loss / targets.numel(), loss)
    ]
    for ours, theirs in zip(*both, strict=True):
        torch.testing.assert_close(ours, theirs, **exactly)


def test_initial_values_follow_from_the_seed_and_the_name_alone() -> None:
    arch = built("glm4_moe")
    one, other = initialized(arch), initialized(built("glm4_moe"))
    again = dict(other.named_parameters())
    assert all(torch.equal(tensor, again[name]) for name, tensor in one.named_parameters())
    assert one.get_parameter("model.layers.1.mlp.experts.down_proj").std() > 0.01


def test_tables_of_angles_and_corrections_keep_their_precision() -> None:
    """Rounded to bf16, an angle of a late token would be another one."""
    model = make_model(built("glm4_moe"), dtype=torch.bfloat16)
    angles = {name: buffer.dtype for name, buffer in model.named_buffers()}
    assert set(angles.values()) == {torch.float32}
    dtypes = {model.role(n, p): p.dtype for n, p in model.named_parameters()}
    assert dtypes.pop("balance") == torch.float32
    assert set(dtypes.values()) == {torch.bfloat16}


def test_corrections_start_as_the_library_makes_them() -> None:
    model = initialized(built("glm4_moe"))
    [name, *_] = [n for n, p in model.named_parameters() if model.role(n, p) == "balance"]
    assert torch.equal(model.get_parameter(name), torch.zeros(8))


def test_flops_count_the_experts_that_compute_a_token() -> None:
    few = count.flops_per_token(built("glm4_moe"), 16)
    more = count.flops_per_token(built("glm4_moe", n_routed_experts=16), 16)
    # Twice as many experts add the rows of routers only.
    assert few < more < 1.05 * few
    own = count.flops_per_token(built("llama"), 16)
    assert own == pytest.approx(6 * (count.parameters(built("llama")) - 256 * 64), rel=0.1)


def test_the_row_of_padding_is_trained() -> None:
    """cohere2 pads with 0 by default, and 0 is a token like others here."""
    model = initialized(built("cohere2"))
    model(torch.zeros(1, 4, dtype=torch.long), ids(1, 4)).loss.backward()
    assert model.library.get_input_embeddings().weight.grad[0].abs().sum() > 0


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "t5"}, "it is an encoder with a decoder"),
        ({"model_type": "bert"}, "its head is tied to the embedding, and has a bias"),
        ({"model_type": "dory"}, "its head is no matrix: DoryLMHead"),
        ({"model_type": "gemma4"}, "it has parts: audio_config, text_config, vision_config"),
        ({"model_type": "zamba"}, "some of its layers share their parameters"),
        ({"model_type": "no_such_type"}, "has no model_type 'no_such_type'"),
        ({"model_type": "llama", "hiden_size": 64}, "has no hiden_size"),
        (
            {"model_type": "llama", "num_hidden_layers": "two"},
            "cannot train a model of type 'llama'",
        ),
    ],
)
def test_what_the_library_does_not_know_is_refused(config: dict[str, Any], expected: str) -> None:
    section = TransformersFamily(config=config)
    with pytest.raises(DttError, match=expected):
        BuiltArchitecture(section=section, vocab_size=256, max_seq_len=64).build()


def test_code_of_a_folder_never_runs() -> None:
    section = TransformersFamily(config={"model_type": "llama", "auto_map": {"AutoModel": "a.B"}})
    assert dict(section.problems()) == {
        "config.auto_map": "names code of the folder, which dtt never runs"
    }
    assert isinstance(built("llama").skeleton, LibraryModel)


ROUTED: dict[str, dict[str, Any]] = {
    "mixtral": {**SIZES, "num_local_experts": 4},
    "qwen3_moe": {**HEADS, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2},
    "gpt_oss": TYPES["gpt_oss"],
    "granitemoe": {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
    "bamba": {**SIZES, "attn_layer_indices": [1], "z_loss_coefficient": 0.1, "mamba_n_heads": 8},
}
"""Types with losses of their own beside that of the targets."""


@pytest.mark.parametrize("kind", ROUTED)
def test_losses_of_routers_are_those_of_the_library(kind: str) -> None:
    routed = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    model = initialized(
        built(kind, **ROUTED[kind], **(routed if kind != "bamba" else {})), torch.float64
    )
    tokens, named = ids(1, 17), dict(model.named_parameters())
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    output = model(inputs, targets)
    ours = torch.autograd.grad(sum(output.aux.values(), output.loss) / 16, [*named.values()])
    theirs = model.library(input_ids=inputs, labels=targets, shift_labels=targets)
    # Its own `loss` is that of logits in fp32.
    exact = torch.nn.functional.cross_entropy(theirs.logits[0], targets[0])
    expected = exact + 0.5 * theirs.aux_loss if kind != "bamba" else theirs.loss
    total = sum(output.aux.values(), output.loss) / 16
    if kind != "bamba":  # its loss of large logits has gradients, and is not reported
        assert float(total) == pytest.approx(float(expected), rel=1e-10)
        assert float(total) == pytest.approx(float(theirs.loss), rel=1e-6)
    gradients = torch.autograd.grad(expected, [*named.values()])
    tolerance = 1e-6 if kind == "bamba" else 1e-10
    for one, other in zip(ours, gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_the_loss_of_routers_of_a_batch_is_the_sum_of_its_sequences_counted_tokens() -> None:
    model = initialized(built("qwen3_moe", **ROUTED["qwen3_moe"], output_router_logits=True))
    inputs, targets = ids(3, 16), ids(3, 16)
    targets[1, 5:] = targets[2] = IGNORE_INDEX
    whole = model(inputs, targets).aux["balance_loss"]
    rows = zip(inputs.split(1), targets.split(1), strict=True)
    parts = [model(*row).aux["balance_loss"] for row in rows]
    assert float(parts[2]) == 0
    assert float(sum(parts)) == pytest.approx(float(whole), rel=1e-6)
    whole.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_parameters_that_no_optimizer_trains_do_not_change_the_norm_of_gradients() -> None:
    """Factors of Gemma 4 that the library keeps in buffers get gradients, which nothing clears."""
    sizes = {"vocab_size_per_layer_input": 256, "hidden_size_per_layer_input": 16}
    model = initialized(built("gemma4_text", **HEADS, **sizes))
    params = params_of(model)
    norms = []
    for _ in range(2):
        model(ids(1, 8), ids(1, 8)).loss.backward()
        norms.append(params.clip(1.0))
        scalars = params.subset({"balance"})
        assert scalars
        assert all(param.tensor.grad is None for param in scalars.values())
        model.zero_grad()
    assert norms[0] == norms[1]


def test_a_loss_of_routers_that_the_library_lacks_is_refused() -> None:
    with pytest.raises(DttError, match="the library has no loss of its routers"):
        built("llama4_text", output_router_logits=True).build()
