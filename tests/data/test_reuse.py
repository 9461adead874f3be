"""What a rerun keeps, what it makes anew and why."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.corpora import json_lines
from support.token_files import sums
from support.tokenizing import ask, run

from dtt.base.errors import ConfigError
from dtt.config.data import TrainedTokenizerConfig
from dtt.data.tokenize import markers


@pytest.fixture
def corpus(corpora: Any) -> Path:
    """Return the folder of a corpus."""
    texts = [f"{i} alpha beta {i * i} gamma" for i in range(2000)]
    made: Path = corpora.make({"a.jsonl": json_lines(texts)}).folder
    return made


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that were read to be verified."""
    names: list[str] = []
    sha256_file = markers.sha256_file

    def noted(path: Path) -> str:
        names.append(path.name)
        return sha256_file(path)

    monkeypatch.setattr(markers, "sha256_file", noted)
    return names


def test_only_files_modified_since_they_were_hashed_are_hashed_again(
    corpus: Path, tmp_path: Path, hashed: list[str]
) -> None:
    out = tmp_path / "out"
    run(corpus, out)
    paths = [path for path in out.rglob("*") if path.name != ".lock"]
    before = [path.stat().st_mtime_ns for path in paths]
    assert run(corpus, out).units == 0
    assert hashed == []
    assert [path.stat().st_mtime_ns for path in paths] == before
    (out / "train-00001.bin").touch()
    assert run(corpus, out).units == 0
    assert run(corpus, out).units == 0
    assert hashed == ["train-00001.bin"]


def test_markers_without_the_state_of_files_cost_only_time(
    corpus: Path, tmp_path: Path, hashed: list[str]
) -> None:
    """Those of earlier versions, which had a file of its own for it."""
    out = tmp_path / "out"
    shards = len(run(corpus, out).manifest.shards)
    for path in out.glob(".units/0*.json"):
        marker = json.loads(path.read_text())
        del marker["files"]
        path.write_text(json.dumps(marker))
    assert run(corpus, out).units == 0
    assert len(hashed) == 2 * shards
    assert run(corpus, out).units == 0
    assert len(hashed) == 2 * shards


def test_a_plan_has_the_units_that_are_damaged_or_lost_with_the_reasons(
    corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    assert set(ask(corpus, out).pending.values()) == {"not made yet"}
    run(corpus, out)
    assert ask(corpus, out).complete

    whole, damaged = sums(out), out / "train-00001.bin"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\xff")
    for name, change in (("train-00003.bin", -2), ("train-00004.bin", 2)):
        os.truncate(out / name, (out / name).stat().st_size + change)
    (out / "validation-00002.idx").unlink()
    (out / "tokenizer.json").unlink()
    with caplog.at_level("INFO", "dtt"):
        plan = ask(corpus, out)
    assert "tokenizer.json is missing or damaged" in caplog.text
    assert not plan.complete
    assert "train-00001.bin is damaged: its sha256" in plan.pending.pop(1)
    assert "validation-00002.idx is missing" in plan.pending.pop(2)
    assert {*plan.pending} == {3, 4}
    assert run(corpus, out).units == 4
    assert sums(out) == whole


def test_every_difference_is_refused_by_name(corpus: Path, corpora: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(corpus, out)
    differences = (
        r"tokenize\.validation_fraction is 0\.1 there, 0\.2 now; "
        r"tokenizer\.vocab_size is 300 there, 310 now[^$]*--overwrite"
    )
    other = TrainedTokenizerConfig(vocab_size=310)
    with pytest.raises(ConfigError, match=differences):
        run(corpus, out, other, validation_fraction=0.2)
    corpora.folder = tmp_path / "another"
    another = corpora.make({"a.jsonl": b'{"text": "x"}\n' * 2000}).folder
    with pytest.raises(ConfigError, match=r"corpus\.sha256 is '"):
        ask(another, out)


@pytest.mark.parametrize("name", ["tokenizer.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["{", None], ids=["damaged", "gone"])
def test_a_lost_file_is_made_again_and_no_unit_is_encoded_again(
    corpus: Path, tmp_path: Path, name: str, damage: str | None
) -> None:
    run(corpus, tmp_path)
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_text(damage) if damage else (tmp_path / name).unlink()
    assert ask(corpus, tmp_path).pending == {}
    assert run(corpus, tmp_path).units == 0
    assert (tmp_path / name).read_bytes() == content
