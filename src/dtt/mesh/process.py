"""The entry and exit of every command: error messages, exit codes, and the end of all ranks."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from dtt.base import launcher
from dtt.base.errors import DiskFull, DttError, EnvironmentUnfit, ExitCode, InputError, StorageError
from dtt.base.files import free_space, in_size
from dtt.base.interrupts import raise_interrupts
from dtt.base.log import ImportLog, setup_logging
from dtt.base.ranks import Ranks
from dtt.base.reading import FULL
from dtt.base.terminal import Message, discard, protect_output

REMEDIES = {
    errno.ENOSPC: "free some space there, then run the same command again",
    errno.EDQUOT: "free some of your quota there, then run the same command again",
    errno.EFBIG: "raise the limit that `ulimit -f` shows, then run the same command again",
    errno.EACCES: "ask its owner (`ls -ld` shows who it is), or specify another folder",
    errno.EROFS: "use a folder on a disk that can be written",
    errno.EIO: "use a folder on another disk, and report this one to its administrator",
}


@contextmanager
def command(kept: str = "") -> Iterator[None]:
    """Run a command's body, and end the process with the exit code of its outcome.

    `kept` is printed after Ctrl-C: what remains of the work, and how to continue. With it, the work
    continues if stdout is closed or full, and the exit code is that of the work. User errors are
    printed without a traceback (DTT_DEBUG=1 shows it), bugs with one. If this is one of several
    ranks, the other ranks end too.
    """
    protect_output(may_fail=bool(kept))
    ranks = Ranks.detect()
    launcher.watch(ranks)  # before the slow imports: a launcher may end during them
    if ranks.launcher == "torchrun" and signal.getsignal(signal.SIGTERM) == signal.SIG_IGN:
        # The job script makes torchrun ignore SIGTERM, and ranks inherit that. But torchrun ends
        # the other ranks with SIGTERM when one has failed.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    setup_logging(ranks)
    sys.meta_path.insert(0, ImportLog())
    # OpenMP threads that wait should sleep instead of spin: this is as fast on an idle machine, and
    # up to twice as fast where other processes use the same cores. torch reads it when it is
    # loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # pydantic would search every installed package for plugins; dtt needs none.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    code = ExitCode.DONE
    try:
        raise_interrupts()
        yield
        # Python's own flush at exit would report a full disk as an ignored exception, with exit
        # code 120.
        sys.stdout.flush()  # here, where a full disk or a closed pipe can be reported
    except DttError as error:
        code = _report(error)
    except BrokenPipeError:  # the reader of stdout has ended, for example in `dtt … | head`
        discard(sys.stdout.fileno())  # Python's flush at exit would change the exit code
    except (OSError, MemoryError) as error:
        try:
            sys.stdout.flush()
        except OSError:
            discard(sys.stdout.fileno())
        code = _report(in_words(error))
    except KeyboardInterrupt:
        print(f"interrupted: {kept}" if kept else "interrupted", file=sys.stderr)
        code = ExitCode.INTERRUPTED
        _abort_peers(code, "interrupted")
    except Exception as error:  # noqa: BLE001  a bug: print what a report needs, end all ranks
        sys.stderr.write(traceback.format_exc())
        sys.stderr.write(Message("dtt: this is a bug; please report the lines above\n"))
        code = ExitCode.BUG
        _abort_peers(code, repr(error))
    if ranks.size > 1 and "torch" in sys.modules:
        # A Gloo thread may still be freeing its last collective. If it acquired the GIL while
        # Python shuts down, C++ would abort the process.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    if code != ExitCode.DONE:
        sys.exit(code)


def leave() -> NoReturn:
    """End the process successfully, without Python's cleanup.

    Python takes a tenth of a second to free the words and vocabularies in memory. This calls C's
    `exit` instead of `os._exit`: MPICH's exit handler reports to the launcher that this rank has
    ended well. Without it, `mpirun` sometimes kills the other ranks.
    """
    sys.stderr.flush()
    ctypes.CDLL(None).exit(ExitCode.DONE)
    raise AssertionError  # C's exit does not return


def _abort_peers(code: ExitCode, reason: str) -> None:
    """End every other rank, if there are others: then their module has been imported."""
    if (comm := sys.modules.get("dtt.mesh.comm")) is not None:
        comm.abort_peers(code, reason)


def _report(error: DttError) -> ExitCode:
    if os.environ.get("DTT_DEBUG") == "1":
        traceback.print_exc()
    print(Message(f"dtt: {error}"), file=sys.stderr)
    _abort_peers(error.exit_code, str(error).splitlines()[0])
    return error.exit_code


def in_words(error: OSError | MemoryError) -> DttError:
    """Return the DttError that explains an error of the system."""
    if isinstance(error, MemoryError):
        return EnvironmentUnfit(
            "this process has too little memory",
            why=str(error) or "an allocation failed",
            next="fewer processes on this machine, or a machine with more memory",
        )
    if isinstance(error, FileExistsError | NotADirectoryError) and error.filename:
        path = Path(os.fsdecode(error.filename))
        return StorageError(
            "there is a file where a folder is expected",
            where=next((p for p in (path, *path.parents) if p.is_file()), path),
            next="specify another folder, or move that file away",
        )
    reason = error.strerror or str(error)
    what, where = reason[:1].lower() + reason[1:], error.filename
    if isinstance(error, FileNotFoundError):
        return InputError(what, where=where)
    remedy = REMEDIES.get(error.errno or 0)
    if where is None and remedy is not None:  # such as the target of stdout
        remedy = remedy.replace(" there,", " on the disk that `df -h` shows as full,")
    if error.errno not in FULL:
        return StorageError(what, where=where, next=remedy)
    free = free_space(Path(os.fsdecode(where))) if where is not None else None
    why = None if free is None else f"{in_size(free)} are free on that file system"
    return DiskFull(what, where=where, why=why, next=remedy)
