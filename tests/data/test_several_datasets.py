"""`download.datasets`: several corpora and one tokenizer, in real processes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.running import Dtt

from dtt.artifacts.manifests import TokensManifest
from dtt.base.errors import ConfigError
from dtt.base.files import sha256_file
from dtt.config.load import resolve
from dtt.data.samples.dataset import open_dataset

MpiRun = Callable[..., subprocess.CompletedProcess[str]]
RUN = """\
download:
  datasets:
    - {dataset: web, include: ['*.md'], exclude: [drafts/]}
    - {dataset: numbers.jsonl, text_column: body, out: data/corpus/counts}
tokenizer: {vocab_size: 300}
tokenize: {validation_fraction: 0.1}
model: {dim: 16, n_layers: 1, n_heads: 2}
train: {seq_len: 32, global_batch_tokens: 256, micro_batch: 4, steps: 4, sample_tokens: 0}
checkpoint: {every: 2}
"""
OUT = Path("data/tokens/web+counts-bpe300")


@pytest.fixture
def project(dtt: Dtt, monkeypatch: pytest.MonkeyPatch) -> Dtt:
    """Two datasets of different kinds, with different options."""
    web = dtt.folder / "web"
    (web / "drafts").mkdir(parents=True)
    for i in range(60):
        (web / f"{i}.md").write_text(f"page {i}: " + "the quick brown fox " * (3 + i % 7))
    (web / "drafts/x.md").write_text("a draft")
    (web / "style.css").write_text("body {}")
    rows = ({"id": "x", "body": " ".join(str(i * j) for j in range(30))} for i in range(90))
    (dtt.folder / "numbers.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (dtt.folder / "run.yaml").write_text(RUN)
    monkeypatch.chdir(dtt.folder)
    return dtt


def tokenized(project: Dtt, *arguments: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(
        project("tokenize", "-c", "run.yaml", "--json", *arguments).stdout
    )
    return found


def files(folder: Path) -> dict[str, bytes]:
    found = (p for p in folder.rglob("*") if p.suffix in (".bin", ".idx", ".json"))
    # Markers have the times of files.
    paths = (p for p in found if p.parent.name != ".units")
    return {str(p.relative_to(folder)): p.read_bytes() for p in paths}


def test_one_command_each_downloads_tokenizes_and_trains_on_all(project: Dtt) -> None:
    printed = project("download", "-c", "run.yaml").stdout
    assert "corpus  data/corpus/web\n" in printed
    assert "corpus  data/corpus/counts\n" in printed
    assert "files   60 " in printed  # neither the draft nor the style sheet
    first, second = tokenized(project)
    assert (first["tokens"], second["tokens"]) == (str(OUT / "web"), str(OUT / "counts"))
    shared = sha256_file(OUT / "tokenizer.json")
    for name in ("web", "counts"):
        assert TokensManifest.read(OUT / name).tokenizer_sha256 == shared
        assert sha256_file(OUT / name / "tokenizer.json") == shared
    # It has learned words of the first and digits of the second.
    vocabulary = json.loads((OUT / "tokenizer.json").read_text())["model"]["vocab"]
    assert {"Ġquick", "Ġ2"} <= vocabulary.keys()
    cfg = resolve("run.yaml", env={}).config
    dataset = open_dataset(cfg)
    assert [source.name for source in dataset.sources] == ["web", "counts"]
    sizes = [len(source) for source in dataset.sources]
    assert dataset.shares()["web"] == pytest.approx(sizes[0] / sum(sizes), abs=0.05)
    project("train", "-c", "run.yaml")
    data = json.loads(Path("jobs/run/data.json").read_text())
    assert [source["corpus"]["id"] for source in data["sources"]] == [
        str(project.folder / "web"), str(project.folder / "numbers.jsonl"),
    ]  # fmt: skip
    weighted = "data.sources=[{path: %s, weight: 1}, {path: %s, weight: 3}]"
    named = resolve("run.yaml", [weighted % (OUT / "web", OUT / "counts")], env={}).config
    assert open_dataset(named).shares()["counts"] == pytest.approx(0.75, abs=0.02)
    assert open_dataset(
        resolve("run.yaml", [f"data.sources=[{{path: {OUT}/**}}]"], env={}).config
    ).manifest.named_keys == list(reversed(dataset.manifest.named_keys))


def test_a_second_run_changes_nothing_and_another_text_is_refused(project: Dtt) -> None:
    project("download", "-c", "run.yaml")
    tokenized(project)
    before = files(OUT)
    assert all(one["already_done"] for one in tokenized(project))
    assert files(OUT) == before
    (OUT / "tokenizer.json").unlink()  # restored, with the same content
    tokenized(project)
    assert files(OUT) == before
    (project.folder / "web/60.md").write_text("one page more " * 20)
    project("download", "-c", "run.yaml")
    refused = project("tokenize", "-c", "run.yaml", expect=2).stderr
    assert "corpora.web is" in refused
    assert files(OUT) == before
    tokenized(project, "--overwrite")
    assert files(OUT)["web/manifest.json"] != before["web/manifest.json"]


def test_several_ranks_write_the_same_files(project: Dtt, mpirun: MpiRun) -> None:
    project("download", "-c", "run.yaml")
    tokenized(project)
    before = files(OUT)
    done = mpirun(2, "-m", "dtt.main", "tokenize", "-c", "run.yaml", "tokenize.out=other")
    assert done.returncode == 0, done.stderr
    assert files(Path("other")) == before


def test_the_pipeline_makes_everything(project: Dtt) -> None:
    done = project("pipeline", "-c", "run.yaml", "pipeline.tokenize_processes=1")
    assert "corpus       data/corpus/counts" in done.stdout
    assert f"tokens       {OUT / 'counts'}" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["download.dataset=web"], "cannot be combined with datasets"),
        (["download.out=corpus"], "cannot be combined with datasets"),
        (["download.datasets=[{out: a}]"], "must name a dataset"),
        (["download.datasets=[{dataset: a/x.txt}, {dataset: b/x.txt}]"], "two are called x"),
        (["data.type=text", "tokenizer.type=file"], "reads one corpus"),
    ],
)
def test_what_several_datasets_cannot_mean_is_refused(
    project: Dtt, arguments: list[str], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        resolve("run.yaml", arguments, env={})


def test_an_entry_may_name_a_shipped_dataset() -> None:
    arguments = ["download.datasets=[{dataset: tinystories, split: validation}, {dataset: a.txt}]"]
    first, second = resolve(None, arguments, env={}).config.corpora
    shipped = resolve(None, ["download.dataset=tinystories"], env={}).config.download
    assert first.download.dataset == shipped.dataset != "tinystories"
    assert first.download.split == "validation"
    assert second.download.dataset == "a.txt"
