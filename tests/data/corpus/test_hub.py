"""Hub datasets arrive as they are, pinned to a commit, and only what is missing is fetched."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.corpora import parquet
from support.script_process import ScriptProcess

from dtt.data.corpus.hub import MODEL_FILES


def loopback_hub() -> ModuleType:
    return importlib.import_module("support.loopback_hub")


SCRIPT = """
import json, sys
from pathlib import Path
from dtt.config.data import DownloadConfig
from dtt.data.corpus.download import download
from dtt.base.errors import DttError
for line in sys.stdin:
    out, options = json.loads(line)
    try:
        cfg = DownloadConfig.model_validate_json(json.dumps(options))
        answer = download(cfg, Path(out)).model_dump(mode="json")
    except DttError as error:
        answer = {"error": str(error), "code": int(error.exit_code)}
    print(json.dumps(answer), flush=True)
"""


class Downloads(ScriptProcess):
    """A process that downloads from a Hub on the loopback interface."""

    def __init__(self, hub: Any, folder: Path, **env: str) -> None:
        super().__init__(SCRIPT, hub.endpoint, folder, **env)
        self.hub, self.folder = hub, folder

    def __call__(self, out: str, **options: Any) -> dict[str, Any]:
        return self.answer(str(self.folder / out), options)


FILES = {
    "README.md": b"# A dataset",
    "data/train-00000-of-00002.parquet": parquet(["a", "b"]),
    "data/train-00001-of-00002.parquet": parquet(["c"] * 5000),
    "data/test-00000-of-00001.parquet": parquet(["d"]),
}
MULTI = {
    "README.md": b"---\nconfigs:\n- config_name: en\n  data_files: en/*.jsonl\n"
    b"- config_name: de\n  data_files: de/*.jsonl\n---\n",
    "en/a.jsonl": b'{"text": "english"}\n',
    "de/a.jsonl": b'{"text": "deutsch"}\n',
}

NOTES = {
    ".gitattributes": b"*.png filter=lfs",
    "README.md": b"# Notes",
    "notes/one.md": b"one",
    "notes/two.md": b"two",
    "notes/three.rst": b"three",
    "notes/a.png": b"\x89PNG\r\n\x1a\n\0",
}


@pytest.fixture(scope="module")
def downloads(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Downloads]:
    with loopback_hub().LoopbackHub() as hub:
        hub.add("dataset", "org/plain", FILES)
        hub.add("dataset", "org/multi", MULTI)
        hub.add("dataset", "org/notes", NOTES)
        hub.add("dataset", "org/gated", FILES, gated=True)
        hub.add("dataset", "org/script", {"script.py": b"print(1)"})
        hub.add("dataset", "org/images", {"train/a.png": b"\x89PNG", "train/b.png": b"\x89PNG"})
        process = Downloads(hub, tmp_path_factory.mktemp("hub"))
        yield process
        process.close()


def test_the_files_of_a_split_arrive_as_they_are_with_their_commit(downloads: Downloads) -> None:
    manifest = downloads("plain", dataset="org/plain")
    commit = downloads.hub.repos["dataset", "org/plain"].commit
    assert manifest["source"] == {
        "kind": "hub",
        "id": "org/plain",
        "name": None,
        "split": "train",
        "revision": commit,
        "max_files": None,
        "include": [],
        "exclude": [],
    }
    names = [name for name in FILES if "train" in name]
    assert [file["path"] for file in manifest["files"]] == names
    for name in names:
        assert (downloads.folder / "plain" / name).read_bytes() == FILES[name]
    assert not (downloads.folder / "plain/data/test-00000-of-00001.parquet").exists()


def test_a_rerun_asks_the_hub_nothing_and_fetches_only_what_is_missing(
    downloads: Downloads,
) -> None:
    first = downloads("again", dataset="org/plain")
    before = len(downloads.hub.requests)
    assert downloads("again", dataset="org/plain") == first
    assert len(downloads.hub.requests) == before
    gone = "data/train-00001-of-00002.parquet"
    (downloads.folder / "again" / gone).unlink()
    again = downloads("again", dataset="org/plain")
    assert [file["sha256"] for file in again["files"]] == [f["sha256"] for f in first["files"]]
    reads = [r for r in downloads.hub.requests[before:] if r.startswith("GET /datasets/")]
    assert [r for r in reads if "parquet" in r] == [r for r in reads if gone in r] != []


def test_a_download_resumes_after_a_broken_connection(downloads: Downloads) -> None:
    downloads.hub.cut_next_read_at = 100
    answer = downloads("cut", dataset="org/plain", split="test")
    if "error" in answer:
        assert answer["code"] == 78
        assert "kept" in answer["error"]
        answer = downloads("cut", dataset="org/plain", split="test")
    name = answer["files"][0]["path"]
    assert (downloads.folder / "cut" / name).read_bytes() == FILES[name]


def test_a_subset_a_split_and_a_number_of_files_can_be_chosen(downloads: Downloads) -> None:
    assert downloads("de", dataset="org/multi", name="de")["files"][0]["path"] == "de/a.jsonl"
    assert downloads("test", dataset="org/plain", split="test")["source"]["split"] == "test"
    assert len(downloads("one", dataset="org/plain", max_files=1)["files"]) == 1
    assert len(downloads("one", dataset="org/plain")["files"]) == 2


def test_patterns_choose_the_files_that_are_fetched(downloads: Downloads) -> None:
    options = {"dataset": "org/notes", "include": ["**/*.md"], "exclude": ["/README.md"]}
    manifest = downloads("notes", **options)
    assert [file["path"] for file in manifest["files"]] == ["notes/one.md", "notes/two.md"]
    assert (manifest["file_format"], manifest["txt_documents"]) == ("txt", "file")
    assert manifest["source"]["include"] == manifest["request"]["include"] == ["**/*.md"]
    assert manifest["source"]["split"] is None
    fetched = {path.name for path in (downloads.folder / "notes").rglob("*") if path.is_file()}
    assert not fetched & {"README.md", "three.rst", "a.png"}
    more = downloads("notes", dataset="org/notes", include=["notes/*.rst"])
    assert [file["path"] for file in more["files"]] == ["notes/three.rst"]


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        ({"dataset": "org/none"}, 66, ["no dataset org/none: neither", "hf auth login"]),
        ({"dataset": "org/gated"}, 66, ["gated", "request access", "hf auth login"]),
        ({"dataset": "org/multi"}, 2, ["subset", "'en', 'de'", "download.name="]),
        ({"dataset": "org/multi", "name": "fr"}, 2, ["'fr' not found", "'en', 'de'"]),
        (
            {"dataset": "org/plain", "split": "dev"},
            2,
            ["no split 'dev'", "train, test", "download.split=train"],
        ),
        ({"dataset": "org/plain", "revision": "v9"}, 2, ["no revision 'v9'"]),
        ({"dataset": "org/plain", "text_column": "body"}, 2, ["no column 'body'", "text"]),
        ({"dataset": "org/script"}, 66, ["no plain data files"]),
        ({"dataset": "org/images"}, 66, ["a.png"]),
        ({"dataset": "org/notes"}, 66, ["two.md", "download.include=['**/*.md']"]),
        ({"dataset": "org/notes", "include": ["*.txt"]}, 2, ["matches '*.txt'"]),
        ({"dataset": "org/notes", "include": ["notes/"]}, 66, ["a.png", "NUL bytes", "exclude="]),
    ],
)
def test_each_mistake_is_reported_with_what_to_do(
    downloads: Downloads, options: dict[str, Any], code: int, words: list[str]
) -> None:
    answer = downloads(f"wrong-{code}", **options)
    assert answer["code"] == code, answer
    for word in words:
        assert word in answer["error"]


@pytest.mark.slow
def test_without_the_hub_a_complete_corpus_is_still_done_and_others_are_reported(
    downloads: Downloads,
) -> None:
    first = downloads("offline", dataset="org/plain")
    for env, word in (
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE"),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "cannot reach the Hub for a dataset org/plain"),
    ):
        cut_off = Downloads(downloads.hub, downloads.folder, **env)
        assert cut_off("offline", dataset="org/plain") == first
        answer = cut_off("nothing", dataset="org/plain")
        cut_off.close()
        assert answer["code"] == 78
        assert word in answer["error"]
        assert "no file or folder org/plain" in answer["error"]


def test_the_index_of_a_sharded_model_is_fetched_with_its_shards() -> None:
    from huggingface_hub.utils import filter_repo_objects

    wanted = ["model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    offered = [*wanted, "pytorch_model.bin", "onnx/model.onnx"]
    assert list(filter_repo_objects(offered, allow_patterns=MODEL_FILES)) == wanted
