"""A manifest may come from somebody else: its names must not lead out of its folder."""

import json
from pathlib import Path

import pytest
from support.running import Dtt

from dtt.artifacts.corpus import CorpusFile, CorpusManifest, CorpusSource
from dtt.base.errors import DamagedError, ExitCode, InputError
from dtt.base.safe_names import checked_file, checked_name

BAD = {
    "": "not a plain path",
    "/etc/passwd": "absolute",
    "//etc/passwd": "absolute",
    "..": "not a plain path",
    "../victim": "not a plain path",
    "a/../../victim": "not a plain path",
    "a/..": "not a plain path",
    "./a": "not a plain path",
    "a//b": "not a plain path",
    "a/": "not a plain path",
    "a\0b": "non-printable",
    "a\nerror: all is well": "non-printable",
    "a\udcff": "non-printable",
}


@pytest.mark.parametrize("name", BAD, ids=repr)
def test_a_name_that_leaves_the_folder_is_refused_with_manifest_and_reason(name: str) -> None:
    manifest = Path("/somewhere/manifest.json")
    with pytest.raises(DamagedError) as caught:
        checked_name(name, manifest)
    assert caught.value.exit_code == ExitCode.DAMAGED
    assert str(manifest) in str(caught.value)
    assert BAD[name] in str(caught.value)
    assert len(str(caught.value).splitlines()) == 4, "a name cannot forge a line"


@pytest.mark.parametrize("name", ["a.bin", "data/train-0.parquet", "..a/b..", "ü ñ.txt", "a\\b"])
def test_a_plain_name_comes_back_as_it_is(name: str, tmp_path: Path) -> None:
    assert checked_name(name, tmp_path / "manifest.json") == name
    assert checked_file(name, tmp_path / "manifest.json") == tmp_path / name


def test_a_link_may_lead_within_the_folder_only(tmp_path: Path) -> None:
    folder = tmp_path / "real"
    (folder / "inner").mkdir(parents=True)
    (folder / "a.bin").write_bytes(b"")
    (tmp_path / "linked").symlink_to(folder)  # a linked folder is the user's own choice
    manifest = tmp_path / "linked" / "manifest.json"
    (folder / "alias.bin").symlink_to("a.bin")
    (folder / "loop.bin").symlink_to("loop.bin")
    (folder / "out.bin").symlink_to("/etc/passwd")
    (folder / "away").symlink_to(tmp_path)
    (folder / "inner" / "b.bin").symlink_to("../../victim")
    for name in ("a.bin", "alias.bin", "loop.bin", "inner/absent.bin"):
        assert checked_file(name, manifest) == tmp_path / "linked" / name
    for name, target in (
        ("out.bin", "/etc/passwd"),
        ("away/victim", tmp_path / "victim"),
        ("inner/b.bin", tmp_path / "victim"),
    ):
        with pytest.raises(DamagedError, match="outside the folder") as caught:
            checked_file(name, manifest)
        assert str(target) in str(caught.value)


def test_a_corpus_that_names_files_elsewhere_is_refused_by_every_command(dtt: Dtt) -> None:
    (dtt.folder / "victim.txt").write_text("a secret\n")
    corpus = dtt.folder / "corpus"
    dtt("download", "-d", "python-stdlib", "download.out=corpus")
    manifest = json.loads((corpus / "manifest.json").read_text())
    read = ("tokenize", "download.out=corpus", "tokenizer.vocab_size=260")
    again = ("download", "-d", "python-stdlib", "download.out=corpus")
    for name in ("../victim.txt", str(dtt.folder / "victim.txt")):
        manifest["files"][0]["path"] = name
        (corpus / "manifest.json").write_text(json.dumps(manifest))
        for command in (read, again, ("data", "inspect", "corpus", "--verify")):
            refused = dtt(*command, expect=65)
            assert "names a file outside its folder" in refused.stderr
            assert f"corpus/manifest.json\n  why:   '{name}'" in refused.stderr
    manifest["files"][0] |= {"path": "a.parquet", "bytes": 9}
    (corpus / "manifest.json").write_text(json.dumps(manifest))
    (corpus / "a.parquet").symlink_to("../victim.txt")
    assert "is a link to" in dtt(*read, expect=65).stderr


def test_token_files_that_lie_elsewhere_are_refused_by_every_command(dtt: Dtt) -> None:
    (dtt.folder / "source.txt").write_text("\n".join(f"line {i} of many" for i in range(300)))
    dtt(
        "download", "-d", "source.txt", "download.out=corpus", "download.txt_documents=line"
    )  # fmt: skip
    make = ("tokenize", "download.out=corpus", "tokenize.out=tokens", "tokenizer.vocab_size=260")
    dtt(*make)
    tokens = dtt.folder / "tokens"
    sound = (tokens / "manifest.json").read_text()
    train = (
        "train", "data.tokens=tokens", "model.dim=16", "model.n_layers=1", "model.n_heads=2",
        "train.seq_len=16", "train.micro_batch=2", "train.global_batch_tokens=32", "train.steps=1",
    )  # fmt: skip
    for name in ("../train-00000", "/etc/train-00000", "train-00000/../x"):
        changed = json.loads(sound)
        changed["shards"][0]["stem"] = name
        (tokens / "manifest.json").write_text(json.dumps(changed))
        for command in (train, ("data", "inspect", "tokens")):
            refused = dtt(*command, expect=65)
            assert f"tokens/manifest.json\n  why:   {name!r}" in refused.stderr
    (tokens / "manifest.json").write_text(sound)
    (tokens / "train-00000.bin").rename(dtt.folder / "elsewhere.bin")
    (tokens / "train-00000.bin").symlink_to("../elsewhere.bin")
    refused = dtt(*train, expect=65)
    assert "'train-00000.bin' is a link to" in refused.stderr
    assert "outside the folder" in refused.stderr


def test_a_manifest_is_written_only_if_it_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def manifest(files: int) -> CorpusManifest:
        names = (f"{i:06d}.txt" for i in range(files))
        return CorpusManifest(
            dataset="a",
            source=CorpusSource(kind="local", id="a"),
            file_format="txt",
            text_column=None,
            txt_documents="file",
            files=tuple(
                CorpusFile(path=name, bytes=1, sha256="0" * 64, mtime_ns=1) for name in names
            ),
        )

    monkeypatch.setattr("dtt.artifacts.manifest.LARGEST", 20_000)
    written = 0
    for files in range(1, 200, 20):
        made = manifest(files)
        try:
            text = made.dump()
        except InputError as refused:
            assert "JSON lines" in str(refused)  # noqa: PT017  the loop needs both ends
            break
        (tmp_path / CorpusManifest.filename).write_text(text)
        assert CorpusManifest.read(tmp_path) == made
        written += 1
    assert 1 < written < 10
