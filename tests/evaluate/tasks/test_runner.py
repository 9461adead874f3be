"""The runner: which answers are right, and errors on every rank."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import on_ranks
from support.tiny_job import END_OF_DOCUMENT, make_tokenizer

from dtt.base import patterns
from dtt.base.errors import ConfigError, Diverged, EnvironmentUnfit
from dtt.base.files import exclusive
from dtt.base.ranks import Ranks
from dtt.config.model import ModelConfig
from dtt.evaluate.tasks.definition import load_tasks, shipped_tasks
from dtt.evaluate.tasks.encoding import QuestionEncoder
from dtt.evaluate.tasks.result_files import ResultFile
from dtt.evaluate.tasks.runner import TaskRunner, _Reply
from dtt.evaluate.tasks.scorer import Generator, Scorer
from dtt.evaluate.tasks.task_data import TaskData, open_task
from dtt.mesh.dist import World, start
from dtt.model import families
from dtt.model.decoder import Decoder
from dtt.model.init import initialize

TURN = "<|im_end|>"
READS = 48
"""Tokens that the model reads."""


def make_runner(world: World) -> TaskRunner:
    torch.set_num_threads(1)
    cfg = ModelConfig(family="gpt2", dim=32, n_layers=1, n_heads=4)
    model = Decoder(families.get("gpt2").architecture(cfg, 264, READS))
    initialize(model, seed=0)
    encoder = QuestionEncoder(make_tokenizer(TURN), END_OF_DOCUMENT, READS, "tokenizer")
    scorer, generator = (
        Scorer(model, world, batch_tokens=2 * READS),
        Generator(model, world, batch_tokens=2 * READS),
    )
    return TaskRunner(scorer, generator, encoder, world, (END_OF_DOCUMENT,), keep_samples=True)


def make_task(folder: Path, definition: str, rows: list[dict[str, Any]]) -> TaskData:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "mine.yaml").write_text(f"data: {{file: rows.jsonl}}\n{definition}")
    [task] = load_tasks([str(folder / "mine.yaml")])
    return open_task(task, folder, limit=None, shots=None)


REPLIES = 'type: generation\nprompt: "{q}"\nanswer: "{a}"\nmax_tokens: 8\n'


class Repeated(Generator):
    """Generates the same ids for every prompt."""

    ids: tuple[int, ...] = ()

    def generate(self, prompts: Any, *_: Any) -> list[list[int]]:
        return [list(self.ids) for _ in prompts]


def answered(
    folder: Path, said: str, definition: str, accepted: str, chat: str | None = None
) -> dict[str, Any]:
    """The record of a question to a model that says `said`; `chat` is the rendered prompt."""
    world = start(Ranks(), "cpu")
    runner = make_runner(world)
    if chat is not None:
        runner.encoder._chat = lambda _: runner.encoder.tokenizer.encode(chat).ids
    generator = Repeated(runner.scorer.model, world, batch_tokens=1)
    ids = tuple(runner.encoder.tokenizer.encode(said).ids)
    object.__setattr__(generator, "ids", ids)
    object.__setattr__(runner, "generator", generator)
    data = make_task(folder, REPLIES + definition, [{"q": "?", "a": accepted}])
    file = ResultFile.of(folder, {"task": "mine"})
    runner.run(data, file)
    return dict(json.loads(file.path.read_text().splitlines()[1]))


def test_a_prompt_that_was_truncated_is_counted(tmp_path: Path) -> None:
    rows = [{"q": "x" * length, "a": "y"} for length in (READS - 8, READS - 7)]
    result = make_runner(start(Ranks(), "cpu")).run(make_task(tmp_path, REPLIES, rows), None)
    assert result is not None
    assert result.truncated == 1


def test_a_special_token_in_until_ends_an_answer(tmp_path: Path) -> None:
    record = answered(tmp_path, f"yes{TURN}no", f"until: ['{TURN}']\n", "yes")
    assert (record["answer"], record["exact_match"]) == ("yes", True)


@pytest.mark.parametrize(
    ("said", "prompt", "answer", "unfinished"),
    [
        ("<think>5\n\n6</think>7\n\n8", "?", "7", False),
        ("5</think> 7", "?<think>\n", " 7", False),
        ("<think>5\n\n6", "?", "", True),
        ("5", "?<think>\n", "", True),
        ("[THINK]5[/THINK]7", "?", "7", False),
        ("7 </think> 8", "?", "7 </think> 8", False),
        ("<think>5</think>7", None, "<think>5</think>7", False),
    ],
)
def test_the_answer_of_a_conversation_is_what_follows_the_reasoning(
    said: str, prompt: str | None, answer: str, unfinished: bool, tmp_path: Path
) -> None:
    record = answered(tmp_path, said, "until: ['\\n\\n']\n".replace("'", '"'), "7", chat=prompt)
    assert (record["answer"], record["unfinished"]) == (answer, unfinished)
    assert record["exact_match"] == (answer.strip() == "7")


def test_an_answer_ends_as_soon_as_until_is_there_however_it_is_tokenized(tmp_path: Path) -> None:
    runner = make_runner(start(Ranks(), "cpu"))
    task = make_task(tmp_path, f"{REPLIES}until: [b, cd]\n", [{"q": "?", "a": "x"}]).task
    ids = runner.encoder.tokenizer.encode("xacdy").ids
    reply = _Reply(task, runner.encoder, [1])
    assert [reply.add(token) for token in ids[:4]] == [False, False, False, True]
    assert reply.answer == "xa"


@pytest.mark.parametrize(
    ("said", "definition", "right"),
    [
        ("The answer is 4.", "extract: 'is (\\d)'\n", True),
        ("I do not know", "extract: 'is (\\d)'\nignore: ['\\d']\n", False),
        ("nothing is said", "extract: '(\\d)?nothing'\nignore: ['4']\n", False),
        ("", "ignore: ['4']\n", False),
    ],
)
def test_an_answer_that_is_not_there_is_never_right(
    said: str, definition: str, right: bool, tmp_path: Path
) -> None:
    """With `ignore`, nothing is left of the accepted answer either."""
    assert answered(tmp_path, said, definition, "4")["exact_match"] == right


SLOW = "(a|aa)+$"


@pytest.mark.parametrize(
    "definition", [f"extract: {SLOW}\n", f"ignore: [{SLOW}]\n", f"replace: [{{regex: {SLOW}}}]\n"]
)
def test_a_regular_expression_that_takes_too_long_is_an_error(
    definition: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patterns, "SECONDS", 0.1)
    text = "a" * 60 + "b"
    with pytest.raises(ConfigError, match=r"takes more than 0.1 s for 61 characters") as error:
        answered(tmp_path, text, definition, text)
    assert "the task mine" in str(error.value)
    assert ("question " in str(error.value)) == ("replace" not in definition)
    assert ("rows.jsonl, row 0" in str(error.value)) == ("replace" in definition)


def test_regular_expressions_of_shipped_tasks_are_those_of_re() -> None:
    drawn, found = random.Random(0), 0
    texts = ["".join(drawn.choices("ab ()[]{}'\"/.,#-$09é\n", k=40)) for _ in range(2000)]
    texts += ["so 1 + 1 = 2\n#### 2", "[header] Wash  it ( twice ). [title]"]
    for task in load_tasks([path.stem for path in shipped_tasks().glob("[!s]*.yaml")]):
        rules = [(str(rule.regex), rule.to) for rule in task.replace if rule.regex is not None]
        rules += [(pattern, "") for pattern in (*task.ignore, *filter(None, [task.extract]))]
        for pattern, to in rules:
            found += 1
            for text in texts:
                assert patterns.replace(pattern, to, text) == re.sub(pattern, to, text)
    assert found >= 12


def test_a_task_without_room_for_a_prompt_is_refused_before_anything_is_answered(
    tmp_path: Path,
) -> None:
    data = make_task(tmp_path, REPLIES.replace("8", str(READS)), [{"q": "?", "a": "y"}])
    with pytest.raises(ConfigError, match="no room for a prompt") as error:
        make_runner(start(Ranks(), "cpu")).check([data])
    assert "max_tokens of the task mine" in str(error.value)


def errors_of_rank_0(world: World, folder: str) -> list[str]:
    """Another process writes the file; the disk is full when a block is appended."""
    found = []
    data = make_task(Path(folder, str(world.rank)), REPLIES, [{"q": "?", "a": "y"}])
    file = ResultFile.of(Path(folder), {"task": "mine"})
    runner = make_runner(world)
    for name in ("locked", "full"):
        try:
            if name == "locked" and world.first:
                with exclusive(Path(folder), "dtt eval", name=f".{file.path.name}.lock"):
                    runner.run(data, file)
            else:
                if name == "full" and world.first:
                    full(file)
                runner.run(data, file)
        except (EnvironmentUnfit, OSError) as error:
            found.append(type(error).__name__)
    return found


def full(file: ResultFile) -> None:
    from dtt.evaluate.tasks.result_files import ResultContent

    def append(self: ResultContent, records: Any) -> None:
        raise OSError(28, "No space left on device")

    ResultContent.append = append  # type: ignore[method-assign]  # a process of its own


def test_an_error_of_rank_0_is_raised_on_every_rank(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    assert on_ranks(2, errors_of_rank_0, str(tmp_path)) == [["InUse", "OSError"]] * 2


def diverged_answers(world: World, folder: str) -> tuple[str, bool]:
    data = make_task(Path(folder, str(world.rank)), REPLIES, [{"q": "?", "a": "y"}])
    runner = make_runner(world)
    torch.nn.init.constant_(runner.scorer.model.get_parameter("norm.weight"), torch.nan)
    file = ResultFile.of(Path(folder), {"task": "mine"})
    try:
        runner.run(data, file)
    except Diverged as error:
        return type(error).__name__, file.result() is None
    return "", False


def test_answers_of_a_diverged_model_are_an_error_on_every_rank(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    assert on_ranks(2, diverged_answers, str(tmp_path)) == [("Diverged", True)] * 2
