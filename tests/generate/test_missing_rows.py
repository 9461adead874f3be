"""Tokens with ids above the rows of the model are refused by name by each command that reads text.

A tokenizer has such tokens if some were added without extending the embedding. An index beyond it
is an IndexError on a CPU, and on a GPU ends the process without naming anything.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.tiny_job import write_chat_job
from tokenizers import Tokenizer

from dtt.base.errors import ConfigError
from dtt.base.ranks import Ranks
from dtt.config.evaluation import EvalConfig
from dtt.evaluate.evaluation import open_evaluation
from dtt.evaluate.models import folder_model
from dtt.generate import run, web
from dtt.generate.chat_session import ChatSession
from dtt.generate.run import Sampling
from dtt.hf import export
from dtt.hf.model_source import find_chat_format, load_model, on_device
from dtt.mesh.dist import World
from dtt.model.generate import GeneratorPool

SAMPLING = Sampling(4, 0.0)
MODEL = Path("exports/tiny")
TASKS = {
    "options": 'type: multiple_choice\nprompt: "{q}"\nchoices: "{c}"\ngold: "{a}"\n',
    "replies": 'type: generation\nprompt: "{q}"\nanswer: "{q}"\nmax_tokens: 8\n',
    "rolling": 'type: rolling\nanswer: "{q}"\n',
}


def ask(text: str) -> object:
    """Ask as `dtt chat` and its server do."""
    trained = load_model(str(MODEL), ema=False)
    generator = GeneratorPool(on_device(trained, torch.device("cpu")), 1)
    encoder = find_chat_format(str(MODEL), None).encoder()
    session = ChatSession(encoder, trained, generator, SAMPLING)
    return session.ask({"role": "user", "content": text})


def complete(text: str) -> object:
    """Continue a text as the server does."""
    trained = load_model(str(MODEL), ema=False)
    return web.encode_prompt(text, trained.open_tokenizer(), trained, "the prompt")


def evaluate(task: str, *, chat: bool = False) -> Callable[[str], object]:
    def evaluated(text: str) -> object:
        row = {"q": text, "c": ["a", "b"], "a": 0}
        Path("rows.jsonl").write_text(json.dumps(row) + "\n")
        Path("mine.yaml").write_text(f"data: {{file: rows.jsonl}}\n{TASKS[task]}")
        how = find_chat_format(str(MODEL), None) if chat else None
        evaluation = open_evaluation(EvalConfig(tasks=("mine.yaml",)), chat=how)
        alone = World(Ranks(), torch.device("cpu"), None)
        return evaluation.run(folder_model(str(MODEL), MODEL), alone, lambda: False)

    return evaluated


DOORS: dict[str, Callable[[str], object]] = {
    "generate": lambda text: run.run(str(MODEL), [text], SAMPLING),
    "chat": ask,
    "completion of the server": complete,
    "eval of options": evaluate("options"),
    "eval of options in the chat format": evaluate("options", chat=True),
    "eval of replies": evaluate("replies"),
    "eval of whole texts": evaluate("rolling"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export whose tokenizer has got 70 tokens more than the 320 rows of the model hold."""
    folder = tmp_path_factory.mktemp("rows")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        export.run(str(write_chat_job(folder)), [], out=MODEL, upload=None, private=False)
    path = folder / MODEL / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_tokens([f"[added {n}]" for n in range(70)])
    tokenizer.save(str(path))
    return folder


@pytest.mark.parametrize("door", DOORS)
def test_a_token_without_a_row_is_named_and_any_other_is_read(
    door: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    answer = DOORS[door]("What is [added 9]?")  # id 268, of a row that training never used
    assert answer or capsys.readouterr().out
    with pytest.raises(ConfigError) as caught:
        DOORS[door]("What is [added 69]?")
    for words in ("[added 69] (id 328)", "exports/tiny/tokenizer.json", "rows (320)", "leave the"):
        assert words in str(caught.value)
