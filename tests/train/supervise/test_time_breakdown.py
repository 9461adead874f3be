"""A real run: its start by phase, its time by part, its goodput, its profile."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable

import pytest
from support.running import Dtt

from dtt.track import jsonl

Settings = Callable[..., list[str]]


@pytest.mark.slow
def test_a_run_reports_its_time_by_part(dtt: Dtt, tiny: Settings) -> None:
    done = dtt("train", *tiny(train__steps=12), "profile.steps=[5,6]")
    job = dtt.folder / "jobs/t"
    (start,) = jsonl.read(job / "metrics.jsonl", "start")
    assert list(start["seconds"]) == [
        "imports", "data", "process group", "model", "optimizer", "resume", "first evaluation",
        "first step",
    ]  # fmt: skip
    assert start["matmul_flops"] > 1e8
    assert "the first step was done after" in done.stderr

    perf = list(jsonl.read(job / "metrics.jsonl", "perf"))
    assert [record["step"] for record in perf] == [3, 6, 9, 12]
    for record in perf:
        assert {"data", "forward_backward", "optimizer", "other"} <= record["seconds"].keys()
        assert min(record["seconds"].values()) >= 0
        assert record["matmul_share"] is not None
        assert record["mfu"] is None
        assert record["memory_gb"] > 0
    assert "profile" in perf[1]["seconds"]

    clock = json.loads((job / "attempts/1/clock.json").read_text())
    assert (clock["first"], clock["step"], clock["steps"]) == (0, 12, 12)
    # Two clocks read the age of the process, one after the other, and all figures are rounded.
    assert 0 < sum(clock["parts"].values()) <= clock["seconds"] + 0.05
    assert "goodput: " in done.stderr
    reported = json.loads(dtt("job", "status", "jobs/t", "--json").stdout)["goodput"]
    working = clock["parts"]["forward_backward"] + clock["parts"]["optimizer"]
    assert reported["share"] == pytest.approx(working / clock["seconds"], abs=1e-3)

    trace = job / "profiles/steps-000005-000006-rank-00000.json.gz"
    with gzip.open(trace, "rt") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"step 5", "step 6", "aten::mm"} <= names
    assert "step 7" not in names
    assert "aten::mm" in trace.with_suffix("").with_suffix(".txt").read_text()


def test_unsupported_profiles_are_refused(dtt: Dtt, tiny: Settings) -> None:
    refused = dtt("train", *tiny(), "profile.steps=[6,5]", expect=2)
    assert "profile.steps: 6 is after 5" in refused.stderr
    refused = dtt("train", *tiny(), "profile.steps=[5,6]", "profile.kind=nsys", expect=2)
    assert "profile.kind=torch" in refused.stderr
