"""The ways dtt can fail, each with its exit code.

An error that is the user's to mend is one message in four parts: what happened, where, why, and
what to type next. `str(error)` is that message; nobody formats it again.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What a finished process tells the shell, the job script and `exit.json`."""

    DONE = 0
    BUG = 1
    USAGE = 2  # the command line or the config
    DAMAGED = 65  # data or a checkpoint does not verify
    INPUT_MISSING = 66
    IO = 74  # disk full, permission denied
    PREEMPTED = 75  # stopped on request, checkpoint saved: run the same command again
    DIVERGED = 76
    UNFIT = 78  # this machine or environment cannot do it, or a process of the run was lost
    INTERRUPTED = 130


class DttError(Exception):
    """A failure with a message for a person; the base of every error dtt raises on purpose."""

    exit_code = ExitCode.BUG

    def __init__(
        self, what: str, *, where: object = None, why: str | None = None, next: str | None = None
    ) -> None:
        """`what` happened, `where` (a path, `file:line`, a key), `why`, what to type `next`."""
        parts = [what]
        for label, text in (("where", where), ("why", why), ("next", next)):
            if text is not None:
                parts.append(f"  {label + ':':<6} {text}")
        super().__init__("\n".join(parts))


class ConfigError(DttError):
    """The command line or the configuration is wrong."""

    exit_code = ExitCode.USAGE


class InputError(DttError):
    """Something that should be read is not there, or holds nothing."""

    exit_code = ExitCode.INPUT_MISSING


class DamagedError(DttError):
    """Something that was read is not what was written: truncated, altered, inconsistent."""

    exit_code = ExitCode.DAMAGED


class StorageError(DttError):
    """The file system refused: no space, no permission, an I/O error."""

    exit_code = ExitCode.IO


class DiskFull(StorageError):
    """There is no space left: it may come back, so this one can be waited out."""


class EnvironmentUnfit(DttError):
    """This machine lacks what was asked for: a GPU, a library, a launcher."""

    exit_code = ExitCode.UNFIT


class Diverged(DttError):
    """The loss or a gradient is no longer a finite number, or far from what it was."""

    exit_code = ExitCode.DIVERGED


class PeerLost(DttError):
    """Another process of the run has ended: a rank, or the launcher of this one.

    The exit code is that of the other process where it told one, else `UNFIT`: a node or a process
    was killed, which is no bug of dtt, and the same command may well succeed.
    """

    exit_code = ExitCode.UNFIT
    rank: int | None = None
    """The rank that was lost, where it is known."""
    node: str | None = None
    """The node that it ran on."""


class Preempted(DttError):
    """Training was asked to stop and has saved: the same command goes on from there."""

    exit_code = ExitCode.PREEMPTED
