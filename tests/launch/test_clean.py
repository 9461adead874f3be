"""`dtt pipeline` and `dtt submit` clean a corpus where the configuration has a section `clean`."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.running import Dtt, write_documents
from support.selections import CLEAN, write_selection

from dtt.artifacts.corpus import CorpusManifest
from dtt.base import local
from dtt.config.load import resolve
from dtt.data.corpus.selection import selection_folder
from dtt.launch import pipeline


@pytest.fixture
def corpus(dtt: Dtt) -> Path:
    write_documents(dtt.folder / "counting.jsonl")
    dtt("download", "-d", "counting.jsonl", "download.out=corpus")
    return dtt.folder / "corpus"


def steps(*settings: str) -> list[pipeline.PipelineStep]:
    return [*pipeline.steps(*pipeline.find_runs(None, settings, settings))]


def commands(*settings: str) -> list[str]:
    return [step.command for step in steps("download.dataset=counting.jsonl", *settings)]


def test_a_pipeline_cleans_after_the_download_where_it_is_configured() -> None:
    assert commands() == ["download", "tokenize", "train", "export"]
    assert commands("clean.exact=true") == ["download", "clean", "tokenize", "train", "export"]
    text = ("data.type=text", "tokenizer.type=file", "tokenizer.path=tokenizer.json")
    assert commands("clean.exact=true", *text) == ["download", "clean", "train", "export"]


def test_ranks_clean_only_if_the_selection_is_missing(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(corpus.parent)
    settings = ("download.out=corpus", "clean.exact=true", "pipeline.tokenize_processes=2")

    def line() -> str:
        [step] = [step for step in steps(*settings) if step.command == "clean"]
        return local.shell_command(step.argv())

    plain = f"dtt clean {' '.join(settings)}"
    assert line().endswith(f"mpirun -n 2 {plain}")
    write_selection(corpus, lambda text: False, unit_bytes=20_000)
    assert line() == plain


def test_stages_that_share_token_files_must_remove_the_same_documents(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    for exact in ("true", "false"):
        config.write_text(
            "download: {dataset: counting.jsonl}\n"
            "tokenize: {out: tokens}\n"
            "tokenizer: {type: file, path: tokenizer.json}\n"
            "stages:\n"
            "- {name: one, train: {steps: 2}, clean: {exact: true}}\n"
            f"- {{name: two, train: {{steps: 3}}, clean: {{exact: {exact}}}}}\n"
        )
        differs = exact == "false"
        shown = Dtt(tmp_path)("config", "show", "-c", config, "--stage", "two", expect=2 * differs)
        assert ("contains the tokens of other text" in shown.stderr) == differs


def test_submit_clean_runs_ranks_on_all_nodes(dtt: Dtt, corpus: Path) -> None:
    options = ("download.out=corpus", "launch.nodes=2", "launch.time=60")
    script = dtt("submit", "clean", *options, "clean.exact=true", "--print-script").stdout
    assert "clean -c jobs/run-clean/config.yaml" in script
    tokenize = dtt("submit", "tokenize", *options, "clean.exact=true", "--print-script").stdout
    assert "    --progress='corpus/selection-*/.work/*.json' \\\n" in script
    ours, theirs = (
        [
            line.replace("clean", "tokenize")
            for line in text.splitlines()
            if "--progress" not in line
        ]
        for text in (script, tokenize)
    )
    assert ours == theirs
    mpi = (*options, "clean.exact=true", "launch.mpi=mpirun", "--print-script")
    assert "mpirun -n" in dtt("submit", "clean", *mpi).stdout
    refused = dtt("submit", "clean", *options, "--dry-run", expect=2)
    assert "no section `clean`" in refused.stderr


def test_submit_refuses_work_on_a_corpus_that_was_not_cleaned(dtt: Dtt, corpus: Path) -> None:
    options = ("download.out=corpus", "launch.time=60", "clean.exact=true", "--dry-run")
    refused = dtt("submit", "tokenize", *options, expect=66)
    assert "run `dtt clean` with the same configuration first" in refused.stderr
    dtt("submit", "clean", *options)
    place = write_selection(corpus, lambda text: False, unit_bytes=20_000)
    assert place == selection_folder(CLEAN, CorpusManifest.read(corpus), corpus)
    dtt("submit", "tokenize", *options)
    # Files that have changed since need a selection of their own.
    write_documents(dtt.folder / "counting.jsonl")
    with (dtt.folder / "counting.jsonl").open("a") as file:
        file.write('{"text": "one more"}\n')
    dtt("download", "-d", "counting.jsonl", "download.out=corpus")
    again = dtt("submit", "tokenize", *options, expect=66)
    assert "run `dtt clean` with the same configuration first" in again.stderr
    assert resolve(None, ["clean.exact=true"]).config.clean == CLEAN
