"""A program that stands in for `python -m dtt.main` and `python -m torch.distributed.run`.

dtt starts processes of its own: the steps of a pipeline, the trials of a sweep, torchrun. Each
would import torch and dtt anew, which is 4 s of CPU time. The program asks a server for a process
that is forked from one with all imports, hands over its streams, folder, environment and limits,
forwards signals, and ends as that process ends. Other programs, those in another namespace, and
those whose variables have their effect during an import, it leaves to the real Python.
"""

from __future__ import annotations

import json
import os
import resource
import runpy
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from multiprocessing import Process, connection, process
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

READ_AT_IMPORT = ("OMP_NUM", "PYTHON", "TORCH_LOGS", "TORCHDYNAMO", "TORCHINDUCTOR", "CXX")
"""Beginnings of variables that have had their effect on what is imported already."""

# Isolated, so it takes 30 ms. MPI gives each rank a file descriptor, which would be lost.
CLIENT = """#!{python} -IS
import os, sys
module = {{"dtt": ["-m", "dtt.main"], "torchrun": ["-m", "torch.distributed.run"]}}
words = module.get(os.path.basename(sys.argv[0]), []) + sys.argv[1:]
asked = words[1:] if words[:1] == ["-u"] else words
theirs = {{k: v for k, v in os.environ.items() if k.startswith({read!r})}}
theirs |= {{n: os.readlink("/proc/self/ns/" + n) for n in ("net", "mnt", "pid", "user")}}
mpi = any(k.startswith(("PMI", "OMPI_COMM")) for k in os.environ)
if mpi or asked[:2] not in module.values() or [os.getuid(), theirs] != {ours!r}:
    os.execv({python!r}, [{python!r}, *words])
import json, resource, signal, socket, struct
umask = os.umask(0)
os.umask(umask)
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
names = "SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"
signals = [signal.Signals[name] for name in names]
ignored = [int(n) for n in signals if signal.getsignal(n) == signal.SIG_IGN]
limits = [(n, *resource.getrlimit(n)) for n in {limits!r}]
state = umask, ignored, limits, os.getpriority(os.PRIO_PROCESS, 0)
request = json.dumps([asked[1:], os.getcwd(), dict(os.environ), *state]).encode()
socket.send_fds(server, [struct.pack("i", len(request))], [0, 1, 2])
server.sendall(request)
for n in signals:
    if n not in ignored:
        signal.signal(n, lambda n, frame: server.send(bytes([n])))
code, = struct.unpack("i", server.recv(4) or struct.pack("i", 255))
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""


def variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that imports have read."""
    return {name: value for name, value in env.items() if name.startswith(READ_AT_IMPORT)}


LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
SERVERS: list[int] = []
"""Process id of the server, once it has started."""


def namespaces() -> dict[str, str]:
    """Return the namespaces of this process: in another one, files or the network differ."""
    own = Path("/proc/self/ns")
    return {name: str((own / name).readlink()) for name in ("net", "mnt", "pid", "user")}


@cache
def start(context: ForkServerContext) -> Path:
    """Start the server, which runs as long as this process; return the path of the program.

    Beside it the program has the names `dtt` and `torchrun`.
    """
    folder = Path(tempfile.mkdtemp(prefix="warm"))
    for name in ("warm", "dtt", "torchrun"):
        text = CLIENT.format(
            python=sys.executable, read=READ_AT_IMPORT, address=str(folder / "socket"),
            ours=[os.getuid(), variables(os.environ) | namespaces()], limits=LIMITS,
        )  # fmt: skip
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    listening, ready = context.Pipe(duplex=False)
    server = context.Process(target=_serve, args=(folder, ready), daemon=True)
    server.start()
    listening.recv()
    SERVERS.append(server.pid or 0)
    return folder / "warm"


def _serve(folder: Path, ready: connection.Connection) -> None:
    """Fork a process for each request, until the process of the tests has ended."""
    tests = process.parent_process()
    assert tests is not None
    signal.signal(signal.SIGCHLD, lambda *_: _reap())
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))
        listener.listen(100)
        ready.send(None)
        try:
            while tests.sentinel not in connection.wait([listener, tests.sentinel]):
                client, _ = listener.accept()
                with client:
                    if os.fork() == 0:
                        listener.close()
                        _attend(client, folder / "warm")
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _attend(client: socket.socket, program: Path) -> None:
    """Start what a client asks for, send its signals on, and report the exit code; never return."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, fds, *_ = socket.recv_fds(client, 4, 3)
    content = b""
    while len(content) < struct.unpack("i", size)[0]:
        content += client.recv(2**16)
    child = os.fork()
    if child == 0:
        client.close()
        # It ends as a process of multiprocessing does, which runs functions of atexit.
        become = Process(target=_become, args=(json.loads(content), fds, program))
        os._exit(become._bootstrap())  # type: ignore[attr-defined]
    for fd in fds:
        os.close(fd)
    ended, watched = os.pidfd_open(child), [client]
    while ended not in (ready := select.select([ended, *watched], [], [])[0]):
        said = ready[0].recv(1)
        os.kill(child, said[0] if said else signal.SIGKILL)
        watched = watched if said else []
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with suppress(OSError):
        client.sendall(struct.pack("i", code))
    os._exit(0)


Limits = list[tuple[int, int, int]]
Request = tuple[list[str], str, dict[str, str], int, list[int], Limits, int]


def _become(request: Request, fds: list[int], program: Path) -> None:
    """Become the process that a client asks for."""
    from support.forked import become, become_dtt

    (module, *arguments), folder, env, umask, ignored, limits, priority = request
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    for number, *limit in limits:
        resource.setrlimit(number, tuple(limit))
    os.setpriority(os.PRIO_PROCESS, 0, priority)
    around = Path(folder), env, umask, program
    if module == "dtt.main":
        become_dtt(arguments, around, *fds)
    become(around, *fds)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def use(program: Path) -> None:
    """Start `program` wherever this process would start the real Python with a module."""
    start_process = subprocess.Popen.__init__

    def quickly(self: Any, args: Any, *rest: Any, **keys: Any) -> None:
        if isinstance(args, list | tuple) and args[0] == sys.executable and "-m" in args[1:3]:
            keys["executable"] = program
        start_process(self, args, *rest, **keys)

    subprocess.Popen.__init__ = quickly  # type: ignore[method-assign]
