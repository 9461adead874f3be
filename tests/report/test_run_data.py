"""What a report shows of a job: each part is what the files of the job say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.report_jobs import (
    SyntheticRun,
    resolved_settings,
    settings,
    write_finished_job,
    write_interrupted_job,
    write_new_job,
    write_sweep,
)

from dtt.artifacts.jobdir import JobDir
from dtt.artifacts.manifests import ExportManifest
from dtt.config.load import load_job
from dtt.jobs.clock import goodput
from dtt.jobs.job_state import examine
from dtt.jobs.sweeps import find as find_sweep
from dtt.report.report_pages import _labels, differences, of_sweep
from dtt.report.run import find_jobs
from dtt.report.run_data import changed_keys, configuration_of, read_run, spread


def read(job: Path) -> dict[str, object]:
    (status,) = examine([JobDir(job)])
    return read_run(status, configuration_of(JobDir(job)))


def test_the_verdict_has_the_reason_and_the_command_to_type_next(tmp_path: Path) -> None:
    job = write_new_job(tmp_path, "run", SyntheticRun())
    root = job.job.root
    assert read(root)["verdict"]["state"] == "never started"  # type: ignore[index]
    why = "cannot write step-000100\n  why:   no space left on device\n  next:  free some space"
    job.attempt(0, 90, began=1.7e9, code=74, reason=why)  # type: ignore[arg-type]
    verdict = read(root)["verdict"]
    assert isinstance(verdict, dict)
    assert (verdict["state"], verdict["mood"]) == ("failed", "bad")
    assert "cannot write step-000100 (exit code 74" in verdict["text"]
    assert verdict["why"] == ["why:   no space left on device"]
    assert verdict["next"] == "free some space"


def test_the_next_command_after_an_export_uses_the_exported_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    root = write_finished_job(tmp_path)
    cfg, steps = load_job(root), SyntheticRun().steps
    manifest = ExportManifest(
        job=cfg.name, step=steps - 50, checkpoint_sha256="0", dtype="bf16", parameters=1,
        max_logit_difference=0.0, files=(),
    )  # fmt: skip
    for step, command in ((steps - 50, f"dtt export {root}"),
                          (steps, f"dtt generate -p TEXT exports/{cfg.name}")):  # fmt: skip
        folder = tmp_path / "exports" / cfg.name
        folder.mkdir(parents=True, exist_ok=True)
        content = manifest.model_copy(update={"step": step}).dump()
        (folder / manifest.filename).write_text(content)
        assert read(root)["verdict"]["next"] == command  # type: ignore[index]


def test_the_axis_of_flops_counts_every_token_that_was_computed(tmp_path: Path) -> None:
    """The synthetic records have targets of their own, as of conversations."""
    root = write_finished_job(tmp_path)
    run: Any = read(root)
    train = load_job(root).train
    assert run["progress"]["computed"][-1] == run["step"] * train.global_batch_tokens
    assert len(run["progress"]["computed"]) == len(run["progress"]["tokens"])


def test_the_command_to_resume_a_job_that_was_killed_is_safe_to_paste(tmp_path: Path) -> None:
    job = write_new_job(tmp_path, "run", SyntheticRun())
    job.attempt(0, 90, began=1.7e9, code=None)
    root = job.job.root.rename(tmp_path / "a run")
    verdict = read(root)["verdict"]
    assert isinstance(verdict, dict)
    assert (verdict["state"], verdict["mood"]) == ("lost", "bad")
    assert verdict["next"] == f"dtt job resume '{root}'"


def test_attempts_and_goodput_are_those_of_the_clocks(tmp_path: Path) -> None:
    job = write_interrupted_job(tmp_path)
    clock = read(job)["clock"]
    assert isinstance(clock, dict)
    found = [(a["how"], a["code"], a["first"], a["step"]) for a in clock["attempts"]]
    assert found == [
        ("killed", None, 0, 130), ("stopped", 75, 100, 210), ("failed", 74, 210, 275),
        ("done", 0, 250, 400),
    ]  # fmt: skip
    expected = goodput(JobDir(job))
    assert expected is not None
    assert clock["goodput"]["useful"] == expected.useful
    lost = sum(clock["goodput"]["lost"].values())
    assert lost + expected.useful == pytest.approx(expected.seconds, abs=0.01)


@pytest.mark.parametrize(
    "damaged",
    ["config.yaml", "data.json", "metrics.jsonl", "heartbeat.json", "attempts/1/clock.json"],
)
@pytest.mark.parametrize("how", ["deleted", "garbage", "folder"])
def test_a_job_with_a_damaged_file_still_has_a_report(
    damaged: str, how: str, tmp_path: Path
) -> None:
    job = write_finished_job(tmp_path)
    path = job / damaged
    path.unlink()
    if how == "garbage":
        path.write_bytes(b"\xff\x00{not: [json\n")
    elif how == "folder":
        path.mkdir()
    run = read(job)
    assert json.dumps(run, allow_nan=False)
    if damaged != "metrics.jsonl":
        assert "train/loss" in run["curves"]  # type: ignore[operator]


def test_damaged_records_are_left_out(tmp_path: Path) -> None:
    job = write_finished_job(tmp_path)
    with (job / "metrics.jsonl").open("a") as file:
        for record in (
            {"kind": "data", "step": 400, "epochs": {"novels": float("nan"), "code": 1.0}},
            {"kind": "guard", "step": 400, "why": 3, "action": "skip", "bad_step": 1},
            {"kind": "task", "step": 400, "task": "x", "acc": float("inf")},
        ):
            file.write(json.dumps(record) + "\n")
    run = read(job)
    assert [source["name"] for source in run["mixture"]] == ["code"]  # type: ignore[attr-defined]
    assert run["guard"] == {"total": 0, "items": []}
    assert "x" not in {curve["task"] for curve in run["tasks"]}  # type: ignore[attr-defined]


def test_differences_are_the_keys_whose_values_differ() -> None:
    one = resolved_settings(settings(SyntheticRun())).config
    other = resolved_settings(settings(SyntheticRun()) | {"optim.lr": 0.5, "name": "b"}).config
    assert differences([one, other, None]) == [
        {"key": "optim.lr", "values": ["0.004", "0.5", None]}
    ]
    changed = dict(map(tuple, changed_keys(other)))
    assert changed["optim.lr"] == "0.5"
    assert "seed" not in changed


def test_the_rows_of_a_sweep_are_those_of_dtt_sweep_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_sweep(tmp_path)
    monkeypatch.chdir(tmp_path)
    sweep = find_sweep("sweep")
    found = of_sweep(sweep)
    means = [row["mean"] for row in found["rows"] if row["mean"] is not None]
    assert len(means) == 6
    assert means == sorted(means)
    assert [plot["key"] for plot in found["plots"]] == ["optim.lr", "model.n_layers"]
    assert not found["plots"][0]["log_x"]  # the largest rate is 16 times the smallest
    assert len(find_jobs([root])) == 8
    labels = _labels([{}] * 8, sweep)
    assert labels[0] == "lr=0.001, n_layers=2"
    assert len(set(labels)) == 8


def test_runs_are_named_by_what_their_names_differ_in() -> None:
    def labels(*names: str) -> list[str]:
        return _labels([{"name": name, "path": f"jobs/{i}"} for i, name in enumerate(names)], None)

    assert labels("chat/base", "chat/sft") == ["base", "sft"]
    assert labels("a/x", "b/x") == ["a/x", "b/x"]
    assert labels("run", "run") == ["0", "1"]


def test_items_are_spread_evenly_with_the_first_and_the_last() -> None:
    assert spread(range(5), 10) == [0, 1, 2, 3, 4]
    found = spread(range(1000), 7)
    assert (found[0], found[-1], len(found)) == (0, 999, 7)
