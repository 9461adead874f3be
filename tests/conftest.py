"""What every test may use: the dtt command, real token files, the optional real corpora."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from hypothesis import settings
from running import ROOT, Dtt, write_documents

# Tests share cores, and must not reach for a network or an account.
os.environ.update(
    OMP_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
    WANDB_MODE="offline",
    TOKENIZERS_PARALLELISM="false",
)
# What must pass before a merge tries the same examples every time; others try new ones.
settings.register_profile("same", derandomize=True)
if os.environ.get("DTT_NO_SKIP") == "1":
    settings.load_profile("same")
# A shell starts background commands with SIGINT ignored, nohup with SIGHUP ignored, and children
# inherit that; processes of tests must receive both.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
for name in ("DTT_DEBUG", "HF_TOKEN", "WANDB_API_KEY"):
    os.environ.pop(name, None)


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


Settings = Callable[..., list[str]]


@pytest.fixture(scope="session")
def tiny(tokens: Path) -> Settings:
    """`key=value` arguments of a training run that takes a second; keywords change keys."""

    def settings(**changes: object) -> list[str]:
        values: dict[str, object] = {
            "data.tokens": tokens, "name": "t", "model.dim": 16, "model.n_layers": 2,
            "model.n_heads": 2, "train.steps": 12, "train.seq_len": 32, "train.micro_batch": 4,
            "train.global_batch_tokens": 256, "train.eval_every": 5, "train.log_every": 3,
            "train.sample_tokens": 4, "checkpoint.every": 4, "schedule.warmup": 2,
        }  # fmt: skip
        values |= {key.replace("__", "."): value for key, value in changes.items()}
        return [f"{key}={value}" for key, value in values.items()]

    return settings


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the tests on Slurm: they take longest, in one process, and mostly wait."""
    items.sort(key=lambda item: "tests/slurm/" not in item.path.as_posix())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With DTT_NO_SKIP (as in .ci/run) nothing may be skipped but what needs a GPU."""
    report = yield
    if os.environ.get("DTT_NO_SKIP") and report.skipped and item.get_closest_marker("gpu") is None:
        report.outcome, report.longrepr = "failed", f"skipped: {report.longrepr}"
    return report
