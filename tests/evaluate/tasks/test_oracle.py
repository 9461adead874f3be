"""`dtt eval` and lm-evaluation-harness: same log-likelihoods and metrics.

`tests/support/lm_eval_oracle.py` compares every question of four tasks.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support import lm_eval_oracle as oracle
from support.forked import run_dtt
from tokenizers import processors

FAMILIES = ("gpt2", "llama", "qwen3", "mistral", "gemma3", "phi3")
ROWS = [
    {"id": i, "context": f"{'Long ago, ' * (i % 3 * 20)}{i} and {i + 1} are{' ' * (i % 2)}",
     "choices": [f"{2 * i + 1}.", "no numbers,\nperhaps", "naïve 数"], "gold": i % 3}
    for i in range(24)
]  # fmt: skip


def run(arguments: list[str], folder: Path) -> str:
    code, out, err = run_dtt(arguments, folder, {}, 170)
    assert code == 0, err
    return out


@pytest.mark.slow(except_for=["gpt2", "gemma3"])
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_lm_eval_with_transformers(family: str) -> None:
    cloze = [{"id": row["id"], "context": row["context"], "continuation": "1."} for row in ROWS]
    tasks = {"choices": ROWS, "cloze": cloze}
    bpe = oracle.train_tokenizer(text for rows in tasks.values() for text in oracle.texts_of(rows))
    if family == "phi3":  # as published tokenizers that add a token in front
        end = (oracle.END, bpe.token_to_id(oracle.END))
        bpe.post_processor = processors.TemplateProcessing(f"{end[0]} $A", None, [end])
    else:
        tasks["rolling"] = oracle.rolling_texts("A text of many words. " * 300, bpe)
    compared = oracle.compare_family(family, bpe, oracle.END, tasks, run)
    assert set(compared) == set(tasks)
    for name, one in compared.items():
        assert one.problems(rolling=name == "rolling") == []
        assert len(one.metrics) == 2
