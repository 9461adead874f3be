"""W&B with its real client: one run over all attempts, and never in the way of training."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.loopback_wandb import KEY, LoopbackWandb
from support.running import TIMEOUT, wait_until

from dtt.base.errors import EnvironmentUnfit
from dtt.config.train import WandbConfig
from dtt.track.wandb import WandbTracker

pytest.importorskip("wandb")

ATTEMPT = """
import sys, time
from pathlib import Path
from dtt.config.train import WandbConfig
from dtt.base.log import setup_logging
from dtt.base.ranks import Ranks
from dtt.track.wandb import WandbTracker
folder, first, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
setup_logging(Ranks())
config = WandbConfig(project="p")
tracker = WandbTracker(config, "small", "abc123", folder, {"seed": 7})
for step in range(first, last + 1):
    if step == last:
        sys.stdin.readline()
    tracker.log({"kind": "train", "step": step, "loss": 9.0 - step, "ledger": "ab"})
    tracker.log({"kind": "perf", "step": step, "tokens_per_second": 5.0, "mfu": None})
tracker.log({"kind": "sample", "step": last, "text": "import sys"})
tracker.flush()
tracker.close()
print("went on")
"""


def attempt(folder: Path, first: int, last: int, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the trackers of one attempt in a process of its own, which must end within 120 s."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    return subprocess.run(
        [sys.executable, "-c", ATTEMPT, str(folder), str(first), str(last)],
        env=clean | {"HOME": str(folder), "WANDB_SILENT": "true"} | env,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=TIMEOUT,
    )  # fmt: skip


def went_on(run: subprocess.CompletedProcess[str]) -> bool:
    return run.returncode == 0 and "went on" in run.stdout and "Traceback" not in run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("env", [{}, {"WANDB_MODE": "offline"}], ids=["unset", "offline"])
def test_without_a_key_each_attempt_is_kept_offline_under_the_same_id(
    tmp_path: Path, env: dict[str, str]
) -> None:
    for first, last in ((1, 3), (4, 5)):
        run = attempt(tmp_path, first, last, **env)
        assert went_on(run), run.stderr
    kept = sorted(tmp_path.glob("wandb/offline-run-*"))
    assert [folder.name.split("-")[-1] for folder in kept] == ["abc123"] * len(kept)
    files = [path.read_bytes() for path in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))]
    assert [b"train/loss" in content for content in files] == [True, True]


@pytest.mark.slow
def test_online_the_second_attempt_resumes_the_run_of_the_first(tmp_path: Path) -> None:
    with LoopbackWandb() as server:
        for first, last in ((1, 3), (4, 5)):
            env = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": KEY}
            run = attempt(tmp_path, first, last, **env)
            assert went_on(run), run.stderr
    assert list(server.runs) == ["me/p/abc123"]
    arrived = server.runs["me/p/abc123"]
    assert (arrived.name, arrived.group, arrived.finished) == ("small", "small", 2)
    assert arrived.config["seed"]["value"] == 7
    losses = [(h["step"], h["train/loss"]) for h in arrived.history if "train/loss" in h]
    assert losses == [(step, 9.0 - step) for step in range(1, 6)]
    samples = [(h["step"], h["sample/text"]) for h in arrived.history if "sample/text" in h]
    assert samples == [(3, "import sys"), (5, "import sys")]
    assert [h["_step"] for h in arrived.history] == list(range(12))


def test_the_run_is_kept_offline_if_no_server_listens(
    tmp_path: Path,
) -> None:
    env = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": KEY}
    run = attempt(tmp_path, 1, 3, WANDB_MODE="online", **env)
    assert went_on(run), run.stderr
    assert "http://127.0.0.1:9 did not respond" in run.stderr
    assert list(tmp_path.glob("wandb/offline-run-*-abc123"))


@pytest.mark.slow
def test_a_server_that_never_answers_is_detected(tmp_path: Path) -> None:
    with LoopbackWandb() as server:
        server.silent.set()
        env = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": KEY}
        run = attempt(tmp_path, 1, 3, **env)
    assert went_on(run), run.stderr
    assert "did not respond" in run.stderr
    assert list(tmp_path.glob("wandb/offline-run-*-abc123"))


@pytest.mark.slow
def test_a_network_failure_neither_stops_nor_delays_the_run(
    tmp_path: Path,
) -> None:
    with LoopbackWandb() as server:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
        env = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": KEY, "WANDB_SILENT": "true"}
        run = subprocess.Popen(
            [sys.executable, "-c", ATTEMPT, str(tmp_path), "1", "500"],
            env=clean | {"HOME": str(tmp_path)} | env,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        wait_until(lambda: "me/p/abc123" in server.runs, run)
        server.silent.set()
        out, err = run.communicate("go on\n", timeout=TIMEOUT)
    assert (run.returncode, "went on" in out) == (0, True), err
    assert "Traceback" not in err


def test_training_continues_after_any_error_of_the_client(tmp_path: Path) -> None:
    run = attempt(
        tmp_path, 1, 3, WANDB_MODE="offline", WANDB_RUN_ID="kept", WANDB_DISABLE_CODE="neither"
    )
    assert went_on(run), run.stderr
    assert run.stderr.count("wandb failed and is off for this attempt") == 1


def test_without_wandb_the_error_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(EnvironmentUnfit, match=r"pip install .wandb>="):
        WandbTracker(WandbConfig(), "small", "abc123", tmp_path, {})
