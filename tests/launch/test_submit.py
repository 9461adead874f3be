"""dtt submit: what is checked, written and handed to Slurm; a recording fake stands for Slurm."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from support.fake_slurm import SQUEUE, write_commands
from support.running import TIMEOUT, Dtt

from dtt.artifacts.jobdir import JobDir
from dtt.artifacts.manifests import CheckpointManifest
from dtt.base.errors import ExitCode
from dtt.config.load import resolve
from dtt.launch import checks

SLOW = {"torch", "numpy", "pyarrow", "datasets", "transformers", "wandb"}
MOST_MODULES = 120
"""Maximum number of dtt's modules that `dtt submit train` imports, each a file to open.

On a login node whose file system is busy, opening them is most of the command's time.
"""

Settings = Callable[..., list[str]]


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """Environment with an sbatch that gives out id 17, and a squeue that knows $QUEUE."""
    fakes = {"sbatch": 'echo "$PWD $*" >>"$CALLS"; echo 17', "squeue": 'printf "%s" "$QUEUE"'}
    path = write_commands(tmp_path / "bin", fakes)
    return {"PATH": path, "CALLS": str(tmp_path / "calls"), "QUEUE": ""}


def test_a_job_directory_is_created_and_submitted(
    dtt: Dtt, tiny: Settings, slurm: dict[str, str]
) -> None:
    settings = tiny(launch__time=90, launch__environment="{NCCL_DEBUG: WARN}")
    done = dtt("submit", "train", *settings, PLANTED="s3cret-value", **slurm)
    assert "12 steps of 256 tokens" in done.stdout
    assert "1 nodes x 1, started by torchrun" in done.stdout
    assert done.stdout.splitlines()[-1].split() == ["submitted", "17"]
    job = JobDir(dtt.folder / "jobs/t")
    assert (dtt.folder / "calls").read_text() == f"{dtt.folder} --parsable jobs/t/slurm.sh\n"
    submission = json.loads(job.submission.read_text())
    assert submission["job_id"] == "17"
    assert submission["command"].startswith("dtt submit train")
    assert abs(submission["time"] - time.time()) < 600
    script = job.script.read_text()
    assert script == dtt("submit", "train", *settings, "--print-script", **slurm).stdout
    assert "#SBATCH --time=90\n" in script
    assert "train.steps" not in script
    assert {"command", "git", "packages"} <= json.loads((job.root / "env.json").read_text()).keys()
    assert job.logs.is_dir()
    for path in job.root.rglob("*"):
        assert path.is_dir() or "s3cret-value" not in path.read_text()
    # The configuration is all that training needs, with Slurm or without.
    dtt("train", "jobs/t")
    assert job.exit_record(1) is not None
    assert job.newest_checkpoint_name() == "step-000012"


def test_a_submission_between_the_checks_and_sbatch_is_noticed(
    dtt: Dtt, tiny: Settings, slurm: dict[str, str]
) -> None:
    dtt("submit", "train", *tiny(), **slurm)
    job = JobDir(dtt.folder / "jobs/t")
    fake = Path(slurm["PATH"].split(":")[0]) / "squeue"
    fake.write_text(f'#!/bin/bash\nsed -i \'s/"17"/"5"/\' {job.submission}\n')
    refused = dtt("submit", "train", "jobs/t", expect=2, **slurm).stderr
    assert "submitted by another process in the meantime" in refused
    assert len((dtt.folder / "calls").read_text().splitlines()) == 1


def test_a_second_terminal_does_not_submit_while_the_first_one_does(
    dtt: Dtt, tiny: Settings, slurm: dict[str, str]
) -> None:
    again = shlex.join([sys.executable, "-m", "dtt.main", "submit", "train", *tiny(), "-y"])
    (Path(slurm["PATH"].split(":")[0]) / "sbatch").write_text(
        '#!/bin/bash\necho sbatch >>"$CALLS"\n'
        f'[[ $(wc -l <"$CALLS") != 1 ]] || {again} >"$CALLS.second" 2>&1\necho 17\n'
    )
    assert dtt("submit", "train", *tiny(), **slurm).stdout.endswith("submitted  17\n")
    assert (dtt.folder / "calls").read_text() == "sbatch\n"
    assert "is running dtt train or dtt submit there" in (dtt.folder / "calls.second").read_text()


def test_a_dry_run_and_the_script_alone_write_nothing(
    dtt: Dtt, tiny: Settings, slurm: dict[str, str]
) -> None:
    shown = dtt("submit", "train", *tiny(), "--dry-run", **slurm)
    assert "jobs/t/slurm.sh" in shown.stdout
    assert dtt("submit", "train", *tiny(), "--print-script", **slurm).stdout.startswith("#!/bin")
    asked = dtt("submit", "train", *tiny(), "--dry-run", "--json", **slurm)
    facts = {"job_id": None, "job_dir": "jobs/t", "script": "jobs/t/slurm.sh"}
    assert json.loads(asked.stdout) == facts
    assert not (dtt.folder / "jobs").exists()
    assert not (dtt.folder / "calls").exists()


def test_all_problems_are_reported_together(
    dtt: Dtt, tiny: Settings, tokens: Path, slurm: dict[str, str]
) -> None:
    broken = dtt.folder / "broken"
    shutil.copytree(tokens, broken)
    shard, other = sorted(broken.glob("**/*.bin"))[:2]
    shard.unlink()
    other.write_bytes(b"x")
    (broken / "tokenizer.json").write_text("{}")
    settings = tiny(
        data__tokens=broken, launch__nodes=3, model__vocab_size=100,
        launch__setup='["source nix.sh", "if"]', init__from="jobs/nix", train__device="cuda",
    )  # fmt: skip
    done = dtt("submit", "train", *settings, expect=2, **slurm)
    for problem in (
        "9 problems, nothing was submitted", "there is no such job", "requests no GPU from Slurm",
        str(shard), str(other), "nix.sh",
        "cannot be divided evenly among 3 processes", "the tokenizer is not the one",
        "model.vocab_size (100) is smaller", "is not valid bash: if",
    ):  # fmt: skip
        assert problem in done.stderr
    assert not (dtt.folder / "jobs").exists()


@pytest.mark.slow
def test_a_disk_too_small_for_the_checkpoints_is_reported(
    dtt: Dtt, tiny: Settings, slurm: dict[str, str]
) -> None:
    for kept in ("keep_last", "keep_every", "keep_best"):
        settings = tiny(
            **{f"checkpoint__{kept}": 1 if kept == "keep_every" else 10**12},
            checkpoint__every=1, train__steps=10**12, train__eval_every=1,
        )  # fmt: skip
        done = dtt("submit", "train", *settings, "--dry-run", expect=74, **slurm)
        assert "not enough disk space for 1000000000" in done.stderr
    settings = tiny(checkpoint__keep_every=1, train__steps=10**12, train__budget="6h")
    done = dtt("submit", "train", *settings, "--dry-run", **slurm)
    assert "training   at most 1000000000000 steps" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"launch__gpus_per_node": 2, "launch__processes_per_node": 8},
            "8 processes per node, but 2",
        ),
        ({"launch__gpus_per_node": 3}, "cannot be divided evenly among 3 processes"),
        ({"launch__nodes": 3, "parallel__tensor": 2}, "do not make the mesh"),
        ({"launch__nodes": 3, "parallel__tensor": 3}, "is not a multiple of tensor 3"),
    ],
)
def test_invalid_process_counts_are_reported(
    changes: dict[str, int], problem: str, dtt: Dtt, tiny: Settings
) -> None:
    assert problem in dtt("submit", "train", *tiny(**changes), "--dry-run", expect=2).stderr


@pytest.mark.slow
def test_processes_that_share_their_samples_count_once(dtt: Dtt, tiny: Settings) -> None:
    settings = tiny(
        launch__nodes=3, parallel__context=3, train__seq_len=48, train__global_batch_tokens=4 * 48
    )
    done = dtt("submit", "train", *settings, "--dry-run", "--json")
    assert json.loads(done.stdout)["job_id"] is None  # nothing refused it


def test_only_the_batches_that_are_left_must_fit_the_processes(
    tiny: Settings, tmp_path: Path
) -> None:
    cfg = resolve(
        None,
        tiny(launch__nodes=4, train__batch_schedule="{type: doubling, start: 64, every: 3}"),
        env={},
    ).config
    job = JobDir(tmp_path)
    [found] = checks.batch_problems(cfg, job)
    assert "the batch of step 1, 2 sequences, cannot be divided" in str(found)
    (job.checkpoints / "step-000003").mkdir(parents=True)
    assert not list(checks.batch_problems(cfg, job))


@pytest.mark.slow
def test_a_missing_init_checkpoint_is_reported(dtt: Dtt, tiny: Settings) -> None:
    (dtt.folder / "jobs/base/checkpoints/step-000004").mkdir(parents=True)
    for said, code in (("jobs/base@9", 66), ("jobs/base@4", 0), ("jobs/base", 0)):
        done = dtt("submit", "train", *tiny(init__from=said), "--dry-run", expect=code)
        assert ("no checkpoint of step 9" in done.stderr) == (code == 66)


@pytest.mark.slow
def test_gpus_requested_by_directives_count(dtt: Dtt, tiny: Settings) -> None:
    settings = tiny(train__device="cuda", launch__directives='["--exclusive"]')
    done = dtt("submit", "train", *settings, "--dry-run", "--json")
    assert json.loads(done.stdout)["job_id"] is None  # nothing refused it


@pytest.mark.slow
def test_a_job_does_not_resume_with_other_token_files(dtt: Dtt, tiny: Settings) -> None:
    job = JobDir(dtt.folder / "jobs/t")
    (job.checkpoints / "step-000004").mkdir(parents=True)
    job.config.write_text("name: t\n")
    manifest = CheckpointManifest(
        step=4, attempt=1, world_size=1, config_sha256="", data_key="another", versions={}, files=()
    )
    (job.checkpoints / "step-000004" / manifest.filename).write_text(manifest.dump())
    (job.checkpoints / "step-000008").mkdir()  # damaged: training would pass it over, too
    allowed = (f"--allow-change={setting.split('=')[0]}" for setting in tiny())
    done = dtt("submit", "train", *tiny(), *allowed, "--dry-run", expect=2)
    assert "was trained on token files or text that have changed since" in done.stderr


def test_missing_token_files_have_their_own_exit_code(
    dtt: Dtt, tiny: Settings, slurm: dict[str, str]
) -> None:
    done = dtt("submit", "train", *tiny(data__tokens="nix"), expect=66, **slurm)
    assert "dtt tokenize" in done.stderr


def test_without_sbatch_nothing_is_written(dtt: Dtt, tiny: Settings) -> None:
    empty = dtt.folder / "empty"
    empty.mkdir()
    (empty / "bash").symlink_to("/bin/bash")
    done = dtt("submit", "train", *tiny(), expect=78, PATH=str(empty))
    assert "sbatch is not installed" in done.stderr
    assert not (dtt.folder / "jobs").exists()


@pytest.mark.slow
def test_a_job_that_is_queued_or_running_is_not_submitted_twice(
    dtt: Dtt, tiny: Settings, slurm: dict[str, str]
) -> None:
    dtt("submit", "train", *tiny(), **slurm)
    queued = slurm | {"QUEUE": SQUEUE["PENDING"].format(id="17", since=round(time.time()))}
    done = dtt("submit", "train", "jobs/t", expect=2, **queued)
    assert "jobs/t is queued as Slurm job 17" in done.stderr
    job = JobDir(dtt.folder / "jobs/t")
    first = json.loads(job.submission.read_text())["time"]
    job.begin_attempt()
    assert "jobs/t is running" in dtt("submit", "train", "jobs/t", expect=2, **slurm).stderr
    job.end_attempt(ExitCode.BUG, "a bug", 0, attempt=1)
    dtt("submit", "train", "jobs/t", "launch.nodes=2", **slurm)
    assert json.loads(job.submission.read_text())["time"] > first
    assert yaml.safe_load(job.config.read_text())["launch"]["nodes"] == 2
    (job.checkpoints / "step-000004").mkdir(parents=True)
    changed = dtt("submit", "train", "jobs/t", "train.steps=50", expect=2, **slurm)
    assert "--allow-change train.steps" in changed.stderr


def test_a_rejection_by_sbatch_is_reported_with_its_message(
    dtt: Dtt, tiny: Settings, slurm: dict[str, str]
) -> None:
    fake = Path(slurm["PATH"].split(":")[0]) / "sbatch"
    fake.write_text('#!/bin/bash\necho "sbatch: error: invalid partition" >&2\nexit 1\n')
    done = dtt("submit", "train", *tiny(), expect=78, **slurm)
    assert "sbatch: error: invalid partition" in done.stderr
    assert not (dtt.folder / "jobs/t").exists()
    (dtt.folder / "jobs/t").mkdir()
    config = dtt.folder / "jobs/t/config.yaml"
    dtt("submit", "train", *tiny(), expect=78, **slurm)
    assert not config.exists()
    config.write_text("name: t")
    files = {config: "name: t"}
    for name in ("slurm.sh", "env.json", "supervisor/supervise.py"):
        files[dtt.folder / "jobs/t" / name] = name
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    dtt("submit", "train", *tiny(), expect=78, **slurm)
    assert {path: path.read_text() for path in files} == files
    [_] = (dtt.folder / "jobs/t/supervisor").iterdir()


@pytest.mark.slow
def test_a_timeout_of_sbatch_removes_nothing(
    dtt: Dtt, tiny: Settings, slurm: dict[str, str]
) -> None:
    fake = Path(slurm["PATH"].split(":")[0]) / "sbatch"
    fake.write_text(
        "#!/bin/bash\necho 'sbatch: error: Socket timed out on send/recv' >&2\nexit 1\n"
    )
    done = dtt("submit", "train", *tiny(), expect=78, **slurm)
    assert "it is unknown whether Slurm accepted the job" in done.stderr
    assert (dtt.folder / "jobs/t/slurm.sh").exists()
    reported = json.loads(dtt("job", "status", "jobs/t", "--json", **slurm).stdout)
    assert reported["state"] == "unknown"
    # Slurm shows it: the job is what it is.
    script = dtt.folder / "jobs/t/slurm.sh"
    known = slurm | {"QUEUE": f"31|{time.time():.0f}|{script}\n"}
    asked = dtt("submit", "train", *tiny(), **known).stdout
    assert asked.splitlines()[-1].split() == ["submitted", "31"]


@pytest.mark.slow
def test_a_time_limit_in_which_the_job_could_not_save_is_refused(
    dtt: Dtt, tiny: Settings, slurm: dict[str, str]
) -> None:
    short = dtt("submit", "train", *tiny(launch__time=1), "--dry-run", **slurm)
    assert "warning    Slurm may send its signal 60 s early" in short.stdout
    assert "warning" not in dtt("submit", "train", *tiny(), "--dry-run", **slurm).stdout
    job = JobDir(dtt.folder / "jobs/t")
    job.write_lead(step=20.0, save=300.0)  # 670 s
    done = dtt("submit", "train", *tiny(launch__time="20:00"), "--dry-run", expect=2, **slurm)
    assert "launch.time (20:00) is too short for this job" in done.stderr
    assert "launch.time=23 or more" in done.stderr
    dtt("submit", "train", *tiny(launch__time=23), "--dry-run", **slurm)
    job.lead.write_text("no number\n")
    dtt("submit", "train", *tiny(launch__time="20:00"), "--dry-run", **slurm)


@pytest.mark.parametrize(("answer", "submits"), [("n\n", False), ("\n", True)])
def test_submit_asks_for_confirmation_at_a_terminal(
    answer: str, submits: bool, dtt: Dtt, tiny: Settings, slurm: dict[str, str]
) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "dtt.main", "submit", "train", *tiny(), "--json"]
    process = subprocess.Popen(
        command, cwd=dtt.folder, env=os.environ | slurm, stdin=theirs, stderr=theirs,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    os.close(theirs)
    said = b""
    while b"submit? [Y/n]" not in said:
        said += os.read(ours, 1024)
    os.write(ours, answer.encode())
    reported, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0
    assert json.loads(reported)["job_id"] == ("17" if submits else None)
    os.close(ours)
    assert (dtt.folder / "calls").exists() == submits
    assert (dtt.folder / "jobs").exists() == submits


@pytest.mark.slow
def test_a_profile_overrides_the_config_key_by_key(
    dtt: Dtt, tiny: Settings, slurm: dict[str, str]
) -> None:
    (dtt.folder / "mine.yaml").write_text(
        "launch: {partition: slow, account: me, environment: {A: 1}, setup: [echo mine]}"
    )
    (dtt.folder / "run.yaml").write_text(
        "launch: {partition: fast, qos: low, environment: {A: 2, B: 2}, setup: [echo run]}"
    )
    arguments = ("-c", "run.yaml", *tiny(), "--cluster", "mine.yaml", "--print-script")
    script = dtt("submit", "train", *arguments, **slurm).stdout
    assert "#SBATCH --partition=slow\n#SBATCH --account=me\n#SBATCH --qos=low\n" in script
    assert "export A=1\n    export B=2\n    eval 'echo mine' || return\n    return 0" in script
    arguments = (*arguments, "launch.partition=mid", "launch.setup=[echo typed]")
    script = dtt("submit", "train", *arguments, **slurm).stdout
    assert "#SBATCH --partition=mid\n" in script
    assert "export B=2\n    eval 'echo typed' || return\n    return 0" in script
    dtt("submit", "train", "-c", "run.yaml", *tiny(), **slurm)
    arguments = ("jobs/t", "--cluster", "mine.yaml", "--print-script")
    assert "--account=me" in dtt("submit", "train", *arguments, **slurm).stdout
    (dtt.folder / "mine.yaml").write_text("launch: {account: me}\noptim: {lr: 5.0}")
    done = dtt("submit", "train", "jobs/t", "--cluster", "mine.yaml", expect=2, **slurm)
    assert "mine.yaml is not a cluster profile: it sets optim.lr" in done.stderr
    unknown = dtt("submit", "train", *tiny(), "--cluster", "generc", expect=66, **slurm)
    assert "clusters/generic" in unknown.stderr


@pytest.mark.slow
def test_the_other_commands_have_directories_of_their_own(dtt: Dtt, slurm: dict[str, str]) -> None:
    (dtt.folder / "books.txt").write_text("words " * 100)
    data = ["name=n", "download.dataset=books.txt", "launch.nodes=2"]
    data.append("tokenize.validation_fraction=0")  # of one document
    dtt("submit", "download", *data, **slurm)
    script = (dtt.folder / "jobs/n-download/slurm.sh").read_text()
    assert " -- download -c jobs/n-download/config.yaml\n" in script
    assert "#SBATCH --nodes=1\n" in script
    assert "#SBATCH --job-name=n-download\n" in script
    missing = dtt("submit", "tokenize", *data, expect=66, **slurm)
    assert "dtt download" in missing.stderr
    dtt("download", "-c", "jobs/n-download/config.yaml")
    dtt("submit", "tokenize", *data, "launch.processes_per_node=2", **slurm)
    script = (dtt.folder / "jobs/n-tokenize/slurm.sh").read_text()
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=2\n" in script
    # What the script counts as progress is what the commands write.
    dtt("submit", "clean", *data, "clean.exact=true", **slurm)
    for command in ("clean", "tokenize"):
        dtt(command, "-c", f"jobs/n-{command}/config.yaml")
        script = (dtt.folder / f"jobs/n-{command}/slurm.sh").read_text()
        [pattern] = re.findall("--progress='(.*)'", script)
        assert len(list(dtt.folder.glob(pattern))) > 0


@pytest.mark.slow
def test_stages_are_submitted_as_one_job(dtt: Dtt, tiny: Settings, slurm: dict[str, str]) -> None:
    stages = "[{name: pretrain}, {name: midtrain, train: {steps: 8}}]"
    settings = tiny(name="s", stages=stages)
    shown = dtt("submit", "train", *settings, "--dry-run", **slurm).stdout
    assert "stage      pretrain: 12 steps" in shown
    assert "stage      midtrain: 8 steps" in shown
    assert not (dtt.folder / "jobs").exists()
    other = (*settings, "stages.midtrain.launch.nodes=2")
    assert "different `launch` sections" in dtt("submit", "train", *other, expect=2, **slurm).stderr
    odd = (*settings, "launch.nodes=2", "stages.midtrain.train.global_batch_tokens=96")
    assert "batch of 3 sequences cannot" in dtt("submit", "train", *odd, expect=2, **slurm).stderr

    assert "submitted  17" in dtt("submit", "train", *settings, **slurm).stdout
    assert (dtt.folder / "calls").read_text() == f"{dtt.folder} --parsable jobs/s/slurm.sh\n"
    script = (dtt.folder / "jobs/s/slurm.sh").read_text()
    assert " --stages jobs/s/pretrain jobs/s/midtrain " in script
    # Its jobs hold all that the script needs, and each starts from the one before it.
    assert "the previous stage is not done" in dtt("train", "jobs/s/midtrain", expect=66).stderr
    for name in ("pretrain", "midtrain"):
        dtt("train", f"jobs/s/{name}")
    record = JobDir(dtt.folder / "jobs/s/midtrain").stage_record()
    assert record is not None
    assert record["predecessor"]["step"] == 12
    assert "all stages of jobs/s are done" in dtt(
        "submit", "train", *settings, expect=2, **slurm
    ).stderr  # fmt: skip
    (dtt.folder / "jobs/s/midtrain").rename(dtt.folder / "midtrain")
    dtt("submit", "train", *settings, **slurm)
    assert "submitted  17" in dtt("job", "resume", "jobs/s/midtrain", **slurm).stdout
    assert (dtt.folder / "calls").read_text().splitlines()[-1].endswith(" jobs/s/slurm.sh")


def test_a_rejected_submission_of_stages_leaves_nothing(
    dtt: Dtt, tiny: Settings, slurm: dict[str, str]
) -> None:
    (dtt.folder / "bin/sbatch").write_text("#!/bin/bash\necho no such partition >&2; exit 1\n")
    stages = tiny(name="s", stages="[{name: a}, {name: b}]")
    assert "no such partition" in dtt("submit", "train", *stages, expect=78, **slurm).stderr
    assert not (dtt.folder / "jobs/s").exists()


def test_the_directory_of_another_job_is_refused(
    dtt: Dtt, tiny: Settings, slurm: dict[str, str]
) -> None:
    dtt("submit", "train", *tiny(name="z-download"), **slurm)
    own = (dtt.folder / "jobs/z-download/config.yaml").read_text()
    arguments = ("submit", "download", "name=z", "download.dataset=python-stdlib")
    done = dtt(*arguments, expect=2, **slurm)
    assert "jobs/z-download is the directory of another job, z-download" in done.stderr
    assert (dtt.folder / "jobs/z-download/config.yaml").read_text() == own


@pytest.mark.slow
def test_an_export_requires_a_checkpoint(dtt: Dtt, tiny: Settings, slurm: dict[str, str]) -> None:
    none = dtt("submit", "export", "jobs/t", expect=66, **slurm)
    assert "not a job directory" in none.stderr
    dtt("submit", "train", *tiny(), **slurm)
    assert "no checkpoint" in dtt("submit", "export", "jobs/t", expect=66, **slurm).stderr
    (dtt.folder / "jobs/t/checkpoints/step-000004").mkdir(parents=True)
    dtt("submit", "export", "jobs/t", "export.license=a b", "export.dtype=fp32", **slurm)
    script = (dtt.folder / "jobs/t-export/slurm.sh").read_text()
    assert " -- export jobs/t export.dtype=fp32 'export.license=a b'\n" in script


def test_a_watch_is_submitted_next_to_its_job_with_the_options_of_eval(
    dtt: Dtt, tiny: Settings, slurm: dict[str, str]
) -> None:
    """The job has no checkpoint yet: the watch waits for it."""
    dtt("submit", "train", *tiny(eval__tasks="[piqa]", eval__limit=5), **slurm)
    dtt("submit", "eval", "jobs/t", **slurm)
    script = dtt.folder / "jobs/t-eval/slurm.sh"
    assert " -- eval jobs/t --watch\n" in script.read_text()
    changed = ["eval.limit=7", "eval.tasks=[piqa, copa]", "launch.time=2:00:00"]
    printed = dtt("submit", "eval", "jobs/t", *changed, "--print-script", **slurm).stdout
    keys = "'eval.tasks=[piqa, copa]' eval.limit=7"
    assert f" -- eval jobs/t --watch {keys}\n" in printed
    assert "#SBATCH --time=2:00:00" in printed
    unknown = dtt("submit", "eval", "jobs/t", "eval.tasks=[pika]", expect=2, **slurm)
    assert "piqa" in unknown.stderr
    none = dtt("submit", "eval", "jobs/t", "eval.tasks=[]", expect=2, **slurm)
    assert "no tasks to evaluate" in none.stderr
    printed = dtt("submit", "eval", "jobs/t", "eval.every=5", "--print-script", **slurm).stdout
    assert " -- eval jobs/t --watch\n" in printed


def test_a_watch_of_a_job_in_another_folder_finds_the_files_of_its_tasks(
    dtt: Dtt, tiny: Settings, slurm: dict[str, str]
) -> None:
    (dtt.folder / "words.yaml").write_text(
        "type: cloze\ndata: {file: rows.jsonl}\nprompt: '{text}'\nanswer: '{a}'\n"
    )
    dtt("submit", "train", *tiny(eval__tasks="[words.yaml]"), **slurm)
    other = dtt.folder / "other"
    other.mkdir()
    job = dtt.folder / "jobs/t"
    printed = Dtt(other)("submit", "eval", job, "--print-script", **slurm).stdout
    assert f" -- eval {job} --watch\n" in printed
    checked = Dtt(other)("submit", "eval", job, "--dry-run", **slurm).stdout
    assert f"script     {dtt.folder}/jobs/t-eval/slurm.sh\n" in checked


def test_invalid_submissions_are_refused(dtt: Dtt, slurm: dict[str, str]) -> None:
    both = dtt("submit", "train", "-c", "quickstart", "--print-script", "--json", expect=2, **slurm)
    assert "are mutually exclusive" in both.stderr
    assert "dtt submit train" in dtt("submit", "generate", expect=2, **slurm).stderr
    done = dtt("submit", "tokenize", "jobs/x", expect=2, **slurm)
    assert "cannot understand the argument 'jobs/x'" in done.stderr


def test_a_login_node_needs_nothing_slow(dtt: Dtt, tiny: Settings, slurm: dict[str, str]) -> None:
    code = (
        "import atexit, sys\n"
        "atexit.register(lambda: print('imported:', *sys.modules))\n"
        f"sys.argv = {['dtt', 'submit', 'train', *map(str, tiny())]!r}\n"
        "from dtt.main import main\nmain()"
    )
    out, err = dtt.start_python("-c", code, **slurm).communicate(timeout=TIMEOUT)
    assert "submitted  17" in out, err
    imported = set(out.splitlines()[-1].split()[1:])
    assert not sorted(SLOW & imported)
    own = sorted(name for name in imported if name.partition(".")[0] == "dtt")
    assert len(own) <= MOST_MODULES, "\n".join(own)
