"""The edge of every command: errors become one message and an exit code, for all ranks at once."""

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

from dtt.errors import DiskFull, DttError, ExitCode, InputError, StorageError
from dtt.reading import FULL
from dtt.runtime import launcher
from dtt.runtime.comm import abort_peers
from dtt.runtime.files import free_space
from dtt.runtime.log import setup_logging
from dtt.runtime.ranks import Ranks

REMEDIES = {
    errno.ENOSPC: "free some space there, then run the same command again",
    errno.EDQUOT: "free some of your quota there, then run the same command again",
    errno.EFBIG: "raise the limit that `ulimit -f` shows, then run the same command again",
    errno.EACCES: "ask its owner (`ls -ld` shows who it is), or name another folder",
    errno.EROFS: "name a folder on a disk that can be written",
    errno.EIO: "name a folder on another disk, and tell who looks after this one",
}


@contextmanager
def command() -> Iterator[None]:
    """Run a command's body; leave the process with the exit code its ending deserves.

    A user's fault is printed without a traceback (DTT_DEBUG=1 shows it); a bug with one. When
    this is one rank of several, the other ranks end too.
    """
    ranks = Ranks.detect()
    launcher.watch(ranks)  # before the slow imports, in which a launcher may end, too
    if ranks.launcher == "torchrun" and signal.getsignal(signal.SIGTERM) == signal.SIG_IGN:
        # A job script lets torchrun ignore SIGTERM, and its ranks inherit that. But with this very
        # signal torchrun ends the others when one rank has failed.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    setup_logging(ranks)
    # Threads that wait for each other sleep instead of spinning: as fast on an idle machine, up to
    # twice as fast where other processes want the same cores. Read when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # For plugins, of which dtt needs none, pydantic looks into every installed package.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    code = ExitCode.DONE
    try:
        yield
        sys.stdout.flush()  # here, where a full disk or a closed pipe can still be told
    except DttError as error:
        code = _tell(error)
    except BrokenPipeError:  # the reader of our stdout has gone, as in `dtt … | head`
        _drop_output()
    except OSError as error:
        try:
            sys.stdout.flush()
        except OSError:
            _drop_output()
        code = _tell(in_words(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = ExitCode.INTERRUPTED
        abort_peers(code, "interrupted")
    except Exception as error:  # noqa: BLE001  a bug: say so with everything a report needs, and free the other ranks
        sys.stderr.write(
            f"{traceback.format_exc()}dtt: this is a bug; please report the lines above\n"
        )
        code = ExitCode.BUG
        abort_peers(code, repr(error))
    if ranks.size > 1 and "torch" in sys.modules:
        # A thread of Gloo may still be about to let go of the last exchange. Did it ask for
        # Python's lock while Python ends, C++ would abort the process.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    if code != ExitCode.DONE:
        sys.exit(code)


def leave() -> NoReturn:
    """End a process that is done, without the tenth of a second that it takes Python to free all
    the words and vocabularies that it holds.

    C's `exit`, not `os._exit`: MPICH tells its launcher in an exit handler that this rank has
    ended well, and without that `mpirun` now and then kills the other ranks.
    """
    sys.stderr.flush()
    ctypes.CDLL(None).exit(ExitCode.DONE)
    raise AssertionError  # C's exit does not return


def _drop_output() -> None:
    """Let Python's own flush at exit, which would fail and change the exit code, succeed."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _tell(error: DttError) -> ExitCode:
    if os.environ.get("DTT_DEBUG") == "1":
        traceback.print_exc()
    print(f"dtt: {error}", file=sys.stderr)
    abort_peers(error.exit_code, str(error).splitlines()[0])
    return error.exit_code


def in_words(error: OSError) -> DttError:
    """What the operating system refused, as dtt says it."""
    if isinstance(error, FileExistsError | NotADirectoryError) and error.filename:
        path = Path(os.fsdecode(error.filename))
        return StorageError(
            "a file stands where a folder should be",
            where=next((p for p in (path, *path.parents) if p.is_file()), path),
            next="name another folder, or move that file away",
        )
    reason = error.strerror or str(error)
    what, where = reason[:1].lower() + reason[1:], error.filename
    if isinstance(error, FileNotFoundError):
        return InputError(what, where=where)
    remedy = REMEDIES.get(error.errno or 0)
    if error.errno not in FULL:
        return StorageError(what, where=where, next=remedy)
    free = free_space(Path(os.fsdecode(where))) if where is not None else None
    why = None if free is None else f"{free / 1e9:.3f} GB are free on that file system"
    return DiskFull(what, where=where, why=why, next=remedy)
