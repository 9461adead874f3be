"""Exceptions of dtt, each with its exit code.

An error that the user can fix is one message in four parts: what failed, where, why, and what to
type next. `str(error)` is the complete message; no caller formats it again.
"""

from __future__ import annotations

from enum import IntEnum

from dtt.base.terminal import Message, one_line, part_of_message


class ExitCode(IntEnum):
    """Exit codes of a process, for the shell, the job script and `attempt.json`."""

    DONE = 0
    BUG = 1
    USAGE = 2  # the command line or the config
    DAMAGED = 65  # verification of data or of a checkpoint failed
    INPUT_MISSING = 66
    IO = 74  # disk full, permission denied
    PREEMPTED = 75  # stopped on request, checkpoint saved: run the same command again
    DIVERGED = 76
    UNFIT = 78  # the machine or environment lacks something, or a process of the run was lost
    INTERRUPTED = 130


class DttError(Exception):
    """Base class of all errors that dtt raises on purpose, with a message for the user."""

    exit_code = ExitCode.BUG

    def __init__(
        self, what: str, *, where: object = None, why: str | None = None, next: str | None = None
    ) -> None:
        """Format the message: `what` failed, `where` (a path, `file:line` or a key), `why`, and
        what to type `next`."""
        parts = [part_of_message(what)]
        place = None if where is None else one_line(where)
        for label, text in (("where", place), ("why", why), ("next", next)):
            if text is not None:
                parts.append(Message(f"  {label + ':':<6} {part_of_message(text)}"))
        super().__init__(Message("\n".join(parts)))


class ConfigError(DttError):
    """An error in the command line or the configuration."""

    exit_code = ExitCode.USAGE


class InputError(DttError):
    """An input that does not exist or is empty."""

    exit_code = ExitCode.INPUT_MISSING


class DamagedError(DttError):
    """A file that differs from what was written: truncated, altered or inconsistent."""

    exit_code = ExitCode.DAMAGED


class StorageError(DttError):
    """A file system failure: no space, no permission, or an I/O error."""

    exit_code = ExitCode.IO


class DiskFull(StorageError):
    """A full file system. Space may be freed later, so callers can wait and retry."""


class EnvironmentUnfit(DttError):
    """A requirement that this machine does not meet, such as a GPU, a library or a launcher."""

    exit_code = ExitCode.UNFIT


class InUse(EnvironmentUnfit):
    """A folder or file that another process has locked. It may be free later."""


class Diverged(DttError):
    """A loss or gradient that is non-finite or far from its earlier values."""

    exit_code = ExitCode.DIVERGED


class PeerLost(DttError):
    """The end of another process of the run: a rank, or the launcher of this process.

    The exit code is that of the other process if it is known, else `UNFIT`: a killed node or
    process is not a bug in dtt, and the same command may succeed when it is run again.
    """

    exit_code = ExitCode.UNFIT
    rank: int | None = None
    """The rank that was lost, if known."""
    node: str | None = None
    """The node that the lost rank ran on, if known."""


class Preempted(DttError):
    """A stop on request, after a checkpoint was saved. The same command resumes training."""

    exit_code = ExitCode.PREEMPTED
