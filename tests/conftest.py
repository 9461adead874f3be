"""What every test may use: the dtt command, real token files, the optional real corpora."""

from __future__ import annotations

import compileall
import contextlib
import gc
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from hypothesis import HealthCheck, settings
from support import warm_python
from support.forked import PACKAGE
from support.running import ROOT, TIMEOUT, Dtt, write_documents

from dtt.base.log import log

if TYPE_CHECKING:  # keeps playwright out of tests that open no page
    from playwright.sync_api import Browser

# Tests share cores, and must not reach for a network or an account.
os.environ.update(
    OMP_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
    WANDB_MODE="offline",
    TOKENIZERS_PARALLELISM="false",
    # A process on a disk that is full would leave half a file; see pytest_configure.
    PYTHONDONTWRITEBYTECODE="1",
)
# But pytest itself keeps its rewritten test files: that takes a fifth of the time to collect them.
sys.dont_write_bytecode = False
# Under load an example takes seconds, which is no fault. What must pass before a merge tries the
# same examples every time; others try new ones.
settings.register_profile(
    "dtt",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    derandomize=bool(os.environ.keys() & {"CI", "DTT_NO_SKIP"}),
)
settings.load_profile("dtt")
# A shell starts background commands with SIGINT ignored, nohup with SIGHUP ignored, and children
# inherit that; processes of tests must receive both.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
for name in ("DTT_DEBUG", "HF_TOKEN", "WANDB_API_KEY"):
    os.environ.pop(name, None)


KEPT = (
    "multiprocessing.forkserver", "multiprocessing.resource_tracker", "tqdm_monitor",
    "fsspecIO", "asyncio_",
)  # fmt: skip
"""Beginnings of the names of processes and threads that libraries keep for all
tests; they wait, and do nothing else."""


@pytest.fixture(scope="module", autouse=True)
def _nothing_left_running() -> Iterator[None]:
    """Fail a file whose tests leave a thread or process running: the tests of the next file in this
    process may count threads or measure memory, and a process takes CPU time from all."""
    threads, processes = set(threading.enumerate()), children()
    yield
    # Inductor keeps a thread from its first compilation on, unless it finds all in its cache.
    compiling = sys.modules.get("torch._inductor.async_compile")
    if compiling is not None and compiling.AsyncCompile.pool.cache_info().currsize:
        compiling.AsyncCompile.pool().shutdown()
        compiling.AsyncCompile.pool.cache_clear()
    started = [t for t in threading.enumerate() if t not in threads and not t.name.startswith(KEPT)]
    deadline = time.monotonic() + TIMEOUT
    while any(t.is_alive() for t in started) and time.monotonic() < deadline:
        # An executor that is garbage ends its threads when it is collected. What its thread still
        # computes holds it, so once is not enough.
        gc.collect()
        time.sleep(0.05)
    left = [thread for thread in started if thread.is_alive()]
    left += psutil.wait_procs(children() - processes, timeout=TIMEOUT)[1]
    assert not left, f"tests of this file leave running: {left}"


def children() -> set[psutil.Process]:
    """Return the processes that this one has started, also through the server that forks."""
    found = set()
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            kept = any(name in " ".join(child.cmdline()) for name in KEPT)
            found |= set(child.children()) if kept else {child}
    for server in [process for process in found if process.pid in warm_python.SERVERS]:
        found = found - {server} | set(server.children())
    return found


@pytest.fixture
def dtt(tmp_path: Path) -> Dtt:
    """The command, in a folder of this test's own."""
    return Dtt(tmp_path)


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder of real corpora (`data/`): $DTT_SHARED, or `shared` beside the clone."""
    folder = Path(os.environ.get("DTT_SHARED", ROOT.parent / "shared"))
    if not (folder / "data").is_dir():
        pytest.skip("no real corpora: DTT_SHARED does not name their folder")
    return folder


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small token folder, made by dtt from 400 documents."""
    folder = tmp_path_factory.mktemp("tokens")
    write_documents(folder / "counting.jsonl")
    dtt = Dtt(folder)
    dtt("download", "-d", "counting.jsonl")
    dtt(
        "tokenize", "-d", "counting.jsonl", "tokenizer.vocab_size=300",
        "tokenize.validation_fraction=0.1", "tokenize.out=tokens", "tokenize.unit_bytes=8192",
    )  # fmt: skip
    return folder / "tokens"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """A browser for `browser.OpenPage`. It ends with the module, because playwright keeps an event
    loop running in this thread, which asyncio.run refuses to share."""
    from support.browser import launched

    with launched() as browser:
        yield browser


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from this clone."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


Settings = Callable[..., list[str]]


@pytest.fixture(scope="session")
def tiny(tokens: Path) -> Settings:
    """`key=value` arguments of a training run that takes a second; keywords change keys."""

    def settings(**changes: object) -> list[str]:
        values: dict[str, object] = {
            "data.tokens": tokens, "name": "t", "model.dim": 16, "model.n_layers": 2,
            "model.n_heads": 2, "train.steps": 12, "train.seq_len": 32, "train.micro_batch": 4,
            "train.global_batch_tokens": 256, "train.eval_every": 5, "train.log_every": 3,
            # All held-out samples would be 24 batches, a fifth of the run's CPU time.
            "train.eval_tokens": 512, "train.sample_tokens": 4, "checkpoint.every": 4,
            "schedule.warmup": 2,
        }  # fmt: skip
        values |= {key.replace("__", "."): value for key, value in changes.items()}
        return [f"{key}={value}" for key, value in values.items()]

    return settings


WITHOUT_SLOW = "slow tests are left out; ./env.sh pytest --all runs everything"


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Add --all; without xdist (-p no:xdist) accept its options in pyproject.toml."""
    parser.addoption("--all", action="store_true", help="run the slow tests, too")
    if not pluginmanager.hasplugin("xdist"):
        for option in ("--numprocesses", "--maxprocesses", "--dist"):
            parser.addoption(option)
        parser.addoption("--no-loadscope-reorder", action="store_true")


def pytest_configure(config: pytest.Config) -> None:
    """Compile dtt once, so that not every process that tests start compiles it."""
    if not hasattr(config, "workerinput"):
        compileall.compile_dir(PACKAGE, quiet=2)


def leaves_out_slow(config: pytest.Config) -> bool:
    """Return True unless all tests, a marker or a single test is asked for, or pages that tests
    write."""
    chosen = config.option.all or config.option.markexpr or "DTT_WRITE_DOCS" in os.environ
    return not chosen and not any("::" in argument for argument in config.args)


def pytest_runtest_logstart() -> None:
    """Begin each test as if it were the first of this process: without dtt's handler of log lines,
    and with the same seed for what draws without a generator of its own."""
    log.handlers.clear()
    log.propagate = True
    log.setLevel(logging.NOTSET)
    random.seed(0)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)


def is_slow(item: pytest.Item) -> bool:
    """Return True if a test is marked as slow and its parameters are not excepted."""
    marker = item.get_closest_marker("slow")
    callspec = getattr(item, "callspec", None)
    case = callspec.id if callspec is not None else None
    return marker is not None and case not in marker.kwargs.get("except_for", ())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the files that have the most slow tests, so that no process ends long after the
    others; then leave the slow tests out."""
    slow = Counter(item.path for item in items if is_slow(item))
    items.sort(key=lambda item: -slow[item.path])
    if leaves_out_slow(config):
        config.hook.pytest_deselected(items=[item for item in items if is_slow(item)])
        items[:] = [item for item in items if not is_slow(item)]


def pytest_report_header(config: pytest.Config) -> str | None:
    """Report that slow tests are left out, before the tests."""
    return WITHOUT_SLOW if leaves_out_slow(config) else None


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Report it after the tests, too."""
    if leaves_out_slow(config):
        terminalreporter.write_line(WITHOUT_SLOW)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With DTT_NO_SKIP (as in .ci/run) nothing may be skipped but what needs a GPU."""
    report = yield
    if os.environ.get("DTT_NO_SKIP") and report.skipped and item.get_closest_marker("gpu") is None:
        report.outcome, report.longrepr = "failed", f"skipped: {report.longrepr}"
    return report


MpiRun = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def mpirun() -> MpiRun:
    """Runs `python ARGS…` on so many ranks, with the mpirun of this environment or the machine."""
    beside = Path(sys.executable).with_name("mpirun")
    program = str(beside) if beside.exists() else shutil.which("mpirun")
    if program is None:
        pytest.skip("no mpirun")
    lines = {"PYTHONUNBUFFERED": ""}  # each rank's line in one piece
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    crowd = {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}

    def run(ranks: int, *args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [program, "-n", str(ranks), sys.executable, *args],
            env=os.environ | lines | root | crowd,
            capture_output=True, text=True, check=False, timeout=TIMEOUT,
        )  # fmt: skip

    return run
