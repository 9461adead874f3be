"""Training in real processes: it learns, stops, resumes bit for bit, agrees on two ranks."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.forked_runs import run
from support.records import assert_same_tensors, reached, records
from support.running import Dtt, kill_when, wait_until

from dtt.artifacts.jobdir import JobDir
from dtt.checkpoint import store
from dtt.jobs.clock import goodput

Settings = Any


def weights(job: Path, step: int) -> dict[str, torch.Tensor]:
    return store.at_step(job / "checkpoints", step).tensors(store.MODEL)


def assert_same_run(one: Path, other: Path, step: int) -> None:
    """Weights, optimizer state and metrics of two jobs are equal bit for bit."""
    assert_same_tensors(one, other, step)
    assert records(one) == records(other)


def exit_record(job: Path, attempt: int) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((job / f"attempts/{attempt}/attempt.json").read_text())
    return record


@pytest.fixture(scope="module")
def undisturbed(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted job of 48 steps with the settings of `long`."""
    folder = tmp_path_factory.mktemp("undisturbed")
    Dtt(folder)("train", *long(tokens), OMP_NUM_THREADS="1")
    return folder / "jobs/t"


@pytest.fixture(scope="module")
def trained(tiny: Settings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job of 12 steps with checkpoints of steps 8 and 12."""
    folder = tmp_path_factory.mktemp("trained")
    Dtt(folder)("train", *tiny())
    return folder / "jobs/t"


@pytest.fixture
def done(dtt: Dtt, trained: Path) -> Path:
    """A copy of that job, in the folder of `dtt`."""
    return shutil.copytree(trained, dtt.folder / "jobs/t")


def long(tokens: Path) -> list[str]:
    """A run with accumulation, Muon, dropout, evaluation, samples and many checkpoints."""
    return [
        f"data.tokens={tokens}", "name=t", "model.dim=16", "model.n_layers=2", "model.n_heads=2",
        "model.dropout=0.1", "train.steps=48", "train.seq_len=32", "train.micro_batch=3",
        "train.global_batch_tokens=256", "train.eval_every=7", "train.log_every=3",
        "train.sample_every=10", "train.sample_tokens=4", "checkpoint.every=8",
        "schedule.warmup=2",
    ]  # fmt: skip


def test_the_loss_falls_and_everything_is_recorded(dtt: Dtt, tiny: Settings) -> None:
    done = dtt("train", *tiny(train__steps=60, optim__lr=1e-2))
    job = dtt.folder / "jobs/t"
    train = records(job, "train")
    assert [r["step"] for r in train] == list(range(1, 61))
    assert [r["tokens"] for r in train] == list(range(256, 61 * 256, 256))
    evals = records(job, "eval")
    assert evals[-1]["loss"] < evals[0]["loss"] - 0.5
    assert evals[-1]["bits_per_byte"] < evals[0]["bits_per_byte"]
    assert "step 60/60" in done.stderr
    assert exit_record(job, 1)["code"] == 0
    assert (job / "config.yaml").exists()
    assert (job / "env.json").exists()
    assert sorted(p.name for p in (job / "checkpoints").iterdir()) == ["step-000056", "step-000060"]


def test_a_vocabulary_that_the_token_files_have_not_ends_a_run_before_it_starts(
    dtt: Dtt, tiny: Settings, tokens: Path
) -> None:
    """But a job that has a checkpoint resumes, whatever vocabulary was configured."""
    own = tiny(data__tokens="null", tokenize__out=tokens, train__steps=2)
    stderr = dtt("train", *own, "tokenizer.vocab_size=999", expect=2).stderr
    assert "tokenizer.vocab_size=999 (argument)" in stderr
    assert "dtt tokenize --overwrite" in stderr
    (dtt.folder / "run.yaml").write_text("tokenizer: {vocab_size: 999}\n")
    warned = dtt("train", "-c", "run.yaml", *tiny(train__steps=2)).stderr
    assert "tokenizer.vocab_size=999 (run.yaml:1), but the token files have" in warned
    again = dtt("train", "jobs/t", "train.steps=3", "--allow-change", "train.steps").stderr
    assert "vocab_size" not in again


def test_a_finished_job_reports_so_and_changes_nothing(
    dtt: Dtt, tiny: Settings, done: Path
) -> None:
    before = (done / "metrics.jsonl").read_bytes()
    again = dtt("train", *tiny())
    assert "is done" in again.stderr
    assert (done / "metrics.jsonl").read_bytes() == before


def test_the_result_as_json_is_all_of_stdout_and_printed_by_one_rank(
    dtt: Dtt, tiny: Settings
) -> None:
    done = dtt("train", *tiny(), "--json", "-q")
    reported = json.loads(done.stdout)
    assert (reported["job"], reported["steps"]) == ("jobs/t", 12)
    assert reported["last_eval"] == records(dtt.folder / "jobs/t", "eval")[-1]
    assert "progress" not in done.stderr
    assert "step 12" not in done.stderr
    assert json.loads(run(dtt, "train", "jobs/t", "--json", ranks=2).stdout) == reported


def test_killed_at_random_moments_it_ends_as_if_nothing_had_happened(
    dtt: Dtt, tokens: Path, undisturbed: Path
) -> None:
    job = dtt.folder / "jobs/t"
    generator = random.Random(0)
    kills = 0
    while kills < 3:
        target, process = (
            reached(job) + generator.randrange(1, 16),
            dtt.start("train", *long(tokens)),
        )
        after = generator.random() * 0.05  # somewhere inside a step, a save, an evaluation
        killed = kill_when(lambda: reached(job) >= target, process, after)  # noqa: B023
        kills += 1
        if not killed or reached(job) == 48:  # too late: again from the start
            shutil.rmtree(job)
            kills = 0
    dtt("train", *long(tokens))
    assert_same_run(undisturbed, job, 48)
    spent = goodput(JobDir(job))
    assert spent is not None
    assert spent.attempts == 4
    assert 0 < spent.share < 1


@pytest.mark.slow(except_for=["SIGTERM"])
@pytest.mark.parametrize(
    "requests",
    [["SIGTERM"], ["SIGINT", "SIGUSR1", "SIGUSR2", "SIGQUIT", "control/stop"]],
    ids=["SIGTERM", "the others in turn"],
)
def test_a_stop_request_saves_exits_75_and_the_job_resumes_bit_for_bit(
    dtt: Dtt, tokens: Path, undisturbed: Path, requests: list[str]
) -> None:
    job = dtt.folder / "jobs/t"
    attempt = 0
    while attempt < len(requests):
        how, target = requests[attempt], reached(job) + 3
        process = dtt.start("train", *long(tokens), "checkpoint.every=1000")
        wait_until(lambda: process.poll() is not None or reached(job) >= target)  # noqa: B023
        if how == "control/stop":
            (job / how).touch()
        else:
            process.send_signal(signal.Signals[how])
        stopped = Dtt.wait(process)
        if stopped.returncode == 0:  # too late: again from the start
            shutil.rmtree(job)
            attempt = 0
            continue
        attempt += 1
        assert stopped.returncode == 75, stopped.stderr
        assert "dtt train jobs/t" in stopped.stderr
        assert how in stopped.stderr
        record = exit_record(job, attempt)
        assert record["code"] == 75
        assert record["checkpoint"] == f"step-{record['step']:06d}"
        assert not (job / "control/stop").exists()
    dtt("train", job, "checkpoint.every=8")
    assert_same_run(undisturbed, job, 48)


def test_a_signal_before_the_first_step_ends_the_attempt_at_once(dtt: Dtt, tiny: Settings) -> None:
    process = dtt.start("train", *tiny(train__steps=100_000))
    wait_until((dtt.folder / "jobs/t/attempts/1").exists)
    process.terminate()
    stopped = Dtt.wait(process)
    record = exit_record(dtt.folder / "jobs/t", 1)
    assert (stopped.returncode, record["code"]) == (75, 75)
    if record["checkpoint"] is None:  # else it had come as far as a step
        assert "before the first step" in stopped.stderr
    steps = (record["step"] or 0) + 2
    dtt("train", *tiny(train__steps=steps), "--allow-change", "train.steps")
    evals = records(dtt.folder / "jobs/t", "eval")
    assert (evals[0]["step"], evals[-1]["step"]) == (0, steps)


@pytest.mark.slow
@pytest.mark.parametrize("nohup", [False, True])
def test_a_hangup_is_a_stop_request_but_not_under_nohup(
    dtt: Dtt, tiny: Settings, nohup: bool
) -> None:
    job = dtt.folder / "jobs/t"
    code = "import signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); "
    code += "sys.argv[0] = 'dtt'; from dtt.main import main; main()"
    arguments = ("train", *tiny(train__steps=100_000))
    process = dtt.start_python("-c", code, *arguments) if nohup else dtt.start(*arguments)
    wait_until(lambda: reached(job) >= 1)
    process.send_signal(signal.SIGHUP)
    if nohup:
        before = reached(job)
        wait_until(lambda: reached(job) > before + 3)
        process.terminate()
    assert Dtt.wait(process).returncode == 75
    record = exit_record(job, 1)
    assert f"why:   {'SIGTERM' if nohup else 'SIGHUP'}" in record["reason"]
    assert record["checkpoint"] == f"step-{record['step']:06d}"


def test_control_save_saves_and_continues(dtt: Dtt, tiny: Settings) -> None:
    job = dtt.folder / "jobs/t"
    process = dtt.start("train", *tiny(train__steps=100_000, checkpoint__every=1_000_000))
    wait_until(lambda: reached(job) >= 1)
    (job / "control/save").touch()
    wait_until(lambda: list((job / "checkpoints").glob("step-*")))
    assert process.poll() is None
    assert not (job / "control/save").exists()
    process.terminate()
    assert Dtt.wait(process).returncode == 75


def test_a_damaged_checkpoint_is_skipped_by_name(dtt: Dtt, tiny: Settings, done: Path) -> None:
    final = (done / "checkpoints/step-000012/model-00000.safetensors").read_bytes()
    damaged = done / "checkpoints/step-000012/state-00000.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\xff")
    again = dtt("train", *tiny())
    assert "state-00000.safetensors" in again.stderr
    assert "resumed from jobs/t/checkpoints/step-000008" in again.stderr
    assert (done / "checkpoints/step-000012/model-00000.safetensors").read_bytes() == final


@pytest.mark.usefixtures("done")
def test_changed_values_are_refused_by_name_unless_allowed(dtt: Dtt, tiny: Settings) -> None:
    refused = dtt("train", *tiny(train__steps=16, optim__lr=0.5), expect=2)
    assert "optim.lr, train.steps" in refused.stderr
    assert "--allow-change train.steps" in refused.stderr
    dtt("train", *tiny(train__steps=16), "--allow-change", "train.steps")
    assert reached(dtt.folder / "jobs/t") == 16
    dtt("train", "jobs/t", "checkpoint.keep_last=1")  # free to change


def test_a_loss_that_is_not_finite_ends_with_76_and_saves_nothing(dtt: Dtt, tiny: Settings) -> None:
    settings = tiny(optim__type="adamw", optim__lr=1e30, train__clip_norm="null", train__steps=40)
    done = dtt("train", *settings, "train.precision=fp32", expect=76)
    assert "diverged" in done.stderr
    assert exit_record(dtt.folder / "jobs/t", 1)["code"] == 76
    for path in (dtt.folder / "jobs/t/checkpoints").glob("step-*"):
        assert all(t.isfinite().all() for t in load_file(path / "model-00000.safetensors").values())
    status = json.loads(dtt("job", "status", "jobs/t", "--json").stdout)
    (bad,) = status["bad_steps"]
    assert (bad["why"], bad["action"]) == ("non_finite", "stop")
    assert bad["step"] == exit_record(dtt.folder / "jobs/t", 1)["step"]
    assert (
        f"the last is step {bad['step']} (non_finite, stop)"
        in dtt("job", "status", "jobs/t").stdout
    )
    assert "the same as in metrics.jsonl" in dtt("data", "at-step", "jobs/t", bad["step"]).stdout


@pytest.mark.slow(except_for=[""])
@pytest.mark.parametrize("documents", [{}, {"data.eod_mask_loss": True}], ids=["", "eod"])
def test_two_ranks_train_what_one_does_and_resume_each_other(
    dtt: Dtt, tiny: Settings, documents: dict[str, object]
) -> None:
    settings = tiny(train__precision="fp32", train__steps=12, **documents)
    dtt("train", *settings)
    run(dtt, "train", *settings, "name=two", ranks=2)
    one, two = dtt.folder / "jobs/t", dtt.folder / "jobs/two"
    for a, b in zip(records(one, "train"), records(two, "train"), strict=True):
        assert a["ledger"] == b["ledger"]
        assert a["tokens"] == b["tokens"]
        assert (a["tokens"] < 256 * a["step"]) is bool(documents)
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
    for name, value in weights(one, 12).items():
        torch.testing.assert_close(value, weights(two, 12)[name], rtol=1e-3, atol=1e-4)

    resumed = dtt("train", "jobs/two", "train.steps=16", "--allow-change", "train.steps")
    assert "resumed from jobs/two/checkpoints/step-000012" in resumed.stderr


@pytest.mark.slow
def test_on_any_layout_of_any_number_of_ranks_in_turn_it_trains_what_one_does(
    dtt: Dtt, tiny: Settings
) -> None:
    """1 → 4 → 3 → 1 processes: the same samples, the same loss, of averaged weights, too."""
    settings = tiny(
        train__precision="fp32", train__global_batch_tokens=384, train__eval_every=6,
        train__ema_decay=0.9, schedule__type="constant", train__steps=24, checkpoint__keep_last=99,
    )  # fmt: skip
    dtt("train", *settings, "name=undisturbed")
    turns = [(1, 1, 1), (4, 2, 2), (3, 3, 1), (1, 1, 1)]
    for turn, (ranks, shard, tensor) in enumerate(turns, start=1):
        layout = (f"parallel.shard={shard}", f"parallel.tensor={tensor}")
        allow = (f"train.steps={6 * turn}", "--allow-change", "train.steps")
        run(dtt, "train", *settings, *layout, *allow, ranks=ranks)
    changed, whole = dtt.folder / "jobs/t", dtt.folder / "jobs/undisturbed"
    steps = [record["step"] for record in records(changed, "train")]
    assert steps == list(range(1, 25))
    for a, b in zip(records(whole, "train"), records(changed, "train"), strict=True):
        assert a["ledger"] == b["ledger"]
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
    for a, b in zip(records(whole, "eval"), records(changed, "eval"), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["ema_loss"] == pytest.approx(b["ema_loss"], rel=1e-5)
    found = [store.at_step(changed / "checkpoints", step) for step in (6, 12, 18, 24)]
    assert [checkpoint.manifest.world_size for checkpoint in found] == [1, 4, 3, 1]


def test_a_save_that_fails_ends_the_run_with_74(dtt: Dtt, tiny: Settings) -> None:
    job = dtt.folder / "jobs/t"
    process = dtt.start("train", *tiny(train__steps=100_000, checkpoint__every=100_000))
    wait_until(lambda: reached(job) >= 1)
    (job / "checkpoints").write_text("in the way")  # as root no permission would stop it
    (job / "control/save").touch()
    failed = Dtt.wait(process)
    assert failed.returncode == 74, failed.stderr
    assert "there is a file where a folder is expected" in failed.stderr
    assert exit_record(job, 1)["code"] == 74


def test_what_a_save_took_is_in_the_metrics(trained: Path) -> None:
    saves = records(trained, "save")
    assert [record["step"] for record in saves] == [4, 8, 12]
    for record in saves:
        assert record["bytes"] > 100_000
        assert record["blocked_seconds"] > 0
        assert record["write_seconds"] > 0
        assert record["verify_seconds"] > 0
    assert int((trained / "lead").read_text()) >= 60


@pytest.mark.slow
def test_what_keeps_a_job_from_starting_is_in_exit_json(dtt: Dtt, tiny: Settings) -> None:
    """A job script learns from it that trying again is of no use."""
    job = dtt.folder / "jobs/t"
    dtt("train", *tiny(optim__lr=1e30, optim__type="adamw", train__steps=40), expect=76)
    text = (job / "config.yaml").read_text()
    (job / "config.yaml").write_text(text.replace("steps: 40", "steps: many"))
    # The first rank is the last to start: nobody else's failure may end it before it has written.
    (dtt.folder / "sitecustomize.py").write_text(
        "import os, time; time.sleep(3 * (os.environ.get('RANK') == '0'))"
    )
    command = ("-m", "dtt.main", "train", "jobs/t")
    done = Dtt.wait(dtt.start_torchrun(2, *command, PYTHONPATH=str(dtt.folder)))
    assert done.returncode == 1
    assert done.stderr.count("train.steps: ") == 1, done.stderr
    assert exit_record(job, 2)["code"] == 2
    (job / "config.yaml").write_text(re.sub("(?m)^  tokens: .*", "  tokens: nowhere", text))
    dtt("train", "jobs/t", expect=66)
    assert exit_record(job, 3)["code"] == 66


@pytest.mark.slow
def test_a_refused_start_leaves_a_finished_job_as_it_was_and_creates_none(
    dtt: Dtt, tiny: Settings
) -> None:
    dtt("train", *tiny(train__steps=2))
    job = dtt.folder / "jobs/t"
    (dtt.folder / "other.jsonl").write_text('{"text": "other words"}\n' * 200)
    dtt("download", "-d", "other.jsonl")
    dtt(
        "tokenize", "-d", "other.jsonl", "tokenizer.vocab_size=260", "tokenize.out=other",
        "tokenize.validation_fraction=0",
    )  # fmt: skip
    (dtt.folder / "tensorboard.py").write_text("raise ImportError")
    before = {path: path.read_bytes() for path in job.rglob("*") if path.is_file()}
    refused: list[tuple[int, list[str]]] = [
        (66, ["data.tokens=nowhere", "--allow-change", "data.tokens"]),
        (2, ["data.tokens=other", "--allow-change", "data.tokens"]),
        (2, ["parallel.shard=3"]),
        (2, ["train.global_batch_tokens=257", "--allow-change", "train.global_batch_tokens"]),
        (66, ["--from-step", "1"]),
        (78, ["track=[{type: tensorboard}]"]),
    ]
    for code, arguments in refused:
        env = {"PYTHONPATH": str(dtt.folder)} if code == 78 else {}
        dtt("train", "jobs/t", *arguments, expect=code, **env)
        after = {path: path.read_bytes() for path in job.rglob("*") if path.is_file()}
        assert after == before, arguments
    config = (job / "config.yaml").read_text()
    (job / "config.yaml").write_text(re.sub("(?m)^  tokens: .*", "  tokens: nowhere", config))
    dtt("train", "jobs/t", expect=2)
    dtt("train", "jobs/t", "--allow-change", "data.tokens", expect=66)
    (job / "config.yaml").write_text(config)
    assert json.loads(dtt("job", "status", "jobs/t", "--json").stdout)["state"] == "done"
    dtt("train", *tiny(name="new"), "data.tokens=nowhere", expect=66)
    dtt("train", *tiny(name="new"), "parallel.shard=3", expect=2)
    dtt("train", *tiny(name="new"), "init.from=jobs/nowhere", expect=66)
    assert not (dtt.folder / "jobs/new").exists()


@pytest.mark.slow
def test_gpus_that_a_slurm_job_asked_for_and_torch_does_not_see_end_it_with_78(
    dtt: Dtt, tiny: Settings
) -> None:
    settings = tiny(train__steps=2)
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    asked = dtt("train", *settings, "launch.gpus_per_node=2", expect=78, SLURM_JOB_ID="7")
    assert "this Slurm job has GPUs (launch.gpus_per_node=2), but torch sees none" in asked.stderr
    assert f"torch {torch.__version__} is built for the CPU" in asked.stderr
    assert "train.device=cpu" in asked.stderr
    given = dtt("train", *settings, expect=78, SLURM_JOB_ID="7", SLURM_GPUS_ON_NODE="2")
    assert "SLURM_GPUS_ON_NODE=2" in given.stderr
    doctor = dtt("doctor", expect=78, SLURM_JOB_ID="7", SLURM_GPUS_ON_NODE="2")
    assert "SLURM_GPUS_ON_NODE=2" in doctor.stderr
    assert not (dtt.folder / "jobs").exists()
    cpu = {"SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "2"}
    dtt("train", *settings, "train.device=cpu", **cpu)
    dtt("train", *settings, "name=outside", "launch.gpus_per_node=2")
    dtt("train", *settings, "name=none", SLURM_JOB_ID="7", SLURM_GPUS_ON_NODE="0")


def test_a_run_whose_steps_were_all_skipped_has_diverged(dtt: Dtt, tiny: Settings) -> None:
    settings = tiny(
        train__z_loss=3e38, train__precision="fp32", train__steps=8, guard__non_finite="skip"
    )  # such gradients are infinite
    done = dtt("train", *settings, expect=76)
    assert "none of its 8 steps changed the weights" in done.stderr
    assert exit_record(dtt.folder / "jobs/t", 1)["code"] == 76
    assert store.steps(dtt.folder / "jobs/t/checkpoints")[-1] < 8
    dtt("train", "jobs/t", expect=76)  # it does not pass for done afterwards


@pytest.mark.slow
def test_more_steps_after_a_decay_warn_of_the_leap_and_the_advice_avoids_it(
    dtt: Dtt, tiny: Settings
) -> None:
    wsd = {"schedule__type": "wsd", "schedule__decay": "50%", "checkpoint__keep_last": 9}
    dtt("train", *tiny(**wsd))
    before = (dtt.folder / "jobs/t").rename(dtt.folder / "jobs/before")
    shutil.copytree(before, dtt.folder / "jobs/t")
    more = ["jobs/t", "train.steps=24", "--allow-change", "train.steps"]
    leapt = dtt("train", *more)
    assert "the learning rate jumps from" in leapt.stderr
    assert "to 100% of its peak after step 12" in leapt.stderr
    assert "the decay from step 7 to 12 has run, and the run now has 24 steps" in leapt.stderr
    shutil.rmtree(dtt.folder / "jobs/t")
    shutil.copytree(before, dtt.folder / "jobs/t")
    advice = re.search(r"next:  dtt (train --branch .*), or dtt (train .*)", leapt.stderr)
    assert advice is not None
    for command in advice.groups():
        followed = dtt(*command.split())
        assert "jumps" not in followed.stderr
    for name in ("t", "ANOTHER"):
        rates = [r["lr"] for r in records(dtt.folder / "jobs" / name, "train")][2:]
        assert rates == sorted(rates, reverse=True), name
    assert "jumps" not in dtt("train", "jobs/t", "checkpoint.keep_last=8").stderr


def test_before_its_first_checkpoint_a_job_may_become_another(dtt: Dtt, tiny: Settings) -> None:
    dtt("train", *tiny(data__tokens="nowhere", train__steps=50), expect=66)
    dtt("train", *tiny(train__steps=4))
    assert reached(dtt.folder / "jobs/t") == 4
    dtt("train", *tiny(train__steps=5), expect=2)
