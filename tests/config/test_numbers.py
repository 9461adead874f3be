"""Extreme numbers are either valid or refused by the name of their key."""

from __future__ import annotations

import pytest

from dtt.base.errors import ConfigError
from dtt.config import explain
from dtt.config.load import resolve

EXTREMES = (
    *("0", "-1", "1", "2147483648", "9223372036854775807", "9223372036854775808", "9" * 400),
    *("0.5", "5e-324", "3e38", "1e308", ".nan", ".inf", "-.inf", "true", "null"),
)
SPELLINGS = (
    *("-0", "1_000_000", "0x7fffffffffffffff", "9" * 5000, "1e-400", "1e400", "nan", "inf"),
    *("2147483647", "4294967296", "-9223372036854775809", "1e-38", "1e-308", "-1e308"),
)
KEYS_OF_SPELLINGS = {
    *("seed", "train.steps", "model.dim", "optim.lr", "tokenize.validation_fraction"),
    # These read text of their own beside numbers.
    *("optim.weight_decay", "schedule.warmup", "schedule.decay", "parallel.shard"),
    *("launch.mem", "launch.time", "train.global_batch_tokens", "checkpoint.every"),
}
"""How YAML reads a number does not depend on its key, so few keys try these spellings."""
NEEDED = {
    "clean": ["clean.decontaminate.tasks=[core]", "clean.language.keep=[en]"],
    "objective": ["data.type=preference"],
    "scaling": ["scaling.base_dim=64"],
    "lora": ["init.from=hf:any", "optim.type=adamw"],
    "longrope": [
        "model.family=phi3",
        *(f"model.rope_scaling.{name}_factor={[1] * 32}" for name in ("short", "long")),
    ],
}
"""Arguments that a section or a variant needs beside its numbers."""


def _numeric_keys() -> list[tuple[str, tuple[str, ...]]]:
    """Return each key that may be a number, and the arguments that select its variant."""
    found: dict[tuple[str, tuple[str, ...]], None] = {}
    for key, cls, name in explain.all_fields():
        words = explain.type_in_words(cls.model_fields[name])
        if "integer" in words or "number" in words:
            kind = cls.model_fields.get("type")
            chosen = [] if kind is None else [f"{'.'.join(key[:-1])}.type={kind.default}"]
            needed = NEEDED.get(key[0], []) + NEEDED.get(getattr(kind, "default", ""), [])
            found[".".join(key), (*needed, *chosen)] = None
    return list(found)


@pytest.mark.slow(except_for=["seed-", "tokenize.validation_fraction-"])
@pytest.mark.parametrize(("key", "others"), _numeric_keys(), ids=lambda x: x if x else "")
def test_an_extreme_number_is_valid_or_refused_by_name(key: str, others: tuple[str, ...]) -> None:
    others = tuple(o for o in others if not o.startswith(f"{key}="))
    for text in (*EXTREMES, *(SPELLINGS if key in KEYS_OF_SPELLINGS else ())):
        message = key
        try:
            resolve(None, [*others, f"{key}={text}"], env={})
        except ConfigError as error:
            message = str(error)
        assert key.rpartition(".")[2] in message
        assert len(message) < 2000


@pytest.mark.parametrize(
    "argument",
    [
        *("seed=9223372036854775808", "seed=-1", f"train.steps={'9' * 20}", "model.dim=2000000000"),
        *("model.n_layers=100000000", "optim.weight_decay=1e308", "train.epochs=1e30"),
        *(
            "optim.weight_decay={value: 1e300, cautious: true}",
            "optim.weight_decay={value: 1e-300, horizon: true}",
        ),
        *("train.budget=99999999999d", "schedule.warmup=99999999999 B tokens", "optim.lr=1e-40"),
        *("model.vocab_size=2147483648", "model.max_seq_len=2147483648", "train.seq_len=1e10"),
        *("launch.nodes=9223372036854775807", "pipeline.train_processes=9223372036854775807"),
        "optim.groups=[{match: '*', lr: 1e300}]",
        "data.sources=[{path: a, weight: 1e300}]",
        "optim.adamw.betas=[0.9, 1e-320]",
        "train.context_schedule=[[0, 99999999999999999999]]",
    ],
)
def test_a_number_that_no_tensor_can_hold_is_refused(argument: str) -> None:
    with pytest.raises(ConfigError, match=argument.partition("=")[0]):
        resolve(None, [argument], env={})


def test_a_run_of_more_tokens_than_can_be_counted_is_refused() -> None:
    resolve(None, ["train.steps=100000000000000"], env={})
    with pytest.raises(ConfigError, match=r"train.steps: .* more than 2\^63 tokens"):
        resolve(None, ["train.steps=900000000000000"], env={})


def test_numbers_that_are_in_use_are_valid() -> None:
    """The widest and deepest published models, 64-bit seeds, GPT-3's vocabulary many times over."""
    config = resolve(
        None,
        [
            *("seed=9223372036854775807", "model.dim=65536", "model.n_heads=512"),
            *("model.n_layers=1024", "model.ffn_dim=262144", "model.vocab_size=1000000"),
            *("train.seq_len=1048576", "train.global_batch_tokens=1073741824", "optim.lr=1e-30"),
            *("model.rope_theta=1e9", "train.steps=1000000", "optim.weight_decay=0"),
        ],
        env={},
    ).config
    assert config.seed == 2**63 - 1
