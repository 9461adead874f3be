"""Patterns in `data.sources`: which folders they match, under which names."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.token_files import END, write_folder

from dtt.artifacts.token_folders import token_paths, token_sources
from dtt.base.errors import ConfigError, DttError, InputError
from dtt.config.load import resolve
from dtt.config.merging import Resolved
from dtt.config.run import RunConfig
from dtt.config.stages import trained_tokenizer


def config(*arguments: str) -> RunConfig:
    return resolve(None, arguments, env={}).config


def names(root: Path, *more: str) -> list[str]:
    cfg = config(f"data.sources=[{{path: {root}/**{''.join(more)}}}]")
    found = token_sources(cfg)
    assert token_paths(cfg) == tuple(source.path for source in found)
    return [source.label for source in found]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Token folders at three depths, one of them within another, beside other files."""
    root = tmp_path / "tokens"
    for name in ("web/2024", "books", "web", "web/old/a"):
        (root / name).mkdir(parents=True, exist_ok=True)
        write_folder(root / name, {"train-0": [[1, 2, END]]})
    (root / "logs").mkdir()
    (root / "logs/manifest.json").write_text('{"format": "of something else"}')
    (root / "notes.txt").write_text("not tokens")
    (root / ".trash").mkdir()
    write_folder(root / ".trash", {"train-0": [[1, 2, END]]})
    return root


def test_every_folder_with_token_files_is_a_source_in_the_order_of_the_names(root: Path) -> None:
    assert names(root) == ["books", "web", "web/2024", "web/old/a"]
    assert names(root / "web/old") == ["a"]


def test_a_name_begins_the_names_of_all_folders(root: Path) -> None:
    assert names(root, ", name: all")[:2] == ["all/books", "all/web"]


def test_folders_of_other_tools_are_found_by_their_index(root: Path) -> None:
    pair = root / "megatron"
    pair.mkdir()
    for suffix in (".bin", ".idx"):
        shutil.copy(root / f"books/train-0{suffix}", pair / f"text_document{suffix}")
    (root / "datatrove").mkdir()
    (root / "datatrove/0.ds").write_bytes(b"")
    (root / "bare").mkdir()
    (root / "bare/train.bin").write_bytes(bytes(64))
    assert names(root)[:4] == ["books", "datatrove", "megatron", "web"]


def test_links_are_followed_and_cycles_end(root: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "deep").mkdir(parents=True)
    write_folder(elsewhere / "deep", {"train-0": [[1, END]]})
    (elsewhere / "up").symlink_to(root)
    (root / "linked").symlink_to("../elsewhere")
    (root / "web/self").symlink_to(".")
    assert names(root) == ["books", "linked/deep", "web", "web/2024", "web/old/a"]


def test_what_would_count_twice_or_be_left_out_silently_is_refused(root: Path) -> None:
    (root / "latest").symlink_to("web/2024")
    with pytest.raises(ConfigError, match="latest"):
        names(root)
    (root / "latest").unlink()
    (root / "gone").symlink_to("../nowhere")
    with pytest.raises(InputError, match="a link leads nowhere"):
        names(root)
    (root / "gone").unlink()
    (root / "books/.units").mkdir()
    assert "books" in names(root)
    (root / "books/manifest.json").unlink()
    with pytest.raises(InputError, match="not complete"):
        names(root)
    with pytest.raises(ConfigError, match="is a token folder itself"):
        names(root / "web")
    listed = f"data.sources=[{{path: {root / 'web/old'}/**}}, {{path: {root / 'web'}, name: a}}]"
    with pytest.raises(ConfigError, match="two sources are called a"):
        token_sources(config(listed))


@pytest.mark.parametrize("there", [True, False])
def test_no_match_is_reported_with_what_to_type(tmp_path: Path, there: bool) -> None:
    root = tmp_path / "tokens"
    if there:
        (root / "empty").mkdir(parents=True)
    with pytest.raises(InputError) as caught:
        names(root)
    assert f"no token folders match {root}/**" in str(caught.value)
    assert ("there is no folder" in str(caught.value)) != there
    assert f"tokenize.out={root}/NAME" in str(caught.value)


@pytest.mark.parametrize(
    ("sources", "why"),
    [
        ("data.sources=[{path: tokens/*}]", "the only pattern is FOLDER/"),
        ("data.sources=[{path: tokens/**/web}]", "the only pattern is FOLDER/"),
        ("data.sources=[{path: tokens/**, validation: held-out}]", "must be null for FOLDER/"),
        ("data.tokens=tokens/**", "is one folder"),
        (
            "data={sources: [{path: t/**}], weights: [{step: 2, weights: {web: 1}}]}",
            r"must name every source, and no other: t/\*\*",
        ),
    ],
)
def test_other_patterns_and_keys_without_a_meaning_are_refused(sources: str, why: str) -> None:
    with pytest.raises(DttError, match=why):
        config(sources)


def test_the_pipeline_makes_the_tokens_that_a_pattern_is_to_match() -> None:
    pattern = "data.sources=[{path: data/tokens/**}]"
    assert config(pattern, "download.dataset=python-stdlib").reads_corpus
    assert not config(pattern).reads_corpus
    assert not config(pattern, "download.dataset=a.txt", "tokenize.out=x").reads_corpus
    first = config(pattern, "download.dataset=a.txt", "tokenizer.vocab_size=300")
    other = config(pattern, "download.dataset=b.txt", "tokenizer.vocab_size=300")
    layer = trained_tokenizer(Resolved(first, {}), Resolved(other, {}))
    assert layer is not None
    path = "data/tokens/a-bpe300/tokenizer.json"
    assert layer[("tokenizer", "path")].value == path
