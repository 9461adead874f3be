"""dtt submit pipeline: one Slurm job per step; a recording fake stands for Slurm."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.fake_slurm import write_commands
from support.running import Dtt

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import ExitCode
from dtt.launch import chain, pipeline
from dtt.launch.submit import SubmitOptions

SBATCH = """\
echo "sbatch $*" >>"$CALLS"
case "$*" in
  *"$REJECTED"*) echo "no such partition" >&2; exit 1 ;;
esac
grep -c "^sbatch" "$CALLS"
"""
FAKES = {
    "sbatch": SBATCH,
    "squeue": 'printf "%b" "$QUEUE"',
    "scancel": 'echo "scancel $*" >>"$CALLS"',
}
DATA = ("name=n", "download.dataset=books.txt", "launch.cpus_per_task=4", "launch.time=60")

Fake = dict[str, str]


@pytest.fixture
def slurm(tmp_path: Path) -> Fake:
    """Environment with an sbatch that counts from 1 and may reject, and a squeue with $QUEUE."""
    path = write_commands(tmp_path / "bin", FAKES)
    (tmp_path / "books.txt").write_text("words " * 100)
    return {"PATH": path, "CALLS": str(tmp_path / "calls"), "QUEUE": "", "REJECTED": "nothing"}


def waiting(id: int, state: str = "PENDING", reason: str = "Dependency") -> str:
    return f"{id}|{state}||1|1|1|{reason}\\n"


def calls(slurm: Fake) -> list[str]:
    return [line.split(" ", 1)[1] for line in Path(slurm["CALLS"]).read_text().splitlines()]


def dependencies(slurm: Fake) -> list[str]:
    return re.findall(r"--dependency=(\S+)", "\n".join(calls(slurm)))


def states(dtt: Dtt, slurm: Fake) -> list[str]:
    said = dtt("job", "status", "jobs/n-pipeline", "--json", **slurm).stdout
    return [step["state"] for step in json.loads(said)["steps"]]


def test_each_step_waits_for_the_one_before_and_is_seen_as_one_thing(dtt: Dtt, slurm: Fake) -> None:
    keys = (*DATA, "launch.gpus_per_node=2", "launch.steps.tokenize.nodes=3")
    slurm["QUEUE"] = waiting(77)
    said = dtt("submit", "pipeline", *keys, "--after", "77", "-y", "--json", **slurm).stdout
    facts = json.loads(said)
    assert [step["job_id"] for step in facts["steps"]] == ["1", "2", "3", "4"]
    jobs = ["jobs/n-download", "jobs/n-tokenize", "jobs/n", "jobs/n-export"]
    assert [step["job_dir"] for step in facts["steps"]] == jobs
    assert calls(slurm) == [
        f"--parsable --dependency=afterok:{before} --kill-on-invalid-dep=yes {job}/slurm.sh"
        for before, job in zip((77, 1, 2, 3), jobs, strict=True)
    ]
    scripts = {job: (dtt.folder / job / "slurm.sh").read_text() for job in jobs}
    with_gpus = [job for job, text in scripts.items() if "--gpus-per-node" in text]
    assert with_gpus == ["jobs/n"]
    assert "--nodes=3\n#SBATCH --ntasks-per-node=4\n#SBATCH --cpus-per-task=1\n" in scripts[jobs[1]]
    assert " -- tokenize -c jobs/n-tokenize/config.yaml\n" in scripts[jobs[1]]
    assert " -- export jobs/n\n" in scripts[jobs[3]]

    slurm["QUEUE"] = "".join(map(waiting, (1, 2, 3, 4)))
    assert states(dtt, slurm) == ["queued"] * 4
    again = dtt("submit", "pipeline", *keys, "-y", expect=2, **slurm).stderr
    assert "jobs/n-download is queued as Slurm job 1" in again
    dtt("job", "rm", "jobs/n-pipeline", "-y", expect=2, **slurm)

    # A job that failed: Slurm cancels what waits for it. The others are submitted again.
    dtt("download", *DATA)
    reason = "DependencyNeverSatisfied"
    slurm["QUEUE"] = waiting(1, "FAILED", "NonZeroExitCode")
    slurm["QUEUE"] += "".join(waiting(id, "CANCELLED", reason) for id in (2, 3, 4))
    assert states(dtt, slurm) == ["failed", "cancelled", "cancelled", "cancelled"]
    why = dtt("job", "status", "jobs/n-export", **slurm).stdout
    assert "the job that it waited for did not succeed" in why
    assert "jobs/n-export is cancelled" not in why
    refused = dtt("submit", "eval", "jobs/n", "--after", "jobs/n-export", expect=2, **slurm).stderr
    assert "its success cannot be waited for" in refused
    dtt("job", "resume", "jobs/n-pipeline", **slurm)
    assert [one.split()[-1] for one in calls(slurm)[4:]] == [f"{job}/slurm.sh" for job in jobs]
    assert "afterok:7 " in calls(slurm)[7]

    slurm["QUEUE"] = "".join(map(waiting, (5, 6, 7, 8)))
    dtt("job", "stop", "jobs/n-pipeline", **slurm)
    assert calls(slurm)[8:] == ["8", "7", "6", "5"]
    slurm["QUEUE"] = "".join(waiting(id, "CANCELLED") for id in (5, 6, 7, 8))
    dtt("job", "rm", "jobs/n-pipeline", "-y", **slurm)
    assert [path.name for path in (dtt.folder / "jobs").iterdir()] == ["n"]

    # Steps whose files exist are not submitted, and a dry run writes nothing.
    shown = dtt("submit", "pipeline", *keys, "--dry-run", **slurm).stdout
    rows = [" ".join(line.split()) for line in shown.splitlines()]
    assert "download done" in rows
    assert "tokenize 3 4 0 60 3.0 node-hours the default" in rows
    assert "train 1 2 2 60 2.0 GPU-hours the default" in rows
    assert not (dtt.folder / "jobs/n-pipeline").exists()


def write_task(folder: Path) -> None:
    (folder / "rows.jsonl").write_text('{"text": "words words"}\n')
    task = "type: rolling\ndata: {file: rows.jsonl}\nanswer: '{text}'\n"
    (folder / "pages.yaml").write_text(task)


def test_an_evaluation_runs_beside_the_training_and_is_done_after_it(dtt: Dtt, slurm: Fake) -> None:
    write_task(dtt.folder)
    keys = (*DATA, "launch.gpus_per_node=a100:4", "eval.tasks=[pages.yaml]")
    dry = dtt("submit", "pipeline", *keys, "--dry-run", **slurm).stdout
    assert "success of the one before, eval runs beside train\n" in dry
    rows = [" ".join(line.split()) for line in dry.splitlines()]
    assert rows[4] == "train 1 4 4 60 4.0 GPU-hours the default"
    assert rows[5] == "eval 1 1 1 60 1.0 GPU-hours the default"
    dry = dtt("submit", "pipeline", *keys, "launch.time=null", "--dry-run", **slurm).stdout
    assert dry.count("the partition's  unknown") == 5
    keys = (*keys, "launch.steps.eval.time=90")
    dtt("submit", "pipeline", *keys, "-y", **slurm)
    assert dependencies(slurm) == ["afterok:1", "afterok:2", "afterok:2,after:3", "afterok:3"]
    script = (dtt.folder / "jobs/n-eval/slurm.sh").read_text()
    assert "--gpus-per-node=a100:1\n#SBATCH --cpus-per-task=1\n#SBATCH --time=90\n" in script
    assert " -- eval jobs/n --watch\n" in script

    # The evaluation ended while the training waited to continue: it evaluates the rest with it.
    def end(name: str, id: int, code: int) -> None:
        job = JobDir(dtt.folder / "jobs" / name)
        job.end_attempt(code, "why", 0, attempt=job.begin_attempt())

    for id, name in ((1, "n-download"), (2, "n-tokenize"), (4, "n-eval")):
        end(name, id, 0)
    end("n", 3, 2)
    reason = "DependencyNeverSatisfied"
    slurm["QUEUE"] = "".join(waiting(id, "COMPLETED", "None") for id in (1, 2, 4))
    slurm["QUEUE"] += waiting(3, "FAILED", "None") + waiting(5, "CANCELLED", reason)
    assert states(dtt, slurm) == ["done", "done", "failed", "done", "cancelled"]
    said = dtt("job", "resume", "jobs/n-pipeline", **slurm).stdout.splitlines()
    assert [line.split()[1] for line in said] == ["train:", "eval:", "export:"]
    assert dependencies(slurm)[4:] == ["after:6", "afterok:6"]

    # Both are done, in this order: only the export is left.
    slurm["QUEUE"] = "".join(waiting(id, "COMPLETED", "None") for id in (1, 2, 6, 7))
    slurm["QUEUE"] += waiting(8, "FAILED", "None")
    end("n", 6, 0)
    end("n-eval", 7, 0)
    end("n-export", 8, 2)
    assert states(dtt, slurm) == ["done", "done", "done", "done", "failed"]
    after = ("--after", "jobs/n-pipeline", "name=later", "--dry-run")
    refused = dtt("submit", "download", *DATA, *after, expect=2, **slurm).stderr
    assert "--after jobs/n-pipeline: export is failed" in refused
    said = dtt("job", "resume", "jobs/n-pipeline", **slurm).stdout.splitlines()
    assert [line.split()[1] for line in said] == ["export:"]


def test_an_evaluation_of_stages_watches_their_folder_until_they_end(dtt: Dtt, slurm: Fake) -> None:
    write_task(dtt.folder)
    stages = "stages=[{name: base, train: {steps: 2}}, {name: last, eval: {tasks: [pages.yaml]}}]"
    said = dtt("submit", "pipeline", *DATA, stages, "-y", **slurm).stdout
    rows = [line.split()[0] for line in said.splitlines()]
    assert rows[2:6] == ["download", "tokenize", "train", "eval"]
    assert dependencies(slurm) == ["afterok:1", "afterok:2", "afterok:2,after:3", "afterok:3"]
    assert " -- eval jobs/n --watch\n" in (dtt.folder / "jobs/n-eval/slurm.sh").read_text()

    # The training has ended before its last stage: nothing is left to evaluate.
    first = JobDir(dtt.folder / "jobs/n/base")
    first.end_attempt(ExitCode.USAGE, "why", 0, attempt=first.begin_attempt())
    slurm["QUEUE"] = waiting(3, "FAILED", "NonZeroExitCode") + waiting(4, "RUNNING", "None")
    watched = dtt("eval", "jobs/n", "--watch", **slurm)
    assert "jobs/n/last has ended: no checkpoints" in watched.stderr
    assert states(dtt, slurm)[2] == "failed"


def test_a_rejected_step_takes_back_those_before_it(dtt: Dtt, slurm: Fake) -> None:
    slurm["REJECTED"] = "jobs/n/slurm.sh"
    said = dtt("submit", "pipeline", *DATA, "-y", expect=78, **slurm).stderr
    assert "no such partition" in said
    assert calls(slurm)[3:] == ["1", "2"]
    assert not (dtt.folder / "jobs/n-pipeline").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("launch.steps.tokenize.time=never",), 2, "launch.steps.tokenize.time"),
        (("launch.steps.train.nodes=2",), 2, "launch.steps.train"),
        (("--print-script",), 2, "--print-script concerns one job"),
        (("model.vocab_size=30", "tokenizer.vocab_size=300"), 2, "outside the embedding"),
        (("--after", "4000"), 2, "Slurm does not know it"),
        (("--after", "jobs/none"), 66, "jobs/none is not a job directory"),
    ],
)
def test_what_a_chain_cannot_do_is_refused(
    arguments: tuple[str, ...], code: int, said: str, dtt: Dtt, slurm: Fake
) -> None:
    done = dtt("submit", "pipeline", *DATA, *arguments, "-y", expect=code, **slurm)
    assert said in done.stderr
    assert not Path(slurm["CALLS"]).exists()


def test_without_slurm_the_steps_run_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran: list[object] = []

    def run(config: str, arguments: list[str], *_: object, **__: object) -> None:
        ran.append((config, arguments))

    monkeypatch.setattr(pipeline, "run", run)
    monkeypatch.setenv("PATH", str(tmp_path))
    chain.run("quickstart", ["name=n"], SubmitOptions())
    assert ran == [("quickstart", ["name=n"])]


TINY = (
    "name=n", "download.dataset=numbers.txt", "tokenizer.vocab_size=270", "model.dim=16",
    "model.n_layers=2", "model.n_heads=2", "train.seq_len=32", "train.global_batch_tokens=96",
    "train.micro_batch=1", "train.steps=3", "tokenize.validation_fraction=0",
    "download.txt_documents=line", "launch.time=60",
)  # fmt: skip


@pytest.fixture(scope="module")
def tokenized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which all steps before the training have run."""
    folder = tmp_path_factory.mktemp("tokenized")
    (folder / "numbers.txt").write_text("".join(f"{n} and {n**3}\n" for n in range(900)))
    for command in ("download", "tokenize"):
        Dtt(folder)(command, *TINY)
    return folder


TENSOR = "parallel.tensor=3 launch.processes_per_node=3"


@pytest.mark.parametrize(
    ("command", "wrong", "code", "said"),
    [
        ("train", "model.vocab_size=30", 2, "smaller than the tokenizer's vocabulary (270)"),
        ("train", "model.max_seq_len=16", 2, "1 mistake in the configuration"),
        ("train", "parallel.tensor=2", 2, "1 processes do not make the mesh of `parallel`"),
        ("train", TENSOR, 2, "the model cannot be divided evenly over the mesh"),
        ("train", "eval.tasks=[pika]", 2, "no task or suite 'pika'"),
        ("train", "init.from=jobs/none@5", 66, "no checkpoint in jobs/none/checkpoints"),
        (
            "tokenize",
            "tokenizer.type=file tokenizer.path=none.json",
            66,
            "no tokenizer at none.json",
        ),
    ],
)
def test_what_a_later_step_refuses_is_said_at_submission_with_the_same_words(
    command: str, wrong: str, code: int, said: str, tokenized: Path, dtt: Dtt, slurm: Fake
) -> None:
    """The data exists only when the step starts."""
    keys = [*TINY, *wrong.split()]
    if command == "tokenize":
        keys.remove("tokenizer.vocab_size=270")
    submitted = dtt("submit", "pipeline", *keys, "-y", expect=code, **slurm)
    there = Dtt(tokenized)
    if wrong == TENSOR:
        step = there.wait(there.start_torchrun(3, "-m", "dtt.main", command, *keys))
    else:
        step = there(command, *keys, expect=code)
    [first, *more] = [line for line in submitted.stderr.splitlines() if line[:2] != "20"]
    assert first.startswith("dtt: ")
    assert said in first
    assert first in step.stderr
    for line in more:
        assert line.startswith("  where: ") or line in step.stderr
    assert not Path(slurm["CALLS"]).exists()
    assert not (dtt.folder / "jobs").exists()
