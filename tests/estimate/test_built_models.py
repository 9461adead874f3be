"""Plans of models that their family builds: weights and FLOPs are exact, activations are traced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dtt.config.load import resolve
from dtt.estimate import gpus
from dtt.estimate.activations import kept_by_block
from dtt.estimate.case import Case
from dtt.estimate.estimates import make_estimate

OWN = {"dim": 128, "ffn_dim": 384, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2}
LIBRARY = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
EXAMPLE = Path(__file__).parents[2] / "examples/residual_values.py"


def planned(model: dict[str, Any], *keys: str, seq_len: int = 512) -> Case:
    data = ("data.type=synthetic", "data.vocab_size=512", f"train.seq_len={seq_len}")
    common = ("train.micro_batch=2", "train.global_batch_tokens=16384", "train.compile=false")
    cfg = resolve(None, (*data, *common, *keys), {f"model.{k}": v for k, v in model.items()}).config
    return make_estimate(cfg, gpus.find("h100", 8), None).case


@pytest.mark.parametrize(
    "keys", [(), ("optim.type=adamw", "launch.gpus_per_node=8", "parallel.shard=8")]
)
def test_a_llama_of_the_library_is_planned_as_dtts_own(keys: tuple[str, ...]) -> None:
    own = planned({"family": "llama", "tie_embeddings": True, **OWN}, *keys)
    library = planned({"family": "transformers", "config": LIBRARY}, *keys)
    assert library.flops_per_token == own.flops_per_token
    by_shape = [sorted(case.all_weights, key=lambda w: w.shape) for case in (library, own)]
    for one, other in zip(*by_shape, strict=True):
        assert (one.shape, one.optimizer) == (other.shape, other.optimizer)
        assert one.in_block == other.in_block
    # The library's norms and rotations keep a few more tensors than dtt's.
    assert 1.0 < kept_by_block(library) / kept_by_block(own) < 1.4


def test_scores_count_only_where_the_library_keeps_them() -> None:
    def of(kind: str, seq_len: int) -> float:
        case = planned(
            {"family": "transformers", "config": {**LIBRARY, "model_type": kind, "head_dim": 32}},
            seq_len=seq_len,
        )
        return kept_by_block(case) / case.tokens

    assert of("llama", 2048) == pytest.approx(of("llama", 512))
    # Its plain attention keeps scores of 4 heads, [T, T], several times.
    assert of("gemma2", 2048) - of("gemma2", 512) > 2 * 2 * 4 * 1536


def test_a_model_of_a_users_own_is_planned_with_an_adapter() -> None:
    keys = ("adapter.type=lora", "adapter.rank=4", "init.from=jobs/base", "optim.type=adamw")
    model = {"family": f"{EXAMPLE}:ValueResiduals", "dim": 64, "layers": 2, "heads": 2}
    full, adapted = planned(model), planned(model, *keys)
    assert not full.adapter
    assert 0 < adapted.adapter == sum(weight.numel for weight in adapted.trained)
    assert adapted.flops_per_token < full.flops_per_token
