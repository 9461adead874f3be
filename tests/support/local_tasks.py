"""Benchmark tasks of every type, with questions in local files."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import torch

from dtt.base.ranks import Ranks
from dtt.config.evaluation import EvalConfig
from dtt.evaluate.evaluation import choose_models, open_evaluation
from dtt.evaluate.tasks import runner
from dtt.mesh.dist import World

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
DEFINITIONS = {
    "sums": r"""
type: multiple_choice
prompt: "Q: {question}\nA:"
choices: "{choices}"
gold: "{gold}"
chance: 0.25
shots: {file: examples.jsonl}
""",
    "words": r"""
type: cloze
prompt: "{question}"
answer: "{answer}"
""",
    "names": r"""
type: schema
choices: "{choices}"
answer: "{answer}"
gold: "{gold}"
""",
    "pages": r"""
type: rolling
answer: "{text}"
""",
    "replies": r"""
type: generation
prompt: "Q: {question}\nA:"
answer: "{answer}"
max_tokens: 6
until: ["\n"]
""",
}
ALL_TASKS = ",".join(f"{name}.yaml" for name in DEFINITIONS)


def write_tasks(folder: Path, questions: int = 30) -> None:
    """Write a task of each type into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = random.Random(18)
    for name, definition in DEFINITIONS.items():
        (folder / f"{name}.yaml").write_text(f"data: {{file: {name}.jsonl}}{definition}")
        _write(folder / f"{name}.jsonl", [_row(drawn) for _ in range(questions)])
    _write(folder / "examples.jsonl", [_row(drawn) for _ in range(5)])


def _row(drawn: random.Random) -> dict[str, Any]:
    """Fields for every type of task."""
    choices = [" ".join(drawn.sample(WORDS, drawn.randint(1, 3))) for _ in range(4)]
    return {
        "question": " ".join(drawn.choices(WORDS, k=drawn.randint(3, 9))),
        "choices": choices,
        "gold": drawn.randrange(4),
        "answer": drawn.choice(WORDS),
        "text": " ".join(drawn.choices(WORDS, k=drawn.randint(3, 40))),
    }


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def evaluate_in_small_blocks(world: World, folder: str) -> None:
    """Evaluate all tasks on step 10 of the job `tiny`, with blocks of a few questions."""
    os.chdir(folder)
    runner.FIRST_BLOCK, runner.LARGEST_BLOCK = 2**7, 2**9
    cfg = EvalConfig(tasks=tuple(ALL_TASKS.split(",")), batch_tokens=256)
    evaluation = open_evaluation(cfg, world)
    [model] = choose_models("jobs/tiny", "10", None)
    assert evaluation.run(model, world, lambda: False) is not None


def evaluate_alone(folder: str) -> None:
    """Do so in a process without other ranks."""
    evaluate_in_small_blocks(World(Ranks(), torch.device("cpu"), None), folder)
