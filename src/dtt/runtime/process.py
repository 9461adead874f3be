"""The edge of every command: errors become one message and an exit code, for all ranks at once."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from dtt.errors import DttError, ExitCode, InputError, StorageError
from dtt.runtime.comm import abort_peers
from dtt.runtime.log import setup_logging
from dtt.runtime.ranks import Ranks


@contextmanager
def command() -> Iterator[None]:
    """Run a command's body; leave the process with the exit code its ending deserves.

    A user's fault is printed without a traceback (DTT_DEBUG=1 shows it); a bug with one. When
    this is a rank of an MPI job, the other ranks end too.
    """
    setup_logging(Ranks.detect())
    # Threads that wait for each other sleep instead of spinning: as fast on an idle machine, and
    # several times faster where other processes want the same cores. Read when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        yield
    except DttError as error:
        _leave(error)
    except BrokenPipeError:  # the reader of our stdout has gone, as in `dtt … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(ExitCode.DONE)
    except OSError as error:
        _leave(_in_words(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        abort_peers(ExitCode.INTERRUPTED)
        sys.exit(ExitCode.INTERRUPTED)
    except Exception:  # noqa: BLE001  a bug: say so with everything a report needs, and free the other ranks
        traceback.print_exc()
        print("dtt: this is a bug; please report the lines above", file=sys.stderr)
        abort_peers(ExitCode.BUG)
        sys.exit(ExitCode.BUG)


def _leave(error: DttError) -> None:
    if os.environ.get("DTT_DEBUG") == "1":
        traceback.print_exc()
    print(f"dtt: {error}", file=sys.stderr)
    abort_peers(error.exit_code)
    sys.exit(error.exit_code)


def _in_words(error: OSError) -> DttError:
    """What the operating system refused, as dtt says it."""
    kind = InputError if isinstance(error, FileNotFoundError) else StorageError
    reason = error.strerror or str(error)
    return kind(reason[:1].lower() + reason[1:], where=error.filename)
