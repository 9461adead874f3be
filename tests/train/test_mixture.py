"""Training on several sources, in real processes: measured apart, stopped at will, resumed."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
from running import Dtt

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
        "data.weights=[{step: 20, weights: {counting: 1, products: 4}}]",
        "data.mask_documents=true", "name=t", "model.dim=16", "model.n_layers=2",
        "model.n_heads=2", "model.dropout=0.1", "train.steps=40", "train.seq_len=32",
        "train.micro_batch=3", "train.global_batch_tokens=256", "train.eval_every=7",
        "train.log_every=3", "train.sample_tokens=4", "checkpoint.every=5",
        "schedule.warmup_steps=2",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(mixed: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job that nothing disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    Dtt(folder)("train", *mixed)
    return folder / "jobs/t"


def metrics(job: Path, *kinds: str) -> list[dict[str, Any]]:
    return [r for r in jsonl.read(job / "metrics.jsonl") if r["kind"] in (kinds or KINDS)]


def torchrun(dtt: Dtt, ranks: int, *arguments: object) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", ranks)
    done = dtt.wait(dtt.start_python(*launcher, "-m", "dtt.main", "train", *arguments))
    assert done.returncode == 0, done.stderr


def killed_on_the_way(dtt: Dtt, arguments: list[str]) -> None:
    """Train, and kill -9 after a checkpoint, somewhere within a step."""
    process = dtt.start("train", *arguments)
    checkpoints = dtt.folder / "jobs/t/checkpoints"
    end = time.monotonic() + 100
    while not list(checkpoints.glob("step-*")) and time.monotonic() < end:
        assert process.poll() is None
        time.sleep(0.002)
    time.sleep(random.Random(0).random() * 0.05)
    process.kill()
    assert dtt.wait(process).returncode == -9


def test_killed_and_resumed_it_ends_as_if_nothing_had_happened(
    dtt: Dtt, mixed: list[str], undisturbed: Path
) -> None:
    killed_on_the_way(dtt, mixed)
    resumed = dtt("train", *mixed)
    assert "resumed from" in resumed.stderr
    job = dtt.folder / "jobs/t"
    assert metrics(job) == metrics(undisturbed)
    for file in (undisturbed / "checkpoints/step-000040").glob("*.safetensors"):
        assert (job / file.relative_to(undisturbed)).read_bytes() == file.read_bytes()


def test_killed_and_resumed_on_other_ranks_it_sees_the_same_samples(
    dtt: Dtt, mixed: list[str], undisturbed: Path
) -> None:
    plain = [*mixed, "model.dropout=0", "train.precision=fp32"]
    dtt("train", *plain, "name=one")
    killed_on_the_way(dtt, plain)
    torchrun(dtt, 2, *plain)
    one, two = (metrics(dtt.folder / "jobs" / name, "train") for name in ("one", "t"))
    ledgers = [record["ledger"] for record in metrics(undisturbed, "train")]
    assert [record["ledger"] for record in two] == ledgers
    for a, b in zip(one, two, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)


def test_each_source_is_measured(undisturbed: Path) -> None:
    evals, data = metrics(undisturbed, "eval"), metrics(undisturbed, "data")
    assert [record["step"] for record in data] == [*range(3, 40, 3), 40]
    for record in evals:
        assert set(record["losses"]) == {"counting", "products"}
        assert min(record["losses"].values()) < record["loss"] < max(record["losses"].values())
    assert all(evals[-1]["losses"][n] < evals[0]["losses"][n] for n in evals[0]["losses"])
    facts = json.loads((undisturbed / "data.json").read_text())
    sizes = {source["name"]: source["samples"] for source in facts["sources"]}
    # 20 steps of 8 samples by 7 to 3, then 20 by 1 to 4.
    taken = {"counting": 112 + 32, "products": 48 + 128}
    assert data[-1]["epochs"] == {name: taken[name] / sizes[name] for name in taken}


def test_the_overall_loss_counts_sources_by_their_share_of_the_run(undisturbed: Path) -> None:
    for record in metrics(undisturbed, "eval"):
        losses = record["losses"]
        expected = (144 * losses["counting"] + 176 * losses["products"]) / 320
        assert record["loss"] == pytest.approx(expected)


def test_packed_it_trains_the_same_on_any_number_of_ranks(dtt: Dtt, mixed: list[str]) -> None:
    """Batches differ in their number of targets, and so do the ranks' shares of them."""
    packed = [*mixed, "data.packing=best-fit", "model.dropout=0", "train.precision=fp32"]
    packed += ["train.steps=12"]
    dtt("train", *packed, "name=one")
    torchrun(dtt, 2, *packed, "train.micro_batch=2")
    one, two = (metrics(dtt.folder / "jobs" / name, "train") for name in ("one", "t"))
    seen = [record["tokens"] for record in one]
    targets = [after - before for before, after in zip([0, *seen], seen, strict=False)]
    assert len(set(targets)) > 1
    assert max(targets) <= 256
    for a, b in zip(one, two, strict=True):
        assert (a["ledger"], a["tokens"]) == (b["ledger"], b["tokens"])
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)


def test_a_run_that_may_not_repeat_its_data_ends_with_it_and_is_done(
    dtt: Dtt, mixed: list[str]
) -> None:
    endless = [*mixed, "data.on_exhausted=stop", "data.weights=[]", "train.steps=100000"]
    endless += ["train.eval_every=0", "checkpoint.every=1000"]
    run = dtt("train", *endless)
    job = dtt.folder / "jobs/t"
    last = metrics(job, "data")[-1]
    assert f"the run ends at step {last['step']}, not 100000" in run.stderr
    assert 0.9 < max(last["epochs"].values()) <= 1
    assert "is done" in dtt("train", *endless).stderr


def test_other_weights_on_resume_are_refused(dtt: Dtt, mixed: list[str]) -> None:
    short = [*mixed, "train.steps=5"]
    dtt("train", *short)
    changed = "data.weights=[{step: 20, weights: {counting: 1, products: 5}}]"
    assert "data.weights" in dtt("train", *short, changed, expect=2).stderr
    dtt("train", *short, changed, "train.steps=6", "--allow-change=data.weights",
        "--allow-change=train.steps")  # fmt: skip
    found = store.newest(dtt.folder / "jobs/t/checkpoints")
    assert found is not None
    assert found.step == 6


def test_what_is_exported_needs_no_token_files(
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
