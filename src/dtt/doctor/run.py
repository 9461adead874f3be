"""`dtt doctor`: check the environment, the devices, a disk, and the links between all ranks."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from dtt.base import local
from dtt.base.errors import ConfigError, EnvironmentUnfit
from dtt.base.log import log_on_terminal
from dtt.base.ranks import Ranks
from dtt.base.terminal import Message
from dtt.doctor import disk
from dtt.doctor.disk import Disk
from dtt.mesh import environment

if TYPE_CHECKING:
    from dtt.doctor.collectives import Timing
    from dtt.doctor.devices import Device
    from dtt.mesh.dist import World

JOIN_TIMEOUT = timedelta(minutes=5)
"""Timeout of the process group. It is long because containers may start minutes apart."""
DEVICES = ("auto", "cpu", "cuda", "cuda:0")
GIB = 2**30


@dataclass
class Findings:
    """The findings of one rank."""

    ranks: Ranks
    node: str
    environment: dict[str, str]
    disk: Disk | None = None
    """Disk measurements, made by local rank 0 of each node; None on other ranks."""
    devices: list[Device] = field(default_factory=list)
    """The device of this rank; all devices of the machine if there is a single rank."""
    problems: list[EnvironmentUnfit] = field(default_factory=list)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record an EnvironmentUnfit raised inside, and continue."""
        try:
            yield
        except EnvironmentUnfit as problem:
            self.problems.append(problem)


def run(folder: Path, *, device: str, processes: int | None, as_json: bool) -> None:
    """Run all checks and print the findings; raise EnvironmentUnfit if any rank has a problem.

    `folder` is on the disk to check. With `processes`, starts that number of ranks with torchrun.
    Rank 0 reports for all ranks and sets the exit code. Another rank reports only if it cannot
    reach the others.
    """
    if device not in DEVICES:
        raise ConfigError(f"--device {device} is not one of {', '.join(DEVICES)}")
    ranks = Ranks.detect()
    if processes is not None:
        if ranks.size > 1:
            raise ConfigError(
                f"{ranks.launcher} has already started {ranks.size} processes",
                next="omit --processes",
            )
        options = ["--path", str(folder), "--device", device, *(["--json"] if as_json else [])]
        # torchrun exits with 1 for every failure, so the exit code of the ranks is lost.
        if local.run(local.torchrun_argv(processes, ["doctor", *options])):
            raise EnvironmentUnfit(
                "this machine is not fit for training, or the checks did not finish",
                next="see the messages above those of torchrun",
            )
        return
    findings = Findings(ranks, socket.gethostname(), environment.facts())
    if ranks.local_rank == 0:
        log_on_terminal("measuring the disk of %s", folder)
        with findings.recording():
            findings.disk = disk.examine(folder)
    try:
        findings.environment |= environment.torch_facts()
        from torch.distributed import DistError

        from dtt.mesh import dist

        # Without it NCCL aborts the process after a timeout, and no error names the collective.
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
        try:
            world = dist.start(ranks, device, JOIN_TIMEOUT)
        except DistError as error:
            raise EnvironmentUnfit(
                f"{ranks.size} processes could not form a process group",
                where=f"rank {ranks.rank} on node {socket.gethostname()}",
                why=str(error).splitlines()[0],
                next="check that every node reaches MASTER_ADDR, and which ranks have no output "
                "here",
            ) from None
    except EnvironmentUnfit as problem:
        if not ranks.first:
            raise
        _print_findings([findings], [], [*findings.problems, problem], as_json=as_json)
    else:
        _check_together(findings, world, folder, device, as_json=as_json)


def _check_together(
    findings: Findings, world: World, folder: Path, device: str, *, as_json: bool
) -> None:
    """Run the checks that need torch or communication between all ranks."""
    from dtt.doctor import collectives, devices
    from dtt.mesh import dist

    try:
        with findings.recording():
            if device == "auto":
                devices.check_seen()
            findings.devices = devices.examine_all(world)
        with dist.lost_peers_reported():
            with findings.recording():
                disk.check_shared(world, folder)
            everyone = world.gather(findings)
        problems = [
            *(problem for one in everyone for problem in one.problems),
            *environment.differences([(one.node, one.environment) for one in everyone]),
            *devices.faults([(p.ranks.rank, p.node, d) for p in everyone for d in p.devices]),
        ]
        try:
            timings, wrong = collectives.run(world)
        except EnvironmentUnfit as problem:
            if not world.first:
                raise
            timings, wrong = [], [problem]
    finally:
        dist.stop()
    if world.first:
        _print_findings(everyone, timings, [*problems, *wrong], as_json=as_json)


def _print_findings(
    everyone: Sequence[Findings],
    timings: Sequence[Timing],
    problems: Sequence[EnvironmentUnfit],
    *,
    as_json: bool,
) -> None:
    """Print the findings of all ranks, then raise the problems as one EnvironmentUnfit."""
    if as_json:
        facts = {
            "fit": not problems,
            "processes": [asdict(p) | {"problems": list(map(str, p.problems))} for p in everyone],
            "exchanges": [asdict(timing) | {"gb_s": timing.gb_s} for timing in timings],
            "problems": list(map(str, problems)),
        }
        print(json.dumps(facts))
    else:
        print("\n".join(_report(everyone, timings)))
    if len(problems) == 1:
        raise problems[0]
    if problems:
        listed = "\n".join([f"{len(problems)} problems", *map(str, problems)])
        raise EnvironmentUnfit(Message(listed))
    if not as_json:
        print("no problems found")


def _report(everyone: Sequence[Findings], timings: Sequence[Timing]) -> Iterator[str]:
    first = everyone[0]
    nodes = list(dict.fromkeys(one.node for one in everyone))
    yield "environment"
    for name, value in first.environment.items():
        yield f"  {name:<13} {value}"
    size, launcher = first.ranks.size, first.ranks.launcher
    yield f"  {'processes':<13} {size} ({launcher})"
    yield f"  {'nodes':<13} {len(nodes)}"
    for title, lines in (("devices", _device_lines), ("disk", _disk_lines)):
        yield title
        for node in nodes:
            yield from lines(node, [one for one in everyone if one.node == node])
    if timings:
        yield "collectives (GB/s: bytes / p50, the algorithm bandwidth of nccl-tests)"
        columns = f"{'bytes':>13}{'p50 us':>11}{'p99 us':>11}{'GB/s':>9}"
        yield f"  {'collective':<20}{'type':<10}{columns}"
    for one in timings:
        times = f"{1e6 * one.p50:>11,.0f}{1e6 * one.p99:>11,.0f}{one.gb_s:>9.3f}"
        yield f"  {one.collective:<20}{one.dtype:<10}{one.bytes:>13,}{times}"


def _device_lines(node: str, findings: Sequence[Findings]) -> Iterator[str]:
    """Yield a line for the equal devices of a node: the least free memory, the range of speeds."""
    devices = [device for one in findings for device in one.devices]
    for name in dict.fromkeys(device.name for device in devices):
        equal = [device for device in devices if device.name == name]
        yield (
            f"  {node}: {len(equal)} x {equal[0].device.partition(':')[0]}, {name}, "
            f"{min(d.free for d in equal) / GIB:.1f} of {equal[0].total / GIB:.1f} GiB free, "
            f"{'native' if equal[0].native_bf16 else 'no native'} bf16"
        )
        for dtype in equal[0].tflops:
            rates = [device.tflops[dtype] for device in equal]
            speeds = dict.fromkeys(f"{rate:.3g}" for rate in (min(rates), max(rates)))
            yield f"    matmul {dtype}: {' to '.join(speeds)} TFLOP/s"


def _disk_lines(node: str, findings: Sequence[Findings]) -> Iterator[str]:
    for disk_ in (one.disk for one in findings if one.disk is not None):
        yield (
            f"  {node}: {disk_.path}, {disk_.kind}, "
            f"{disk_.free / 1e9:.1f} GB free, write {disk_.write_mb_s:.0f} MB/s, "
            f"read {disk_.read_mb_s:.0f} MB/s, fsync of a rename {disk_.fsync_ms:.1f} ms"
        )
