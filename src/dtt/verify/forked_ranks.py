"""The processes of a layout, forked from one that has imported the training code already.

A new Python process takes three seconds of CPU time to import torch and dtt; a forked one has them.
A comparison starts up to a hundred of them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import connection, get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtt.base.local import stop_with_parent, without_slurm
from dtt.mesh.process import command

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "GROUP_", "TORCHELASTIC_", "OMPI_", "DTT_")
"""Prefixes of variables that describe the process of `dtt verify` itself, or change the run."""
PRELOADED = [
    *("torch._dynamo", "tokenizers", "pyarrow.parquet", "torch.distributed.tensor.parallel"),
    *("dtt.train.build", "dtt.train.trainer", "dtt.train.frozen", "dtt.verify.recording"),
    *("dtt.data.samples.dataset", "dtt.evaluate.validation", "dtt.track.trackers"),
    *("dtt.optim.groups", "dtt.report.run", "dtt.verify.random_text"),
]
"""Modules that a run imports, some of them only inside functions."""
SECONDS = 300.0
"""Time limit of one run, after which it counts as hanging. It takes a few seconds."""


@dataclass(frozen=True)
class Ended:
    """The end of the processes of a command."""

    code: int | None
    """Exit code of the first rank that failed, 0 if none did; None if they did not end."""
    text: str
    """Its error message, in one line."""


def run(
    folder: Path, ranks: int, function: Callable[..., None], *arguments: Any, log: str
) -> Ended:
    """Call `function` in `ranks` processes whose working directory is `folder`, as torchrun would.

    Their output goes to `folder`/logs/LOG-RANK. If one fails, the others are ended.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    # One thread for each rank: several on two cores would only wait for each other. Set before
    # the server starts, since OpenMP reads it when torch is loaded.
    os.environ["OMP_NUM_THREADS"] = "1"
    store = rendezvous()
    logs = [folder / "logs" / f"{log}-{rank}" for rank in range(ranks)]
    logs[0].parent.mkdir(exist_ok=True)
    processes = [
        context.Process(
            target=_rank,
            args=(folder, _environment(rank, ranks, store.port), logs[rank], function, arguments),
            daemon=True,  # ends with this process
        )
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        while running := [p.sentinel for p in processes if p.exitcode is None]:
            if not connection.wait(running, SECONDS):
                return Ended(None, _failure(logs[0]))
            if any(process.exitcode for process in processes):
                break
        failed = next((i for i, p in enumerate(processes) if p.exitcode), None)
    finally:
        for process in processes:
            process.kill()
            process.join()
    if failed is None:
        return Ended(0, "")
    return Ended(processes[failed].exitcode, _failure(logs[failed]))


def _rank(
    folder: Path,
    environment: Mapping[str, str],
    log: Path,
    function: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    """Become a rank: its directory, variables and output, then the function."""
    # The parent is the server of forks, which ends with the command: a killed one leaves no rank.
    stop_with_parent()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    sys.argv = ["dtt", "train"]
    with command():
        function(*arguments)


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return the variables of a rank; the same as torchrun's for several ranks."""
    env = {name: text for name, text in without_slurm().items() if not name.startswith(LAUNCHER)}
    if ranks == 1:
        return env
    return env | rank_variables(rank, ranks, port)


def rendezvous() -> TCPStore:
    """Return the store where ranks of this machine meet, at a port that is free; keep it until
    they end.

    It listens here, as torchrun's does, and not in rank 0: that one would start seconds after its
    port was found free, and another process may have taken it by then.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def rank_variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank whose `rendezvous` is at `port`."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip


def _failure(log: Path) -> str:
    """Return why a process has failed, in one line: its error message, or its last line."""
    text = log.read_text("utf-8", errors="replace").splitlines() if log.exists() else []
    errors = [number for number, line in enumerate(text) if line.startswith("dtt: ")]
    if not errors:
        return text[-1] if text else "no output"
    first = errors[-1]
    if "this is a bug" in text[first]:  # the line above has the exception
        return text[first - 1]
    # The reason, or the first mistake of a configuration.
    lines = [line.strip().removeprefix("why:") for line in text[first + 1 :]]
    whys = [line.strip() for line in lines if not line.startswith("where:")]
    return ": ".join([text[first].removeprefix("dtt: "), *whys[:1]])
