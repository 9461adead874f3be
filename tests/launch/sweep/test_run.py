"""`dtt sweep` in real processes: what it tells is what the trials' own files say."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import psutil
import pytest
from support.fake_slurm import write_commands
from support.running import Dtt, wait_until

Settings = Callable[..., list[str]]


def write_sweep(dtt: Dtt, settings: list[str], parameters: dict[str, Any], **said: Any) -> None:
    """s.json over a tiny run."""
    overrides = [one for one in settings if not one.startswith("name=")]
    document = {"overrides": overrides, "parameters": parameters} | said
    (dtt.folder / "s.json").write_text(json.dumps(document))


def records(job: Path, kind: str) -> list[dict[str, Any]]:
    lines = (
        (job / "metrics.jsonl").read_text().splitlines() if (job / "metrics.jsonl").exists() else []
    )
    return [r for r in map(json.loads, lines) if r["kind"] == kind]


def endings(job: Path) -> list[int]:
    """Exit code of every attempt that has ended."""
    paths = sorted(job.glob("attempts/*/attempt.json"))
    records = [json.loads(path.read_text()) for path in paths]
    return [record["code"] for record in records if "code" in record]


def jobs_by_values(folder: Path) -> dict[tuple[Any, ...], Path]:
    """The trials' job directories, found without dtt, by what their configs say."""
    import yaml

    found = {}
    for path in folder.glob("*/config.yaml"):
        said = yaml.safe_load(path.read_text())
        key = float(said["optim"]["lr"]), said["train"]["sample_prompt"], said["seed"]
        found[key] = path.parent
    return found


def process_of(parent: int, job: Path) -> psutil.Process:
    """The process that trains `job`."""
    while True:
        for child in psutil.Process(parent).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                if child.cmdline()[-1:] == [str(Path("jobs/s") / job.name)]:
                    return child
        time.sleep(0.01)


PROMPTS, SEEDS = ["a-b c", "-1e-3", "null"], [0, 1]
PAIRS = [(1e-3, prompt) for prompt in PROMPTS]
PAIRS += [(3e-3, PROMPTS[0]), (3e-3, PROMPTS[1]), (1e30, PROMPTS[0])]
"""A learning rate, of which 1e30 diverges, and a prompt."""
TWELVE = {(lr, prompt, seed) for lr, prompt in PAIRS for seed in SEEDS}


@pytest.mark.slow
def test_status_and_results_equal_an_independent_reading_of_the_logs(
    dtt: Dtt, tiny: Settings
) -> None:
    lrs, prompts = zip(*PAIRS, (-1e-3, "invalid"), strict=True)
    parameters = {"optim.lr": lrs, "train.sample_prompt": prompts}
    # Only what is measured costs: three evaluations, one checkpoint, no samples.
    cheap = tiny(train__steps=4, train__eval_every=2, train__sample_tokens=0, checkpoint__every=4)
    write_sweep(dtt, cheap, parameters, mode="zip", seeds=SEEDS)
    planned = json.loads(dtt("sweep", "submit", "s.json", "--dry-run", "--json").stdout)
    assert (len(planned["trials"]), len(planned["dropped"])) == (12, 2)
    assert not (dtt.folder / "jobs").exists()

    run = dtt.start("sweep", "submit", "s.json", "--local", 2)
    manifest = dtt.folder / "jobs/s/manifest.json"
    wait_until(manifest.exists)
    jobs = jobs_by_values(manifest.parent)
    assert jobs.keys() == TWELVE
    killed, last = jobs[1e-3, "a-b c", 0], jobs[3e-3, "-1e-3", 1]
    process = process_of(run.pid, killed)
    wait_until((killed / "attempts/1").exists)
    process.kill()
    dtt("sweep", "cancel", "s", last.name)
    assert dtt.wait(run).returncode == 1  # what the first trial that failed ended with

    diverged = [job for (lr, _, _), job in jobs.items() if lr == 1e30]
    expected = {job.name: "done" for job in jobs.values()}
    expected |= {killed.name: "failed"} | {job.name: "diverged" for job in diverged}
    check_status(dtt, jobs, expected | {last.name: "cancelled"})
    check_results(dtt, jobs, done=set(jobs.values()) - {killed, last, *diverged})

    metrics = {job: (job / "metrics.jsonl").stat() for job in jobs.values() if endings(job) == [0]}
    dtt("sweep", "retry", "s", "--local", 2, expect=76)
    check_status(dtt, jobs, expected | {killed.name: "done"})
    check_results(dtt, jobs, done=set(jobs.values()) - set(diverged))
    assert (endings(killed), endings(last)) == ([1, 0], [0])
    assert all(endings(job) == [76, 76] for job in diverged)
    for job, stat in metrics.items():  # what was done was left alone
        assert (job / "metrics.jsonl").stat() == stat
        assert endings(job) == [0]

    pictures = dtt("sweep", "results", "jobs/s", "--plot").stdout.splitlines()
    assert len(pictures) == 4
    for picture in pictures:
        assert (dtt.folder / picture).read_bytes().startswith(b"\x89PNG")


def check_status(dtt: Dtt, jobs: dict[Any, Path], expected: dict[str, str]) -> None:
    """What status tells of each trial is what its files say."""
    reported = json.loads(dtt("sweep", "status", "s", "--json").stdout)["trials"]
    assert {one["trial"]: one["state"] for one in reported} == expected
    for (lr, prompt, seed), job in jobs.items():
        [one] = [one for one in reported if one["trial"] == job.name]
        assert list(one["values"].values()) == [lr, prompt, seed]
        evals, trained = records(job, "eval"), records(job, "train")
        assert one["metric"] == (evals[-1]["loss"] if evals else None)
        assert one["step"] == max((r["step"] for r in evals + trained), default=None)
        if one["state"] in ("failed", "diverged"):
            ending = json.loads(sorted(job.glob("attempts/*/attempt.json"))[-1].read_text())
            assert one["error"] == ending["reason"].splitlines()[0]


def check_results(dtt: Dtt, jobs: dict[Any, Path], done: set[Path]) -> None:
    """What results tells is what the metrics of the trials that are done say."""
    expected = {}
    for lr, prompt in {(lr, prompt) for lr, prompt, _ in TWELVE}:
        group = [job for (*key, _), job in jobs.items() if key == [lr, prompt] and job in done]
        losses = [records(job, "eval")[-1]["loss"] for job in group]
        expected[lr, prompt] = (
            fmean(losses) if losses else None,
            stdev(losses) / len(losses) ** 0.5 if len(losses) > 1 else None,
            len(losses),
        )
    rows = json.loads(dtt("sweep", "results", "s.json", "--json").stdout)["rows"]
    means = [row["mean"] for row in rows if row["mean"] is not None]
    assert means == sorted(means)
    assert [row["mean"] for row in rows[len(means) :]] == [None] * (len(expected) - len(means))
    assert len(rows) == len(expected)
    for row in rows:
        mean, error, n = expected[tuple(row["values"].values())]
        assert (row["mean"], row["error"]) == (pytest.approx(mean), pytest.approx(error))
        assert len(row["done"]) == n


@pytest.mark.slow
def test_a_stop_saves_every_trial_and_a_retry_resumes(dtt: Dtt, tiny: Settings) -> None:
    settings = tiny(train__steps=100_000, train__eval_every=0, checkpoint__every=100_000)
    write_sweep(dtt, settings, {"seed": [0, 1, 2]})
    run = dtt.start("sweep", "submit", "s.json", "--local", 2)
    wait_until((dtt.folder / "jobs/s/manifest.json").exists)
    first, second, third = sorted((dtt.folder / "jobs/s").glob("0*"))
    wait_until(lambda: records_begun(first) and records_begun(second))
    dtt("sweep", "cancel", "s", first.name, third.name)
    wait_until(lambda: endings(first) == [75])
    second_run = dtt("sweep", "retry", "s", "--local", 1, expect=78)
    assert "is in use" in second_run.stderr
    run.send_signal(signal.SIGINT)
    done = dtt.wait(run)
    assert done.returncode == 75, done.stderr
    assert (endings(second), endings(third)) == ([75], [])

    steps = {job: records(job, "train")[-1]["step"] for job in (first, second)}
    again = dtt.start("sweep", "retry", "s", first.name, second.name, "--local", 2)
    wait_until(lambda: all(records(job, "train")[-1]["step"] > steps[job] for job in steps))
    again.send_signal(signal.SIGTERM)
    assert dtt.wait(again).returncode == 75
    for job in steps:
        assert endings(job) == [75, 75]
        seen = [record["step"] for record in records(job, "train")]
        assert seen == list(range(1, len(seen) + 1))
    reported = json.loads(dtt("sweep", "status", "s", "--json").stdout)["trials"]
    assert [one["state"] for one in reported] == ["stopped", "stopped", "cancelled"]


def records_begun(job: Path) -> bool:
    return (job / "metrics.jsonl").exists() and '"train"' in (job / "metrics.jsonl").read_text()


@pytest.mark.slow
def test_a_trial_that_cannot_start_reports_the_reason(dtt: Dtt, tiny: Settings) -> None:
    write_sweep(dtt, tiny(), {"seed": [0]})
    dtt("sweep", "submit", "s.json", "--dry-run")
    run = dtt("sweep", "submit", "s.json", "--local", 1, expect=78, CUDA_VISIBLE_DEVICES="",
              DTT_TRAIN__DEVICE="cuda")  # fmt: skip
    assert "failed" in run.stdout
    [one] = json.loads(dtt("sweep", "status", "s", "--json").stdout)["trials"]
    assert (one["state"], one["code"]) == ("failed", 78)


def test_a_sweep_without_token_files_is_refused_before_anything_is_written(dtt: Dtt) -> None:
    (dtt.folder / "s.yaml").write_text("base: quickstart\nseeds: [0]\n")
    run = dtt("sweep", "submit", "s.yaml", expect=66)
    assert "no token files in data/tokens/python-stdlib-bpe4096" in run.stderr
    assert [path.name for path in dtt.folder.iterdir()] == ["s.yaml"]


def test_the_sweep_commands_need_no_torch(dtt: Dtt, tiny: Settings) -> None:
    write_sweep(dtt, tiny(), {"seed": [0]})
    (dtt.folder / "torch.py").write_text("raise RuntimeError('imported')")
    done = dtt.wait(dtt.start_python("-m", "dtt.main", "sweep", "submit", "s.json", "--dry-run"))
    assert done.returncode == 0, done.stderr
    assert done.stdout


FAKE = {
    # Records what it is told, and queues every task of the script.
    "sbatch": """\
echo "sbatch $*" >>$FAKE/calls
n=$(($(cat $FAKE/last 2>/dev/null || echo 16) + 1)); echo $n >$FAKE/last
tasks=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' "${@: -1}")
for i in $(seq 0 ${tasks:-0}); do
    echo "$n${tasks:+_$i}|PENDING||0|0|0|Priority" >>$FAKE/queue
done
echo $n
""",
    "squeue": "cat $FAKE/queue\n",
    "scancel": 'echo "scancel $*" >>$FAKE/calls; sed -i "/^$1|/d" $FAKE/queue\n',
    "sacct": "exit 1\n",
}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Slurm that starts nothing; `calls` in its folder says what it was told."""
    folder = tmp_path / "fake"
    monkeypatch.setenv("PATH", write_commands(folder, FAKE))
    monkeypatch.setenv("FAKE", str(folder))
    (folder / "queue").touch()
    return folder


def states(dtt: Dtt) -> list[str]:
    reported = json.loads(dtt("sweep", "status", "s", "--json").stdout)["trials"]
    return [one["state"] for one in reported]


@pytest.mark.slow
def test_an_array_has_a_task_for_each_trial_and_a_cap(
    dtt: Dtt, tiny: Settings, slurm: Path
) -> None:
    write_sweep(dtt, tiny(), {"seed": [0, 1, 2]}, concurrency=2)
    dtt("sweep", "submit", "s.json")
    ids = sorted(path.name for path in (dtt.folder / "jobs/s").glob("0*"))
    script = (dtt.folder / "jobs/s/slurm.sh").read_text()
    assert "#SBATCH --array=0-2%2\n" in script
    assert f"--trials {' '.join(f'jobs/s/{trial}' for trial in ids)} \\\n" in script
    assert states(dtt) == ["queued"] * 3
    dtt("sweep", "cancel", "s", ids[1])
    assert states(dtt) == ["queued", "cancelled", "queued"]
    dtt("sweep", "submit", "s.json")  # starts none a second time
    dtt("sweep", "retry", "s")
    assert states(dtt) == ["queued"] * 3
    assert "#SBATCH --array=0-0%2\n" in (dtt.folder / "jobs/s/slurm.sh").read_text()
    assert (slurm / "calls").read_text().splitlines() == [
        "sbatch --parsable jobs/s/slurm.sh", "scancel 17_1", "sbatch --parsable jobs/s/slurm.sh",
    ]  # fmt: skip
    assert not (dtt.folder / "jobs/s" / ids[1] / "control/stop").exists()


def test_a_rejected_submission_leaves_no_files(dtt: Dtt, tiny: Settings, slurm: Path) -> None:
    accepting = (slurm / "sbatch").read_text()
    (slurm / "sbatch").write_text("#!/bin/bash\nexit 1\n")
    write_sweep(dtt, tiny(), {"seed": [0, 1]})
    dtt("sweep", "submit", "s.json", expect=78)
    assert not (dtt.folder / "jobs/s").exists()
    (slurm / "sbatch").write_text(accepting)
    write_sweep(dtt, tiny(train__steps=13), {"seed": [0, 1]})
    dtt("sweep", "submit", "s.json")
    (slurm / "scancel").write_text("#!/bin/bash\necho 'not yours' >&2\nexit 1\n")
    assert "cannot cancel job 17_0" in dtt("sweep", "cancel", "s").stderr
    (slurm / "queue").write_text("")
    (slurm / "sbatch").write_text("#!/bin/bash\nexit 1\n")
    dtt("sweep", "retry", "s", expect=78)
    assert states(dtt) == ["cancelled"] * 2  # as they were


@pytest.mark.parametrize(
    ("space", "scripts"), [("seed", ["jobs/s"]), ("launch.mem", ["jobs/s/0", "jobs/s/0"])]
)
def test_trials_wait_for_the_success_of_other_jobs(
    space: str, scripts: list[str], dtt: Dtt, tiny: Settings, slurm: Path
) -> None:
    write_sweep(dtt, tiny(), {space: [1, 2]})
    after = ("sweep", "submit", "s.json", "--after", "9", "--after", "jobs/t")
    (slurm / "queue").write_text("9|RUNNING||1|1|1|None\n")
    assert "jobs/t is not a job directory" in dtt(*after, expect=66).stderr
    dtt("submit", "train", *tiny(), "-y")
    assert "--after needs Slurm" in dtt(*after, "--local", 1, expect=2).stderr
    dtt(*after, "--dry-run")
    assert not (dtt.folder / "jobs/s").exists()
    dtt(*after)
    [_, *calls] = (slurm / "calls").read_text().splitlines()
    waits = "sbatch --parsable --dependency=afterok:9:17 --kill-on-invalid-dep=yes"
    assert [call.rpartition(" ")[0] for call in calls] == [waits] * len(scripts)
    for call, script in zip(calls, scripts, strict=True):
        assert call.split()[-1].startswith(script)
    assert states(dtt) == ["queued"] * 2

    # Slurm cancels the trials if a job that they wait for fails.
    reason = "DependencyNeverSatisfied"
    lines = (slurm / "queue").read_text().splitlines()[2:]
    ids = [line.partition("|")[0] for line in lines]
    (slurm / "queue").write_text("".join(f"{id}|CANCELLED||0|0|0|{reason}\n" for id in ids))
    assert states(dtt) == ["cancelled"] * 2


@pytest.mark.slow
def test_a_trial_of_unknown_state_is_started_only_by_name(
    dtt: Dtt, tiny: Settings, slurm: Path
) -> None:
    write_sweep(
        dtt, tiny(train__steps=1, schedule__warmup=0, train__sample_tokens=0), {"seed": [0, 1]}
    )
    dtt("sweep", "submit", "s.json")
    (slurm / "squeue").write_text("#!/bin/bash\nexit 1\n")
    dtt("sweep", "retry", "s", "--local", 1)
    assert states(dtt) == ["unknown"] * 2
    first = min((dtt.folder / "jobs/s").glob("0*"))
    dtt("sweep", "retry", "s", first.name, "--local", 1)
    assert states(dtt) == ["done", "unknown"]


def test_trials_with_different_resources_are_separate_jobs(
    dtt: Dtt, tiny: Settings, slurm: Path
) -> None:
    write_sweep(dtt, tiny(), {"launch.mem": ["1G", "2G"]}, concurrency=1)
    assert "differ in their `launch` section" in dtt("sweep", "submit", "s.json", expect=2).stderr
    write_sweep(dtt, tiny(), {"launch.mem": ["1G", "2G"]})
    dtt("sweep", "submit", "s.json")
    scripts = sorted((dtt.folder / "jobs/s").glob("*/slurm.sh"))
    for number, script in enumerate(scripts, 1):
        assert f"#SBATCH --mem={number}G\n" in script.read_text()
    assert len(scripts) == 2
    assert states(dtt) == ["queued"] * 2
    dtt("sweep", "cancel", "s")
    assert states(dtt) == ["cancelled"] * 2
    assert [line.split()[0] for line in (slurm / "calls").read_text().splitlines()] == [
        "sbatch", "sbatch", "scancel", "scancel",
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("base", ["none", "keys", "file", "extends"])
def test_a_cluster_profile_overrides_the_base_of_a_sweep_key_by_key(
    base: str, dtt: Dtt, tiny: Settings, slurm: Path
) -> None:
    (dtt.folder / "mine.yaml").write_text("launch: {partition: slow, account: me}")
    (dtt.folder / "run.yaml").write_text("launch: {partition: fast, qos: low}")
    bases: dict[str, Any] = {
        "none": {}, "keys": {"base": {"launch": {"partition": "fast", "qos": "low"}}},
        "file": {"base": "run.yaml"}, "extends": {"base": {"extends": "run.yaml"}},
    }  # fmt: skip
    write_sweep(dtt, tiny(), {"seed": [0, 1]}, **bases[base])
    dtt("sweep", "submit", "s.json", "--cluster", "mine.yaml")
    script = (dtt.folder / "jobs/s/slurm.sh").read_text()
    assert "#SBATCH --account=me\n" in script
    assert "#SBATCH --partition=slow\n" in script
    assert ("#SBATCH --qos=low\n" in script) == (base != "none")
    refused = dtt("sweep", "submit", "s.json", "--cluster", "run.json", expect=66)
    assert "clusters/run.json" in refused.stderr
