"""`dtt data mix --write`: a mixture as a folder of links, which trains as the mixture does."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from support.running import Done, Dtt
from support.tiny_job import END_OF_DOCUMENT, make_tokenizer
from support.token_files import write_folder

from dtt.base.files import sha256_file
from dtt.config.load import resolve
from dtt.data.samples.dataset import Dataset, open_dataset

RUN = (
    "train: {seq_len: 32, global_batch_tokens: 256, steps: 20}\n"
    "data: {sources: [{path: tokens/**}, {path: apart/books, name: books}]}\n"
)


def token_folder(folder: Path, seed: int, *counts: int) -> None:
    """Token files of random documents, one shard for each count of tokens."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(seed)
    shards = {
        f"train-{i}": [[*random.integers(0, 256, count - 1).tolist(), END_OF_DOCUMENT]]
        for i, count in enumerate(counts)
    }
    manifest = write_folder(folder, shards)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    ours = {"end_of_document": END_OF_DOCUMENT, "vocab_size": 257, "key": f"key of {seed}"}
    ours |= {"tokenizer_sha256": sha256_file(folder / "tokenizer.json")}
    (folder / manifest.filename).write_text(manifest.model_copy(update=ours).dump())


@pytest.fixture
def project(dtt: Dtt, monkeypatch: pytest.MonkeyPatch) -> Dtt:
    """Three token folders of 6,000, 1,000 and 3,000 tokens, and a run on all of them."""
    token_folder(dtt.folder / "tokens/web/2024", 1, 4000, 2000)
    token_folder(dtt.folder / "tokens/code", 2, 1000)
    token_folder(dtt.folder / "apart/books", 3, 3000)
    (dtt.folder / "run.yaml").write_text(RUN)
    monkeypatch.chdir(dtt.folder)
    return dtt


def write(project: Dtt, *arguments: str, into: str = "mix", expect: int = 0) -> Done:
    """Run `dtt data mix --write`."""
    return project("data", "mix", "-c", "run.yaml", "--write", into, *arguments, expect=expect)


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every path below a folder, with its time of change and its content or target."""
    found = {}
    for parent, folders, files in os.walk(folder):
        for path in (Path(parent, name) for name in [*folders, *files]):
            content = str(path.readlink()).encode() if path.is_symlink() else b""
            content = path.read_bytes() if path.is_file() and not content else content
            found[str(path.relative_to(folder))] = (path.lstat().st_mtime_ns, content)
    return found


def opened(*arguments: str) -> Dataset:
    return open_dataset(resolve("run.yaml", arguments, env={}).config)


def test_the_folder_has_links_statistics_and_megatrons_list(project: Dtt) -> None:
    before = snapshot(project.folder / "tokens")
    facts = json.loads(write(project, "--json").stdout)
    assert snapshot(project.folder / "tokens") == before
    mix = project.folder / "mix"
    assert str((mix / "web/2024").readlink()) == "../../tokens/web/2024"
    assert str((mix / "books").readlink()) == "../apart/books"
    written = json.loads((mix / "mixture.json").read_text())
    assert facts == {"folder": "mix", "state": "written", **written}
    # 31, 187 and 93 samples of 32 tokens.
    assert written["sources"] == [
        {"name": "code", "share": 31 / 311, "tokens": 1000, "files": 1, "bytes": 2000},
        {"name": "web/2024", "share": 187 / 311, "tokens": 6000, "files": 2, "bytes": 12000},
        {"name": "books", "share": 93 / 311, "tokens": 3000, "files": 1, "bytes": 6000},
    ]
    table = (mix / "mixture.txt").read_text().splitlines()
    assert table[2].split() == ["web/2024", "60.129%", "6,000", "2", "12,000"]
    assert table[4].split() == ["total", "100.000%", "10,000", "4", "20,000"]
    words = (mix / "megatron.txt").read_text().split()
    weights = dict(zip(words[1::2], map(float, words[::2]), strict=True))
    assert weights["mix/web/2024/train-0"] == pytest.approx(2 * weights["mix/web/2024/train-1"])
    assert sum(weights.values()) == pytest.approx(1)
    for prefix in weights:
        for suffix in (".bin", ".idx"):
            assert (project.folder / f"{prefix}{suffix}").is_file()
    assert not list(project.folder.glob(".mix*"))


def test_writing_it_again_changes_nothing(project: Dtt) -> None:
    assert "written  mix" in write(project).stdout
    before = snapshot(project.folder / "mix")
    assert "unchanged  mix" in write(project).stdout
    # The length of the run is no part of a mixture.
    assert "unchanged  mix" in write(project, "train.steps=30").stdout
    assert snapshot(project.folder / "mix") == before


def test_the_written_folder_is_the_same_mixture_wherever_it_is(project: Dtt) -> None:
    write(project)
    ours = opened()
    theirs = opened("data.sources=[{path: mix/**}]")
    # The order of the sources is that of their names now, which is another key: so by name.
    assert dict(theirs.manifest.named_keys) == dict(ours.manifest.named_keys)
    assert theirs.shares() == ours.shares()
    for source in ours.sources:
        [same] = [other for other in theirs.sources if other.name == source.name]
        order = source.order(0, 2 * len(source))
        assert np.array_equal(same.order(0, 2 * len(source)), order)
        assert np.array_equal(same.read(order).ids, source.read(order).ids)
    alone = "data.sources=[{path: tokens/**}]"
    write(project, alone, into="other/mix")
    moved = project.folder / "moved"
    shutil.copytree(project.folder / "other", moved, symlinks=True)
    pattern = "data.sources=[{path: moved/mix/**}]"
    assert opened(pattern).manifest.key == opened(alone).manifest.key
    assert np.array_equal(opened(pattern).order(0, 160), opened(alone).order(0, 160))
    steps = ("model.dim=16", "model.n_layers=1", "model.n_heads=2", "train.steps=4",
             "checkpoint.every=2", "train.sample_tokens=0", "name=t")  # fmt: skip
    metrics = []
    for sources in (alone, pattern):
        shutil.rmtree(project.folder / "jobs", ignore_errors=True)
        project("train", "-c", "run.yaml", sources, *steps)
        lines = (project.folder / "jobs/t/metrics.jsonl").read_text().splitlines()
        train = [r for r in map(json.loads, lines) if r["kind"] == "train"]
        metrics.append([(r["step"], r["loss"], r["ledger"]) for r in train])
    assert len(metrics[0]) == 4
    assert metrics[0] == metrics[1]


def test_a_folder_that_holds_something_else_is_refused_and_left_as_it_is(project: Dtt) -> None:
    mix = project.folder / "mix"
    mix.mkdir()
    write(project)  # an empty folder is as good as none
    other = write(project, "data.sources=[{path: tokens/**}]", expect=2).stderr
    assert "mix holds something else" in other
    assert "books" in other
    weighted = "data.sources=[{path: tokens/**, weight: 1}, {path: apart/books, weight: 1}]"
    assert "mixture.json" in write(project, weighted, expect=2).stderr
    (mix / "notes.txt").write_text("mine")
    before = snapshot(mix)
    assert "notes.txt" in write(project, expect=2).stderr
    assert snapshot(mix) == before
    for name in ("run.yaml", ".", "mix/.."):
        assert f"{name} is not a new folder" in write(project, into=name, expect=2).stderr


def test_a_pair_of_megatron_becomes_a_folder_with_two_links(project: Dtt) -> None:
    for suffix in (".bin", ".idx"):
        shutil.copy(f"apart/books/train-0{suffix}", f"books_text{suffix}")
        shutil.copy(f"apart/books/train-0{suffix}", f"books_val{suffix}")
    tokenizer = "data.tokenizer=tokens/code/tokenizer.json"
    pair = ["data.sources=[{path: books_text}]", tokenizer]
    write(project, *pair)
    assert str(Path("mix/books_text/books_text.idx").readlink()) == "../../books_text.idx"
    assert Path("mix/megatron.txt").read_text() == "1 mix/books_text/books_text\n"
    same = opened("data.sources=[{path: mix/**}]", tokenizer)
    assert same.manifest.named_keys == opened(*pair).manifest.named_keys
    held_out = write(project, "data.sources=[{path: books_val}]", tokenizer, expect=2).stderr
    assert "would be taken for held-out text" in held_out


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["data.weights=[{step: 2, weights: {tokens/**: 1, books: 2}}]"], "changing weights"),
        (["data.type=synthetic"], "only a mixture of token files"),
        (["data.sources=[{path: apart/books, name: a/../b}]"], "cannot be that of a folder"),
        (["data.sources=[{path: apart/books, name: /b}]"], "cannot be that of a folder"),
        (["data.sources=[{path: apart/books, name: mixture.json}]"], "cannot be that of a folder"),
        (["data.sources=[{path: apart/books, validation: tokens/code}]"], "held-out files"),
        (["data.sources=[{path: apart/books}, {path: apart/books, name: b}]"], "two names"),
        (
            ["data.sources=[{path: apart/books, name: a}, {path: tokens/code, name: a/b}]"],
            "token folders within others: a/b",
        ),
    ],
)
def test_a_mixture_that_a_folder_cannot_express_is_refused(
    project: Dtt, arguments: list[str], why: str
) -> None:
    before = snapshot(project.folder)
    assert why in write(project, *arguments, expect=2).stderr
    for folder, entry in (("tokens/mix", "tokens/**"), ("apart/books/mix", "books")):
        refused = write(project, into=folder, expect=2).stderr
        assert f"lies among the token files of {entry}" in refused
    assert {name: c for name, (_, c) in snapshot(project.folder).items()} == {
        name: c for name, (_, c) in before.items()
    }


def test_a_token_folder_within_another_is_written_once(project: Dtt) -> None:
    token_folder(project.folder / "tokens/web/2024/more", 4, 500)
    write(project)
    written = json.loads(Path("mix/mixture.json").read_text())
    names = ["code", "web/2024", "web/2024/more", "books"]
    assert [source["name"] for source in written["sources"]] == names
    assert opened("data.sources=[{path: mix/**}]").shares() == opened().shares()
    listed = "data.sources=[{path: tokens/web/2024, name: web}]"
    found = write(project, listed, into="web", expect=2).stderr
    assert "token folders within others: web/more" in found
