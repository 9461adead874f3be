"""Inject faults into checkpoint saves and files, and count what a load returns afterwards.

    python benchmarks/faults.py [--json FILE] [--only NAME ...] [--quick]

Each save is repeated under `strace` (6 or newer), once per system call that it makes. At that call
the process gets SIGKILL, or a file operation fails with EIO (bad disk, file server gone) or ENOSPC
(disk full): either this call alone, or this one and all later calls of the same name. Then the
checkpoint is loaded. dtt saves step 20 after steps 5 and 10; the load must return either step 10
with unchanged files or the complete step 20, and the job must be able to resume. The other methods
overwrite their previous save, as is usual.

Then finished checkpoints are damaged: truncated, bits flipped, files missing, swapped or mixed.
`found` means that the load raises an error; `unnoticed` means that it returns wrong values.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # processes are forked, so no threads may exist before

import json
import logging
import multiprocessing
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import combinations
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from checkpointing import DTT_BACKENDS, PEER_BACKENDS, Backend, Dtt, State, state_of
from measurement import parser_of

from dtt.artifacts.jobdir import JobDir
from dtt.base import reading
from dtt.base.errors import DamagedError, InputError
from dtt.base.log import log
from dtt.checkpoint import store

OLD, NEW, NEXT = 10, 20, 30
FAULTS = {
    "SIGKILL": "signal=KILL:when={}",
    "EIO": "error=EIO:when={}",
    "EIO from then on": "error=EIO:when={}+",
    "ENOSPC": "error=ENOSPC:when={}",
    "ENOSPC from then on": "error=ENOSPC:when={}+",
}
OF_FILES = "%file,%desc"
"""Calls that can fail with an error of the disk."""
CHANGING = (
    "?openat,?write,?pwrite64,?writev,?pwritev,?ftruncate,?fallocate,?copy_file_range,?sendfile,"
    "?fsync,?fdatasync,?rename,?renameat,?renameat2,?link,?linkat,?symlink,?unlink,?unlinkat,"
    "?mkdir,?mkdirat,?rmdir"
)
"""Calls that change the disk, on any architecture: a kill at another one leaves it as the next of
these does."""
LIMIT = 10.0
"""Seconds after which a process counts as hanging and is killed."""


# ---- saving under strace -------------------------------------------------------------------------


def save(
    backend: Backend, folder: Path, step: int, victim: int = 0, strace: Sequence[str] = ()
) -> bool:
    """Save in separate processes, one per rank; with `strace` options, trace rank `victim`.

    Returns True if that rank was killed.
    """
    links: tuple[Connection, ...] = multiprocessing.Pipe() if backend.ranks == 2 else ()
    children = []
    for rank in range(backend.ranks):
        child = os.fork()
        if child == 0:
            for link in links[:rank] + links[rank + 1 :]:
                link.close()  # an open copy would hide the end of the other rank
            _save_and_exit(backend, folder, step, rank, links[rank] if links else None)
        children.append(child)
    for link in links:
        link.close()
    for child in children:
        os.waitpid(child, os.WUNTRACED)  # the child stops itself
    with _watched(children[victim], strace):
        for child in children:
            os.kill(child, signal.SIGCONT)
        endings = [_wait_or_kill(child) for child in children]
    return os.WIFSIGNALED(endings[victim])


@contextmanager
def _watched(process: int, options: Sequence[str]) -> Iterator[None]:
    """Attach strace to a process, which should end inside the block."""
    if not options:
        yield
        return
    command = ["strace", "-f", "-p", str(process), *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as strace:
        assert strace.stderr is not None
        message = strace.stderr.readline()
        assert "attached" in message, message
        yield


def _save_and_exit(
    backend: Backend, folder: Path, step: int, rank: int, link: Connection | None
) -> None:
    """Run in a child of `save`: stop until strace is attached, then save and exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.kill(os.getpid(), signal.SIGSTOP)
    try:
        backend.save(folder, step, rank, link)
    except BaseException:  # noqa: BLE001  a fork must not continue as its parent
        os._exit(1)
    os._exit(0)


def _wait_or_kill(child: int) -> int:
    deadline = time.monotonic() + LIMIT
    while (ending := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.001)
    return ending[1]


def system_calls(backend: Backend, folder: Path, victim: int, which: str) -> list[tuple[str, int]]:
    """Return every system call of an undisturbed save, as (name, index within its thread)."""
    trace = folder / "trace"
    save(backend, folder, NEW, victim, ["-e", f"trace={which}", "-o", str(trace)])
    counts = Counter(re.findall(r"^(\d+ +\w+)\(", trace.read_text(), flags=re.MULTILINE))
    most: Counter[str] = Counter()
    for call, times in counts.items():  # `when` counts per thread
        name = call.split()[1]
        most[name] = max(most[name], times)
    del most["mmap"]  # it allocates memory here; a fault makes Python itself fail
    return [(name, n) for name, times in sorted(most.items()) for n in range(1, times + 1)]


@contextmanager
def saved_before(backend: Backend) -> Iterator[Path]:
    """Yield a folder with the saves of steps 5 and OLD."""
    with tempfile.TemporaryDirectory(prefix="dtt-faults-") as name:
        folder = Path(name)
        for step in (5, OLD):
            save(backend, folder, step)
        yield folder


def inject_faults(backend: Backend, fault: str, which: str) -> Counter[str]:
    """Run all saves with one kind of fault at the calls of a class, and count the outcomes."""
    injection = FAULTS[fault]
    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="dtt-faults-") as scratch:
        backend.save(Path(scratch), 1)  # imports of the first save are not part of a save
    with (
        saved_before(backend) as before,
        tempfile.TemporaryDirectory(prefix="dtt-faults-") as parent,
    ):
        folder = Path(parent) / "job"
        for victim in range(backend.ranks):
            with saved_before(backend) as example:
                calls = system_calls(backend, example, victim, which)
            for name, n in calls:
                shutil.copytree(before, folder)
                inject = f"inject={name}:{injection.format(n)}"
                options = ["-e", f"trace={name}", "-e", inject, "-o", os.devnull]
                killed = save(backend, folder, NEW, victim, options)
                outcome = outcome_of_load(backend, folder, before)
                if isinstance(backend, Dtt) and outcome not in GOOD:
                    print(f"{backend.name}: {fault} at {name} {n}: {outcome}", file=sys.stderr)
                # The calls that synchronise threads differ between runs: a call may be absent.
                outcomes[outcome if killed or fault != "SIGKILL" else MISSED] += 1
                shutil.rmtree(folder)
    return outcomes


MISSED = "not injected"
GOOD = ("previous step", "new step")


def outcome_of_load(backend: Backend, folder: Path, before: Path) -> str:
    """Return the outcome of a load after a save with a fault."""
    if not isinstance(backend, Dtt):
        return in_a_fork(lambda: loaded_state(backend, folder))
    outcome = loaded_state(backend, folder)
    if outcome == "previous step" and not unchanged(backend, folder, before):
        return "previous step, altered"
    backend.resume(folder, NEXT)
    return outcome if equal(backend.load(folder), NEXT) else "cannot resume"


def loaded_state(backend: Backend, folder: Path) -> str:
    """Return the name of the state that loading `folder` returns."""
    try:
        state = backend.load(folder)
    except Exception:  # noqa: BLE001  any error counts as refused
        return "refused"
    for step, name in ((OLD, "previous step"), (NEW, "new step"), (5, "older step")):
        if equal(state, step):
            return name
    return "wrong values"


def equal(state: State, step: int) -> bool:
    """Return True if `state` equals the state of `step` bit for bit."""
    expected = state_of(step)
    return state.keys() == expected.keys() and all(
        torch.equal(state[k], expected[k]) for k in expected
    )


def unchanged(backend: Backend, folder: Path, before: Path) -> bool:
    """Return True if the files of OLD are the same as before the save."""
    now, previous = (
        {path.name: path.read_bytes() for path in backend.files(root, OLD)}
        for root in (folder, before)
    )
    return now == previous


def in_a_fork(function: Callable[[], str]) -> str:
    """Return `function()` from a fork, in which a crash, a hang or unbounded allocation is safe.

    A fork that crashes or hangs counts as refused.
    """
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            memory = 2**36
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
            sender.send(function())
        finally:
            os._exit(0)
    sender.close()
    outcome = "refused"  # it crashed
    if receiver.poll(LIMIT):
        with suppress(EOFError):
            outcome = receiver.recv()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    receiver.close()
    return outcome


# ---- damage --------------------------------------------------------------------------------------

Damage = tuple[str, str, dict[Path, bytes | None]]
"""Kind, name of the damaged file, and the new content of files; None means missing."""


def damages(all_files: list[Path], other: dict[str, bytes]) -> Iterator[Damage]:
    """Yield the ways to damage a checkpoint; `other` holds the files of another step."""
    rng = random.Random(0)
    good = {path: path.read_bytes() for path in all_files}
    for path, data in good.items():
        cuts = {0, 1, len(data) - 1} | {rng.randrange(len(data)) for _ in range(240 // len(good))}
        for cut in sorted(cuts):
            yield "cut short", path.name, {path: data[:cut]}
    for _ in range(1000):
        path = rng.choice(all_files)
        bit = rng.randrange(8 * len(good[path]))
        yield "a bit flipped", path.name, {path: flipped(good[path], bit)}
    for path in all_files:
        if path.name == "MANIFEST.json":
            for bit in range(8 * len(good[path])):
                yield "a bit of the manifest flipped", path.name, {path: flipped(good[path], bit)}
    for path, data in good.items():
        start = rng.randrange(len(data))
        zeros = data[:start] + bytes(len(data[start : start + 512])) + data[start + 512 :]
        if zeros != data:
            yield "a block zeroed", path.name, {path: zeros}
        yield "longer", path.name, {path: data + b"\n"}
        yield "missing", path.name, {path: None}
        if other.get(path.name, data) != data:
            yield "of another step", path.name, {path: other[path.name]}
    for one, two in combinations(good, 2):
        yield "swapped", f"{one.name}|{two.name}", {one: good[two], two: good[one]}
    yield "an extra file", "", {all_files[0].with_name("model-00007.safetensors"): b"\x00" * 99}


def flipped(data: bytes, bit: int) -> bytes:
    """Return `data` with one bit flipped."""
    return data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]


def damage(backend: Backend) -> dict[str, Counter[str]]:
    """Damage a finished checkpoint in all ways and count the outcomes by kind."""
    outcomes: dict[str, Counter[str]] = {}
    with saved_before(backend) as elsewhere, saved_before(backend) as folder:
        save(backend, elsewhere, NEW)
        step = NEW if isinstance(backend, Dtt) else OLD
        other = {p.name: p.read_bytes() for p in backend.files(elsewhere, step)}
        all_files = backend.files(folder, OLD)
        good = {path: path.read_bytes() for path in all_files}
        for kind, damaged_file, new in damages(all_files, other):
            for path, data in new.items():
                path.unlink() if data is None else path.write_bytes(data)
            outcome = outcome_of_damage(backend, folder, damaged_file)
            outcomes.setdefault(kind, Counter())[outcome] += 1
            if isinstance(backend, Dtt) and outcome not in ("found", "harmless"):
                print(f"{backend.name}: {kind}, {damaged_file}: {outcome}", file=sys.stderr)
            for path in new:
                if path in good:
                    path.write_bytes(good[path])
                else:
                    path.unlink()
    return outcomes


def outcome_of_damage(backend: Backend, folder: Path, damaged_file: str) -> str:
    """Return the outcome of a load of damaged files.

    dtt must also name the damaged file and fall back to the previous checkpoint.
    """
    if not isinstance(backend, Dtt):
        outcome = in_a_fork(lambda: loaded_state(backend, folder))
        return {"refused": "found", "previous step": "harmless"}.get(outcome, "unnoticed")
    try:
        store.verify(store.folder_of(JobDir(folder).checkpoints, OLD))
    except (DamagedError, InputError) as error:
        if not re.search(damaged_file, str(error)):
            return "found, not named"
        return "found" if equal(backend.load(folder), 5) else "found, no fallback"
    return "harmless" if equal(backend.load(folder), OLD) else "unnoticed"


# ---- tables --------------------------------------------------------------------------------------


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--only", nargs="+", default=[""], help="only back ends whose names start with one of these"
    )
    parser.add_argument(
        "--quick", action="store_true", help="only SIGKILL, at calls that change the disk"
    )
    parser.add_argument("--json", type=Path, help="also write the counts to this file")
    options = parser.parse_args()
    log.setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")  # from DCP, which warns when it saves without a process group
    reading.PATIENCE = (0.0, 0.0, 0.0)  # retries happen without a pause
    backends = [
        k for k in (*DTT_BACKENDS, *PEER_BACKENDS) if k.name.startswith(tuple(options.only))
    ]
    kinds = {kind: "all" if kind == "SIGKILL" else OF_FILES for kind in FAULTS}
    if options.quick:
        kinds = {"SIGKILL": CHANGING}
    injected = {b.name: {kind: inject_faults(b, kind, at) for kind, at in kinds.items()}
                for b in backends}  # fmt: skip
    show("A save with a fault at each of its system calls", injected, GOOD, "survived")
    damaged = {
        k.name: damage(k)
        for k in backends
        if not options.quick and (k.ranks == 2 or k in PEER_BACKENDS)
    }
    show("A checkpoint damaged", damaged, ("found", "harmless"), "found or harmless")
    if options.json:
        options.json.write_text(json.dumps({"faults": injected, "damage": damaged}, indent=1))


def show(
    title: str, table: dict[str, dict[str, Counter[str]]], good: tuple[str, ...], name: str
) -> None:
    """Print one line for each back end and each kind of fault or damage."""
    print(f"\n{title:<62}{'times':>7}{name:>19}  of which")
    for backend, rows in table.items():
        for kind, outcomes in rows.items():
            total = outcomes.total() - outcomes[MISSED]
            successes = sum(outcomes[outcome] for outcome in good)
            parts = ", ".join(f"{n} {outcome}" for outcome, n in outcomes.most_common())
            rate = f"{successes:>10} = {successes / total:>5.1%}"
            print(f"{backend:<32}{kind:<30}{total:>7}{rate}  {parts}")


if __name__ == "__main__":
    main()
