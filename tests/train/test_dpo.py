"""The loss, gradients and metrics of DPO equal its definition, and those of TRL's DPOTrainer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.preference_pairs import (
    SEQ_LEN,
    VOCAB_SIZE,
    Answered,
    Pair,
    decoder,
    gradients,
    make_pairs,
    packed,
    split,
    with_reference,
)
from support.tiny_job import make_tokenizer
from torch import Tensor

from dtt.data.samples.loader import MicroBatch
from dtt.hf.read import read_hf_folder
from dtt.model.decoder import Decoder
from dtt.model.output import Output
from dtt.train.objectives.dpo import METRICS, DpoConfig
from dtt.train.objectives.loss_function import loss_function
from dtt.train.step import Passes

BETA = 0.3


def alone(model: Decoder, one: Answered) -> tuple[Tensor, int]:
    """Return the log-probability of the targets of a conversation by itself, and their number."""
    ids, mask = torch.tensor([one.ids]), torch.tensor(one.mask)
    logp = model(ids[:, :-1]).log_softmax(-1)[0].gather(1, ids[0, 1:, None])[:, 0]
    return logp[mask[1:]].sum(), sum(one.mask)


def defined(
    policy: Decoder, reference: Decoder, pairs: list[Pair], *, length_normalised: bool
) -> dict[str, Tensor]:
    """Return the mean loss and metrics of pairs that are not packed."""
    losses, margins, logps = [], [], []
    for pair in pairs:
        rewards = []
        for one in pair:
            logp, count = alone(policy, one)
            with torch.no_grad():
                ratio = logp - alone(reference, one)[0]
            ratio = ratio + (logp - logp.detach())  # the gradient of the policy
            rewards.append(BETA * ratio / (count if length_normalised else 1))
            logps.append(logp.detach())
        margins.append(rewards[0] - rewards[1])
        losses.append(-F.logsigmoid(margins[-1]))
    margin = torch.stack(margins).detach()
    values = margin.mean(), (margin > 0).float().mean(), *torch.stack(logps).view(-1, 2).mean(0)
    return {"loss": torch.stack(losses).mean()} | dict(zip(METRICS, values, strict=True))


def step(policy: Decoder, micro_batches: list[MicroBatch], pairs: int, cfg: DpoConfig) -> Output:
    policy.zero_grad()
    return Passes(policy, "fp32").run(micro_batches, loss_function(cfg), pairs)


@pytest.mark.parametrize("length_normalised", [False, True])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_packed_pairs_have_the_loss_gradients_and_metrics_of_pairs_alone(
    family: str, rows: int, length_normalised: bool
) -> None:
    policy, reference, pairs = decoder(0, family), decoder(1, family), make_pairs(13)
    cfg = DpoConfig(beta=BETA, length_normalised=length_normalised)
    batch = with_reference(packed(pairs), reference)
    assert len(batch.tokens) > rows, "several micro-batches"
    got = step(policy, split(batch, rows), len(pairs), cfg)
    found = gradients(policy)
    policy.zero_grad()
    wanted = defined(policy, reference, pairs, length_normalised=length_normalised)
    wanted["loss"].backward()
    assert got.named().keys() == {"loss", *METRICS}
    for name, value in got.named().items():
        torch.testing.assert_close(value, wanted[name].detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found, gradients(policy), rtol=1e-4, atol=1e-6)


def test_a_row_without_targets_adds_nothing() -> None:
    policy, pairs = decoder(0), make_pairs(6)
    batch = with_reference(packed(pairs), decoder(1))
    padding = replace(batch, targets=torch.full_like(batch.targets, -100))
    padding.extra["reference_logprobs"].zero_()
    batch = with_reference(packed(pairs), decoder(1))
    wanted = step(policy, [batch], len(pairs), DpoConfig())
    before = gradients(policy)
    got = step(policy, [batch, padding], len(pairs), DpoConfig())
    assert got == wanted
    torch.testing.assert_close(gradients(policy), before, rtol=0, atol=0)


def trl_batch(pairs: list[Pair]) -> dict[str, Tensor]:
    """Return the pairs as TRL's collator does: all chosen, then all rejected, padded."""
    rows = [pair[side] for side in (0, 1) for pair in pairs]
    width = max(len(one.ids) for one in rows)

    def padded(values: list[list[int]]) -> Tensor:
        return torch.tensor([value + [0] * (width - len(value)) for value in values])

    return {
        "input_ids": padded([one.ids for one in rows]),
        "attention_mask": padded([[1] * len(one.ids) for one in rows]),
        "completion_mask": padded([[int(x) for x in one.mask] for one in rows]),
    }


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", ["sigmoid", "sigmoid_norm"])
def test_the_loss_and_gradients_equal_those_of_trl(tmp_path: Path, loss_type: str) -> None:
    datasets, transformers = pytest.importorskip("datasets"), pytest.importorskip("transformers")
    trl = pytest.importorskip("trl")
    folders = tmp_path / "policy", tmp_path / "reference"
    theirs: list[Any] = []
    ours = []
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer(), eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )
    sizes: Any = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16,
        "num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": SEQ_LEN, "initializer_range": 0.2, "eos_token_id": 256,
    }  # fmt: skip
    for seed, folder in enumerate(folders):
        torch.manual_seed(seed)
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
        theirs.append(model)
        trained = read_hf_folder(folder)
        model = Decoder(trained.arch)
        model.load_state_dict({name: tensor[()] for name, tensor in trained.state.items()})
        ours.append(model)
    text = {"prompt": ["a"] * 2, "chosen": ["b"] * 2, "rejected": ["c"] * 2}
    trainer = trl.DPOTrainer(
        model=theirs[0],
        ref_model=theirs[1],
        args=trl.DPOConfig(
            output_dir=str(tmp_path / "trl"), beta=BETA, loss_type=[loss_type], use_cpu=True,
            report_to="none", gradient_checkpointing=False, bf16=False,
        ),
        train_dataset=datasets.Dataset.from_dict(text),
        processing_class=tokenizer,
    )  # fmt: skip
    pairs = make_pairs(12, seed=3)
    trainer.model.train()
    theirs_loss = trainer.compute_loss(trainer.model, trl_batch(pairs))
    theirs_loss.backward()
    wanted = {
        name: p.grad.float() for name, p in trainer.model.named_parameters() if p.grad is not None
    }
    cfg = DpoConfig(beta=BETA, length_normalised=loss_type == "sigmoid_norm")
    got = step(ours[0], split(with_reference(packed(pairs), ours[1]), 2), len(pairs), cfg)
    assert got.loss.item() == pytest.approx(theirs_loss.item(), rel=1e-5)
    found = gradients(ours[0])
    for ours_name, theirs_name in NAMES.items():
        a, b = found[ours_name], wanted[theirs_name]
        assert ((a - b).norm() / b.norm()).item() < 1e-4, ours_name
    logged = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    if loss_type == "sigmoid":
        assert got.metrics["reward_margin"].item() == pytest.approx(
            logged["rewards/margins"], rel=1e-4
        )
        assert got.metrics["reward_accuracy"].item() == pytest.approx(logged["rewards/accuracies"])
    assert got.metrics["logp_chosen"].item() == pytest.approx(logged["logps/chosen"], rel=1e-5)


NAMES = {
    "embed.weight": "model.embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "norm.weight": "model.norm.weight",
    "layers.0.attn.v.weight": "model.layers.0.self_attn.v_proj.weight",
    "layers.0.attn.o.weight": "model.layers.0.self_attn.o_proj.weight",
    "layers.1.mlp.down.weight": "model.layers.1.mlp.down_proj.weight",
    "layers.1.attn_norm.weight": "model.layers.1.input_layernorm.weight",
}
"""Some parameters whose layout is the same in `transformers`."""
