"""Published token files are recorded at their first download and verified ever after."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.loopback_hub import LoopbackHub
from support.published_files import REPO, TOKENIZER, learnable, publish, token_file
from support.script_process import ScriptProcess

SCRIPT = """
import json, sys
from dtt.bench.published_tokens import fetch
from dtt.bench.recipe import PublishedTokens
from dtt.base.errors import DttError
for line in sys.stdin:
    [options] = json.loads(line)
    try:
        tokens = PublishedTokens.model_validate_json(json.dumps(options))
        answer = fetch(tokens).model_dump(mode="json")
    except DttError as error:
        answer = {"error": str(error), "code": int(error.exit_code)}
    print(json.dumps(answer), flush=True)
"""
TRAIN = "fineweb_train_000001.bin"
NAMES = ["fineweb_val_000000.bin", TRAIN]


class Fetches(ScriptProcess):
    """A process that fetches published token files from a Hub on the loopback interface."""

    def __init__(self, hub: LoopbackHub, folder: Path) -> None:
        super().__init__(SCRIPT, hub.endpoint, folder)
        self.hub, self.folder = hub, folder

    def __call__(self, name: str, **options: Any) -> dict[str, Any]:
        tokens = {"repo": REPO, "files": NAMES, "tokenizer": TOKENIZER}
        return self.answer(tokens | {"folder": str(self.folder / name)} | options)


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fetches]:
    with LoopbackHub() as hub:
        process = Fetches(hub, tmp_path_factory.mktemp("published"))
        yield process
        process.close()


@pytest.fixture
def fetch(process: Fetches) -> Fetches:
    """The process, with the files on the Hub as they were published."""
    publish(process.hub, process.folder, [learnable(500), learnable(2000)])
    return process


def test_revision_and_hashes_are_recorded_and_nothing_is_asked_again(fetch: Fetches) -> None:
    first = fetch("plain")
    assert first["revision"] == fetch.hub.repos["dataset", REPO].commit
    assert [file["path"] for file in first["files"]] == [*NAMES, "tokenizer.json"]
    content = (fetch.folder / "plain" / TRAIN).read_bytes()
    assert content == fetch.hub.repos["dataset", REPO].files[TRAIN]
    before = len(fetch.hub.requests)
    assert fetch("plain") == first
    assert len(fetch.hub.requests) == before


def test_a_file_that_changed_after_the_download_is_named_with_both_hashes(fetch: Fetches) -> None:
    first = fetch("changed")
    recorded = first["files"][1]["sha256"]
    path = fetch.folder / "changed" / TRAIN
    original = path.read_bytes()
    path.write_bytes(original[:-1] + bytes([original[-1] ^ 1]))
    found = fetch("changed")
    assert found["code"] == 65
    for words in (str(path), recorded, f"rm {path}"):
        assert words in found["error"]
    path.write_bytes(original)
    os.utime(path, ns=(0, 0))
    healed = fetch("changed")
    assert [f["sha256"] for f in healed["files"]] == [f["sha256"] for f in first["files"]]


def test_a_missing_file_is_downloaded_again_at_the_recorded_revision(fetch: Fetches) -> None:
    first = fetch("missing")
    (fetch.folder / "missing" / TRAIN).unlink()
    again = fetch("missing")
    assert [f["sha256"] for f in again["files"]] == [f["sha256"] for f in first["files"]]
    (fetch.folder / "missing" / TRAIN).unlink()
    fetch.hub.repos["dataset", REPO].files[TRAIN] = token_file(learnable(100))
    gone = fetch("missing")
    assert gone["code"] == 2
    for words in (first["revision"], TRAIN, f"mv {fetch.folder / 'missing'} ANOTHER"):
        assert words in gone["error"]


def test_another_revision_or_repository_is_refused(fetch: Fetches) -> None:
    first = fetch("other")
    other = fetch("other", revision="0" * 40)
    assert other["code"] == 2
    for words in (first["revision"], "0" * 40, f"mv {fetch.folder / 'other'} ANOTHER"):
        assert words in other["error"]
    assert fetch("other", repo="org/else")["code"] == 2
    assert fetch("other", revision=first["revision"]) == first
    assert fetch("other", revision="v2")["code"] == 2


def test_a_file_that_the_recipe_does_not_name_is_refused(fetch: Fetches) -> None:
    fetch("stray")
    (fetch.folder / "stray/mine.bin").write_bytes(token_file(learnable(100)))
    found = fetch("stray")
    assert found["code"] == 66
    assert "runs would train on mine.bin" in found["error"]


@pytest.mark.parametrize(
    ("content", "code", "words"),
    [
        (token_file(learnable(100), version=2), 66, ["unknown version", "version 2"]),
        (token_file(learnable(100))[:-20], 65, ["shorter or longer than its header", "1,204"]),
        (token_file(learnable(100), count=99), 65, ["shorter or longer than its header", "99 ids"]),
        (learnable(400).astype("<u2").tobytes(), 66, ["no header of llm.c", "read as raw"]),
    ],
    ids=["version", "truncated", "count", "headerless"],
)
def test_a_malformed_file_is_refused_and_not_recorded(
    fetch: Fetches, content: bytes, code: int, words: list[str], request: pytest.FixtureRequest
) -> None:
    folder = request.node.callspec.id
    fetch.hub.repos["dataset", REPO].files[TRAIN] = content
    found = fetch(folder)
    assert found["code"] == code
    for word in (TRAIN, *words):
        assert word in found["error"]
    assert not (fetch.folder / folder / "published.json").exists()


def test_a_name_that_was_not_published_is_reported(fetch: Fetches) -> None:
    found = fetch("unknown", files=["fineweb_train_000009.bin"])
    assert found["code"] == 66
    assert "fineweb_train_000009.bin" in found["error"]
