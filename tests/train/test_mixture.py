"""Training on several sources, in real processes: measured apart, stopped at will, resumed."""

from __future__ import annotations

import json
import shlex
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support import warm_python
from support.forked import CONTEXT
from support.records import assert_same_tensors
from support.running import Dtt
from support.tiny_job import END_OF_DOCUMENT, make_tokenizer
from support.token_files import write_folder

from dtt.base.errors import ExitCode
from dtt.base.files import sha256_file
from dtt.checkpoint import store
from dtt.track import jsonl

KINDS = ("train", "eval", "sample", "data")


@pytest.fixture(scope="module")
def other(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other documents, by the same tokenizer."""
    folder = tmp_path_factory.mktemp("other")
    texts = (" ".join(str(i * j) for j in range(5 + i % 40)) for i in range(300))
    lines = (json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "products.jsonl").write_text("".join(lines))
    dtt = Dtt(folder)
    dtt("download", "-d", "products.jsonl")
    dtt(
        "tokenize", "-d", "products.jsonl", "tokenizer.type=file",
        f"tokenizer.path={tokens / 'tokenizer.json'}", "tokenize.validation_fraction=0.1",
        "tokenize.out=tokens",
    )  # fmt: skip
    return folder / "tokens"


@pytest.fixture(scope="module")
def mixed(tokens: Path, other: Path) -> list[str]:
    """A run on both, in which the weights change; documents do not see each other."""
    sources = (
        f"{{name: counting, path: {tokens}, weight: 0.7}}, "
        f"{{name: products, path: {other}, weight: 0.3}}"
    )
    return [
        f"data.sources=[{sources}]",
        "data.weights=[{step: 21, weights: {counting: 1, products: 4}}]",
        "data.mask_documents=true", "name=t", "model.dim=16", "model.n_layers=2",
        "model.n_heads=2", "train.precision=fp32", "train.steps=40", "train.seq_len=32",
        "train.micro_batch=3", "train.global_batch_tokens=256", "train.eval_every=7",
        "train.log_every=3", "train.sample_tokens=4", "checkpoint.every=5",
        "schedule.warmup=2",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(mixed: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job that nothing disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    Dtt(folder)("train", *mixed)
    return folder / "jobs/t"


def metrics(job: Path, *kinds: str) -> list[dict[str, Any]]:
    return [r for r in jsonl.read(job / "metrics.jsonl") if r["kind"] in (kinds or KINDS)]


@pytest.mark.slow
def test_a_resume_after_the_weights_have_changed_ends_bit_for_bit_equal(
    dtt: Dtt, undisturbed: Path
) -> None:
    job = shutil.copytree(undisturbed, dtt.folder / "jobs/t")
    assert "resumed from" in dtt("train", "jobs/t", "--from-step", 35).stderr
    assert metrics(job) == metrics(undisturbed)
    assert_same_tensors(undisturbed, job, 40)


@pytest.mark.slow
def test_each_source_is_measured_and_counts_by_its_share_of_the_run(undisturbed: Path) -> None:
    evals, data = metrics(undisturbed, "eval"), metrics(undisturbed, "data")
    assert [record["step"] for record in data] == [*range(3, 40, 3), 40]
    for record in evals:
        assert set(record["losses"]) == {"counting", "products"}
        expected = (144 * record["losses"]["counting"] + 176 * record["losses"]["products"]) / 320
        assert record["loss"] == pytest.approx(expected)
    assert all(evals[-1]["losses"][n] < evals[0]["losses"][n] for n in evals[0]["losses"])
    facts = json.loads((undisturbed / "data.json").read_text())
    sizes = {source["name"]: source["samples"] for source in facts["sources"]}
    # 20 steps of 8 samples by 7 to 3, then 20 by 1 to 4.
    taken = {"counting": 112 + 32, "products": 48 + 128}
    assert data[-1]["epochs"] == {name: taken[name] / sizes[name] for name in taken}


@pytest.mark.slow
def test_ranks_that_read_other_data_than_each_other_stop_before_the_first_step(
    dtt: Dtt, mixed: list[str], tokens: Path, other: Path
) -> None:
    """As when a folder on each node's own disk is not the same on all."""
    (dtt.folder / "jobs").mkdir()
    for rank, folder in enumerate((tokens, other)):
        node = dtt.folder / f"node{rank}"
        node.mkdir()
        (node / "jobs").symlink_to(dtt.folder / "jobs")
        (node / "here").symlink_to(folder)
    alike = [s for s in mixed if not s.startswith(("data.sources", "data.weights"))]
    command = f'cd node$RANK && exec "$0" -m dtt.main train {shlex.join(alike)} data.tokens=here'
    python = warm_python.start(CONTEXT)
    done = dtt.wait(dtt.start_torchrun(2, "--no-python", "sh", "-c", command, python))
    assert done.returncode != 0
    assert "the nodes of this run do not have the same data" in done.stderr
    ended = json.loads((dtt.folder / "jobs/t/attempts/1/attempt.json").read_text())
    assert ended["code"] == ExitCode.DAMAGED
    assert not metrics(dtt.folder / "jobs/t", "train")
    assert not list((dtt.folder / "jobs/t/checkpoints").glob("step-*"))


def test_a_packed_step_may_have_no_target(dtt: Dtt) -> None:
    folder = dtt.folder / "tokens"
    full, alone = [1] * 32 + [END_OF_DOCUMENT], [END_OF_DOCUMENT]
    manifest = write_folder(folder, {"train-0": [full, full, alone]})
    make_tokenizer().save(str(folder / "tokenizer.json"))
    ours = {"end_of_document": END_OF_DOCUMENT, "vocab_size": 257}
    ours |= {"tokenizer_sha256": sha256_file(folder / "tokenizer.json")}
    (folder / manifest.filename).write_text(manifest.model_copy(update=ours).dump())
    dtt("train", "data.tokens=tokens", "data.packing=best-fit", "name=t", "model.dim=16",
        "model.n_layers=1", "model.n_heads=2", "train.seq_len=32", "train.micro_batch=1",
        "train.global_batch_tokens=32", "train.steps=3", "train.sample_tokens=0")  # fmt: skip
    seen = [record["tokens"] for record in metrics(dtt.folder / "jobs/t", "train")]
    assert sorted(after - before for before, after in pairwise([0, *seen])) == [0, 32, 32]


@pytest.mark.slow
def test_a_run_that_may_not_repeat_its_data_ends_with_it_and_is_done(
    dtt: Dtt, mixed: list[str]
) -> None:
    endless = [*mixed, "data.on_exhausted=stop", "data.weights=[]", "train.steps=100000"]
    endless += ["train.eval_every=0", "checkpoint.every=1000"]
    ended = dtt("train", *endless)
    job = dtt.folder / "jobs/t"
    last = metrics(job, "data")[-1]
    assert f"the run ends at step {last['step']} instead of 100000" in ended.stderr
    assert 0.9 < max(last["epochs"].values()) <= 1
    assert "is done" in dtt("train", *endless).stderr


@pytest.mark.slow
def test_other_weights_on_resume_must_be_allowed_and_leave_what_was_trained_as_it_is(
    dtt: Dtt, mixed: list[str], undisturbed: Path
) -> None:
    shutil.copytree(undisturbed, dtt.folder / "jobs/t")
    first, then = "{step: 21, weights: {counting: 1, products: %d}}", "{step: 41, weights: {%s}}"
    later = f"data.weights=[{first % 4}, {then % 'counting: 1, products: 5'}]"
    assert "data.weights" in dtt("train", *mixed, later, expect=2).stderr
    allowed = ("train.steps=42", "--allow-change=data.weights", "--allow-change=train.steps")
    earlier = f"data.weights=[{first % 5}]"
    assert "not in the order" in dtt("train", *mixed, earlier, *allowed, expect=65).stderr
    dtt("train", *mixed, later, *allowed)
    found = store.newest(dtt.folder / "jobs/t/checkpoints")
    assert found is not None
    assert found.step == 42


@pytest.mark.slow
def test_an_export_needs_no_token_files(
    dtt: Dtt, undisturbed: Path, tokens: Path, other: Path
) -> None:
    (dtt.folder / "jobs").mkdir()
    (dtt.folder / "jobs/t").symlink_to(undisturbed)
    config = (undisturbed / "config.yaml").read_text()
    assert str(tokens) in config
    facts = json.loads((undisturbed / "data.json").read_text())
    assert [source["path"] for source in facts["sources"]] == [str(tokens), str(other)]
    dtt("export", "jobs/t", "--out", "out")
    card = (dtt.folder / "out/README.md").read_text()
    assert "counting.jsonl" in card
    assert "products.jsonl" in card
