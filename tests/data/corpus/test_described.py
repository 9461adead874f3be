"""A corpus, and token files, are used only for the documents that a configuration describes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.running import Dtt, write_documents

from dtt.artifacts.corpus import CorpusManifest
from dtt.artifacts.manifests import TokensManifest
from dtt.base.errors import ConfigError
from dtt.config.load import resolve
from dtt.data.corpus.described import check_tokens, read_corpus
from dtt.data.corpus.download import download

FIRST = "download.dataset=one/docs.jsonl"
SMALL = ["tokenizer.vocab_size=300", "tokenize.validation_fraction=0.1"]


@pytest.fixture
def corpora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two data sets of one name, of which the first is downloaded."""
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        Path(name).mkdir()
        write_documents(Path(name, "docs.jsonl"))
    with Path("two/docs.jsonl").open("a") as file:
        file.write('{"text": "one more"}\n')
    configured = resolve(None, [FIRST]).config
    download(configured.download, configured.corpus_dir)
    return tmp_path


OTHER = {
    "another folder": ["download.dataset=two/docs.jsonl"],
    "another column": ["download.text_column=title"],
    "other units of text": ["download.txt_documents=line"],
    "fewer files": ["download.max_files=1"],
    "other files": ["download.include=['*.md']"],
    "a split": ["download.split=train", "download.out=data/corpus/docs"],
}


@pytest.mark.parametrize("arguments", OTHER.values(), ids=OTHER)
def test_another_corpus_is_refused_by_the_key_that_differs(
    corpora: Path, arguments: list[str]
) -> None:
    cfg = resolve(None, [FIRST, *arguments]).config
    with pytest.raises(ConfigError, match=f"{arguments[0].split('=')[0]} is .* there, .* now"):
        read_corpus(cfg)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["download.text_column=text"],  # what was detected
        ["download.dataset=./one/../one/docs.jsonl"],
        ["download.dataset=link.jsonl", "download.out=data/corpus/docs"],
        ["download.dataset=null", "download.out=data/corpus/docs"],
    ],
)
def test_the_same_corpus_under_another_description_is_used(
    corpora: Path, arguments: list[str]
) -> None:
    (corpora / "link.jsonl").symlink_to(corpora / "one/docs.jsonl")
    assert read_corpus(resolve(None, [FIRST, *arguments]).config).files


def test_a_corpus_that_does_not_record_the_request_is_compared_by_what_it_holds(
    corpora: Path,
) -> None:
    folder = corpora / "data/corpus/docs"
    old = CorpusManifest.read(folder).model_dump(mode="json")
    del old["request"]
    (folder / "manifest.json").write_text(CorpusManifest(**old).dump())
    assert read_corpus(resolve(None, [FIRST]).config).request is None
    with pytest.raises(ConfigError, match="text_column is text there, title now"):
        read_corpus(resolve(None, [FIRST, "download.text_column=title"]).config)


def test_training_refuses_the_token_files_of_another_corpus(corpora: Path) -> None:
    dtt = Dtt(corpora)
    options = (*SMALL, "train.steps=1", "name=t")
    dtt("tokenize", "-d", "one/docs.jsonl", *options)
    for arguments in (["two/docs.jsonl"], ["one/docs.jsonl", "download.max_files=1"]):
        dataset, *more = arguments
        for command in ("train", "tokenize"):
            said = dtt(command, f"download.dataset={dataset}", *more, *options, expect=2).stderr
            assert "made from other documents than the configuration describes" in said
    assert not (corpora / "jobs/t/config.yaml").exists()


def test_token_files_are_used_in_a_copy_without_their_text_and_after_a_move(
    corpora: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    Dtt(corpora)("tokenize", "-d", "one/docs.jsonl", *SMALL)
    cfg = resolve(None, [FIRST, *SMALL]).config
    tokens = TokensManifest.read(cfg.tokenize_dir)
    assert tokens.text is not None
    with monkeypatch.context() as there:
        there.chdir(shutil.copytree(corpora, tmp_path_factory.mktemp("copy") / "project"))
        check_tokens(cfg, cfg.tokenize_dir, TokensManifest.read(cfg.tokenize_dir))
    (corpora / "one").rename(corpora / "three")
    check_tokens(cfg, cfg.tokenize_dir, tokens)
    moved = resolve(None, ["download.dataset=three/docs.jsonl", *SMALL])
    check_tokens(moved.config, moved.config.tokenize_dir, tokens)
