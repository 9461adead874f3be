"""Every command on every page is run, as it is printed, in a folder where it can succeed.

Those of cli.md, a third of the time, run at night: nightly_cli_page.py.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import chdir, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
from support import sandbox
from support.forked import can_fork, run_dtt
from support.loopback_hub import LoopbackHub
from support.running import ROOT, TIMEOUT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = {page.name: page.read_text(encoding="utf-8") for page in PAGES if page.name != "errors.md"}
COMMAND = re.compile(r"(?:[A-Z_]+=\S+ )*(?:dtt|torchrun|mpirun|srun|touch|source|\./env\.sh) ")
OTHERS = re.compile(r"$|pip install \.|uv run |UV_NO_SOURCES=1 uv |salloc |export ")
"""Lines of shell blocks that are not run: they install, wait for a cluster, or set a variable."""


@dataclass(frozen=True)
class Case:
    """The needs of a line that are not on its page, and its exit codes where they are not 0."""

    codes: tuple[int, ...] = (0,)
    env: dict[str, str] = field(default_factory=dict)
    stop: bool = False
    """It would train for hours: the job is asked to stop once it trains. Exit code 75."""
    job: bool = False
    """A job is running meanwhile: jobs/run, or the one that the line names."""
    interrupt: bool = False
    """It runs until Ctrl-C, which is sent after its first output."""
    unfinished: bool = False
    """The jobs have a step left to train, whatever the lines before this one have done."""
    instead: dict[str, str] = field(default_factory=dict)
    """Parts of the line, and what is run for them on two cores."""


NO_WANDB = Case((78,), env={"WANDB_BASE_URL": "http://127.0.0.1:9"})
FEW = Case(env={"DTT_TRAIN__STEPS": "2", "DTT_SCHEDULE__WARMUP": "0"})
TRIALS = Case(env=sandbox.TRIALS)
STOPPED = Case((75,), stop=True)
ASKED = Case(instead={"jobs/assistant": "jobs/assistant < questions.txt"})
"""A conversation in a terminal, which a page cannot type."""
LONGER = Case(env={"DTT_TRAIN__SEQ_LEN": "128"})
"""Conversations have more tokens than the samples of the other lines."""
OTHER_MODEL = Case(
    instead={"dtt": f"env {' '.join(f'-u {k}' for k in sandbox.TINY if k[:4] == 'DTT_')} dtt"}
)
"""A job that was not trained with the configuration of the environment."""
LAST_STEP = Case(unfinished=True)
TWO_RANKS = {"--nproc_per_node 8": "--nproc_per_node 2", "parallel.shard=4": "parallel.shard=1"}
TWO_PROCESSES = Case(instead={"--processes 8": "--processes 2"})
RUNNING = Case(job=True, unfinished=True)
STAGES = Case(
    env={f"DTT_STAGES__{stage}__TRAIN__STEPS": "2" for stage in ("PRETRAIN", "MIDTRAIN", "LONG")}
    | {"DTT_SCHEDULE__WARMUP": "0", "DTT_STAGES__LONG__TRAIN__SEQ_LEN": "64"},
    instead=TWO_RANKS,
)
"""Every stage has two steps."""
VERDICT = Case(
    (0, 76),
    env={
        "DTT_TRAIN__GLOBAL_BATCH_TOKENS": "128",
        "DTT_TRAIN__MICRO_BATCH": "4",
        "DTT_SCHEDULE__WARMUP": "0",
    },
    instead={
        "coord-check -c": "coord-check --widths 32,64 -c",
        "transfer": "transfer --widths 16,32 train.steps=4",
        "train.steps=200": "",
    },
)
"""A model that has learned for a few steps may pass or fail a check of muP."""
SHORT_VERIFICATION = {"verify -c run.yaml": "verify -c run.yaml parallel.replicate=1"}
CASES = {
    "dtt download -d s3://bucket/prefix 'download.exclude=[old/]'": Case(
        instead={"s3://bucket/prefix 'download.exclude=[old/]'": "~/books"}
    ),
    "dtt verify -c run.yaml": Case(instead=SHORT_VERIFICATION),
    # In one process: each of several would import all libraries and collect the same tests.
    "./env.sh pytest": Case(env={"PYTEST_ADDOPTS": "--collect-only -q -n 0 tests/test_house.py"}),
    # Collecting these tests takes ten seconds: that the paths are right is enough.
    "./env.sh pytest tests/model tests/hf tests/parallel/test_tensor.py": Case(
        instead={"./env.sh pytest": f"cd {ROOT} && ls"}
    ),
    # .ci/run has it as it is printed, with all steps.
    "./env.sh dtt pipeline -c configs/quickstart.yaml": Case(
        env=FEW.env, instead={"./env.sh dtt": "dtt"}
    ),
    "dtt pipeline -c quickstart": FEW,
    "dtt pipeline -c quickstart -d ~/books name=books": FEW,
    "dtt pipeline -c quickstart -d roneneldan/TinyStories name=tiny train.steps=5000": STOPPED,
    "dtt pipeline -c run.yaml": LAST_STEP,
    "dtt train -c run.yaml": LAST_STEP,
    "dtt pipeline -c chat": Case(
        env={
            "DTT_STAGES__PRETRAIN__TRAIN__STEPS": "2",
            "DTT_STAGES__SFT__TRAIN__EPOCHS": "0.02",
            "DTT_STAGES__PRETRAIN__SCHEDULE__WARMUP": "0",
            "DTT_STAGES__SFT__SCHEDULE__WARMUP": "0",
        }
        | LONGER.env
    ),
    "dtt train -c sft.yaml": LONGER,
    "dtt train -c dpo.yaml": LONGER,
    "dtt chat jobs/chat/sft": Case(
        instead={"dtt": OTHER_MODEL.instead["dtt"], "chat/sft": "chat/sft < questions.txt"}
    ),
    "dtt chat exports/preferred": Case(instead={"preferred": "preferred < questions.txt"}),
    "dtt chat jobs/helper": Case(instead={"helper": "helper < questions.txt"}),
    "dtt chat jobs/assistant": ASKED,
    'dtt chat jobs/assistant --system "Answer in one sentence." --temperature 0': ASKED,
    "dtt chat jobs/assistant --web": Case((0, 130), interrupt=True),
    "dtt export jobs/assistant": OTHER_MODEL,
    "dtt export jobs/chat/pretrain --out exports/base": OTHER_MODEL,
    "dtt export jobs/answers": OTHER_MODEL,
    "dtt export jobs/preferred": OTHER_MODEL,
    "dtt train -c run.yaml train.micro_batch=32": LAST_STEP,
    "dtt train -c run.yaml train.device=cpu train.precision=fp32 train.compile=false": LAST_STEP,
    "dtt train jobs/stories": LAST_STEP,
    # Eight GPUs: two processes on two cores.
    "dtt doctor --processes 8 --path jobs": TWO_PROCESSES,
    "srun --ntasks=1 dtt doctor --processes 8 --path jobs/run": TWO_PROCESSES,
    # Hours of training.
    "dtt train jobs/stories train.steps=10000 --allow-change train.steps": STOPPED,
    "dtt train jobs/stories --from-step 4000": STOPPED,
    "dtt train -c run.yaml name=second init.from=jobs/stories": STOPPED,
    "dtt train -c run.yaml name=third init.from=hf:openai-community/gpt2": STOPPED,
    "dtt train --branch jobs/stories@3000 schedule.decay=10%": STOPPED,
    "dtt train --branch jobs/stories@3000 schedule.decay=500 train.steps=4000 name=longer": STOPPED,
    "dtt train -c run.yaml name=night train.steps=1000000 train.budget=6h": STOPPED,
    "dtt train --branch jobs/run@3000 schedule.decay=500": STOPPED,
    "dtt mup coord-check -c run.yaml --widths 128,256,512 optim.type=adamw": Case(
        (0, 76), env=VERDICT.env
    ),
    # The image of this cluster is on its own disks: any file will do.
    "dtt submit train -c run.yaml --cluster lumi launch.nodes=4": Case(
        instead={"--cluster lumi": "--cluster lumi launch.container.image=prompt.txt"}
    ),
    # No server of Weights & Biases can be reached.
    "dtt wandb jobs/stories": NO_WANDB,
    "dtt wandb jobs/lr/* --project sweeps --json": NO_WANDB,
    "dtt wandb --from team/old/1a2b3c4d --entity team --project new": NO_WANDB,
    # They talk to a job that trains, or to one that Slurm has.
    "dtt job stop jobs/stories": RUNNING,
    "dtt job stop jobs/run": RUNNING,
    "dtt job save jobs/run": RUNNING,
    "dtt job profile jobs/stories": RUNNING,
    "dtt job profile jobs/run": RUNNING,
    "dtt job logs jobs/run -f": Case((130,), interrupt=True),
    "dtt report --serve": Case((0, 130), interrupt=True),
    "dtt eval jobs/run --tasks arc_easy --watch": Case((75, 130), interrupt=True),
    # It has a number of steps of its own; and this checkpoint has been set aside by a line before.
    "dtt sweep submit quickstart-lr --local 2": Case(),
    "dtt export jobs/stories@4500 --out exports/stories-4500": LAST_STEP,
    "dtt export jobs/stories@4500 --upload org/stories --revision step-4500": LAST_STEP,
}


def case_of(line: str) -> Case:
    """Return the case of a line: its own, or that of all lines like it."""
    if line in CASES:
        return CASES[line]
    if "stages.yaml" in line:
        return STAGES
    if re.search(r"-c (chats|preferences)\.yaml|(jobs|exports)/helper", line):
        return LONGER
    if "dtt clean" in line:
        return Case(env={"DTT_CLEAN__EXACT": "true"})
    if line.startswith("torchrun"):
        return Case(unfinished=" train " in line, instead=TWO_RANKS)
    if line.startswith("dtt mup"):
        return VERDICT
    return TRIALS if "sweep" in line or "jobs/lr/" in line else Case()


def lines_of_all_pages() -> dict[str, list[str]]:
    """Return the commands by page: without comments, each on the first page that prints it."""
    seen: set[str] = set()
    pages = {}
    for page, text in TEXT.items():
        blocks = re.findall(r"^```sh\n(.*?)^```$", text, re.M | re.S)
        if page == "README.md":
            blocks.insert(0, text.split("```\n")[1])
        shown = [line for block in blocks for line in block.splitlines()]
        assert [one for one in shown if not COMMAND.match(one) and not OTHERS.match(one)] == []
        found = [re.sub(r"\s+#.*$", "", line) for line in shown if COMMAND.match(line)]
        pages[page] = [line for line in dict.fromkeys(found) if line not in seen]
        seen.update(found)
    return {page: lines for page, lines in pages.items() if lines}


LINES = lines_of_all_pages()


def test_every_case_is_a_line_of_a_page() -> None:
    printed = [line for lines in LINES.values() for line in lines]
    assert [line for line in CASES if line not in printed] == []


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, LoopbackHub]]:
    """A sandbox, and the Hub that its commands reach."""
    folder = tmp_path_factory.mktemp("sandbox")
    with LoopbackHub() as hub:
        sandbox.make(folder, hub, "".join(TEXT.values()))
        yield folder, hub


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", [page for page in LINES if page != "cli.md"])
def test_every_command_of_a_page_runs_as_printed(
    page: str, prepared: tuple[Path, LoopbackHub], tmp_path: Path
) -> None:
    run_page(page, prepared, tmp_path / "here")


def run_page(page: str, prepared: tuple[Path, LoopbackHub], folder: Path) -> None:
    """Run all lines of a page in a copy of the sandbox; fail for those that end otherwise."""
    original, hub = prepared
    shutil.copytree(original, folder, symlinks=True)
    wrong = []
    with chdir(folder), patch.dict(os.environ, sandbox.environment(folder, hub)):
        for line in LINES[page]:
            case = case_of(line)
            for job in ("jobs/run", "jobs/stories"):  # `dtt job rm` has run, too
                if case.unfinished or not Path(job).exists():
                    shutil.rmtree(job, ignore_errors=True)
                    shutil.copytree(original / job, job, symlinks=True)
            start = time.monotonic()
            code, said = run(line, case, folder)
            print(f"{time.monotonic() - start:6.1f} s, exit code {code:3}: {line}", flush=True)
            if code not in case.codes or "Traceback" in said:
                wrong.append(f"$ {line}\nexit code {code}, not {case.codes}\n{said[-2000:]}")
    assert not wrong, "\n\n".join(wrong)


def run(line: str, case: Case, folder: Path) -> tuple[int, str]:
    """Run a line; return its exit code and all it printed."""
    for printed, here in case.instead.items():
        line = line.replace(printed, here)
    with (
        patch.dict(os.environ, case.env),
        stopping(folder) if case.stop else running(folder, line) if case.job else nullcontext(),
    ):
        if line.startswith("dtt ") and "<" not in line and not case.interrupt and can_fork({}):
            split = ["bash", "-c", f"dtt() {{ printf '%s\\0' \"$@\"; }}; {line}"]
            given = subprocess.run(split, capture_output=True, text=True, check=True).stdout
            code, out, err = run_dtt(given.split("\0")[:-1], folder, {}, 300)
            return code, out + err
        where = ROOT if line.startswith("./env.sh pytest") else folder
        process = subprocess.Popen(
            ["bash", "-c", f"exec {line}" if case.interrupt else line],
            cwd=where, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        first = ""
        if case.interrupt:
            assert process.stdout is not None
            first = process.stdout.readline()
            process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=TIMEOUT)
        return process.returncode, first + rest


@contextmanager
def stopping(folder: Path) -> Iterator[None]:
    """Ask each job that trains meanwhile to stop, as `touch jobs/NAME/control/stop` does."""
    before = {path: path.stat().st_size for path in folder.glob("jobs/*/metrics.jsonl")}
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.05):
            for path in folder.glob("jobs/*/metrics.jsonl"):
                if path.stat().st_size > before.get(path, 0):
                    (path.parent / "control").mkdir(exist_ok=True)
                    (path.parent / "control/stop").touch()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    for path in folder.glob("jobs/*/control/stop"):
        path.unlink()


@contextmanager
def running(folder: Path, line: str) -> Iterator[None]:
    """Train a job meanwhile, for longer than the line takes."""
    job = next(word for word in shlex.split(line) if word.startswith("jobs/"))
    more = ["train", job, "train.steps=1000000", "--allow-change", "train.steps"]
    metrics = folder / job / "metrics.jsonl"
    before = metrics.stat().st_size
    thread = threading.Thread(target=partial(run_dtt, more, folder, {}, TIMEOUT))
    thread.start()
    try:
        while metrics.stat().st_size <= before:
            thread.join(0.05)
            assert thread.is_alive()
        yield
    finally:
        (folder / job / "control/stop").touch()
        thread.join()
