"""Processes that are forked from a clean one, which has imported the slow libraries and run
nothing: most of a short run of dtt is the import of torch and of dtt itself."""

from __future__ import annotations

import errno
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import dtt
from support import warm_python

PACKAGE = Path(dtt.__file__).parent
READ_ENVIRONMENT = ("dtt/hf/", "dtt/train/frozen.py", "dtt/verify/folder.py")
"""Modules that import huggingface_hub, which reads variables when it is imported."""
NOT_AHEAD = ("dtt/data/corpus/hub.py", "/__")
"""Modules that are not imported ahead: `datasets`, which the first imports, cannot be forgotten."""
FILES = [path.relative_to(PACKAGE.parent) for path in sorted(PACKAGE.rglob("*.py"))]


def _modules(*, reading: bool) -> list[str]:
    """Return the modules of dtt that are imported ahead, and read variables or do not."""
    return [
        ".".join(path.with_suffix("").parts)
        for path in FILES
        if not any(part in str(path) for part in NOT_AHEAD)
        if any(part in str(path) for part in READ_ENVIRONMENT) == reading
    ]


MODULES, MODULES_OF_HUB = _modules(reading=False), _modules(reading=True)
TRANSFORMERS = [
    "transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama", "transformers.models.gpt2.modeling_gpt2",
]  # fmt: skip
"""What a command imports that reads or writes a folder of transformers: 1.4 s of CPU time."""
HUB_VARIABLES = ("HF_", "HUGGING", "TRANSFORMERS_", "HOME", "XDG_CACHE_HOME")
"""Beginnings of variables that huggingface_hub and transformers read when they are imported."""
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["pyarrow.parquet", "tokenizers", "torch._dynamo", "yaml", "safetensors.torch",
     "torch.distributed.checkpoint", *MODULES, *TRANSFORMERS, *MODULES_OF_HUB,
     "pytest", "hypothesis",  # which modules of tests import: 0.2 s for each rank of `on_ranks`
     # The server looks for modules in its folder: the root of the repository, in .ci/run `tests`.
     "tests.support.warm_caches", "support.warm_caches"]
)  # fmt: skip


def can_fork(env: Mapping[str, str]) -> bool:
    """Return True if a run with these variables, on top of our own, may be forked."""
    read = warm_python.variables(env).items()
    return "coverage" not in sys.modules and read <= os.environ.items()


def run_dtt(
    arguments: list[str], folder: Path, env: Mapping[str, str], timeout: float, stdin: bytes = b""
) -> tuple[int, str, str]:
    """`dtt ARGUMENTS` in `folder`: exit code, standard output, standard error."""
    return _run(become_dtt, arguments, folder, env, timeout, stdin)


def run_script(text: str, folder: Path, timeout: float) -> tuple[int, str, str]:
    """`python -c TEXT` in `folder`: exit code, standard output, standard error."""
    return _run(become_script, text, folder, {}, timeout)


def _run(
    become: Callable[..., None],
    what: list[str] | str,
    folder: Path,
    env: Mapping[str, str],
    timeout: float,
    stdin: bytes = b"",
) -> tuple[int, str, str]:
    with tempfile.TemporaryDirectory() as said:
        given, out, err = Path(said, "in"), Path(said, "out"), Path(said, "err")
        given.write_bytes(stdin)
        process = CONTEXT.Process(
            target=become, args=(what, surroundings(folder, env), given, out, err)
        )
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            raise TimeoutError(what)
        return process.exitcode, out.read_text("utf-8"), err.read_text("utf-8")


class ForkedDtt(subprocess.Popen[str]):
    """A running `dtt ARGUMENTS`, with pipes for what it prints."""

    def __init__(
        self,
        arguments: list[str],
        folder: Path,
        env: Mapping[str, str],
        target: Callable[..., None] | None = None,
    ) -> None:
        """Start `target`, or `become_dtt`."""
        # Not that of Popen, which would start a program.
        (out, there), (err, there_too) = (CONTEXT.Pipe(duplex=False) for _ in range(2))
        self._process = CONTEXT.Process(
            target=target or become_dtt,
            args=(arguments, surroundings(folder, env), Path(os.devnull), there, there_too),
        )
        self._process.start()
        self.args, self.stdin, self.returncode = arguments, None, None
        self.pid = self._process.pid or 0
        self.stdout, self.stderr = (
            os.fdopen(os.dup(p.fileno()), encoding="utf-8") for p in (out, err)
        )
        for pipe in (out, err, there, there_too):
            pipe.close()

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        self.returncode = self._process.exitcode
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end."""
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self.returncode

    def communicate(
        self, input: str | None = None, timeout: float | None = None
    ) -> tuple[str, str]:
        """Return what else it prints until its end; again the same, if it is called again."""
        assert self.stdout is not None
        assert self.stderr is not None
        if not self.stdout.closed:
            with self.stdout, self.stderr, ThreadPoolExecutor(1) as beside:
                err = beside.submit(self.stderr.read)
                self._said = self.stdout.read(), err.result()
        self.wait(timeout)
        return self._said


Stream = Path | Connection | int
Surroundings = tuple[Path, dict[str, str], int, Path]


def surroundings(folder: Path, env: Mapping[str, str]) -> Surroundings:
    """Return what a shell would hand on, folder, environment and umask, and a Python that is quick
    to start."""
    umask = os.umask(0)
    os.umask(umask)
    return folder, dict(os.environ) | dict(env), umask, warm_python.start(CONTEXT)


def as_user(action: Callable[[], object], user: int, *groups: int) -> bool:
    """Do something as another user, in a process of its own; return True if it is permitted.

    The process starts no program: the interpreter may lie in a folder that only root can read.
    Nor is it a fork of the caller: a process of tests that has run long may hold more memory than
    the machine has left, and then cannot be forked (ENOMEM).
    """
    process = CONTEXT.Process(target=become_user, args=(action, user, groups))
    process.start()
    process.join()
    assert process.exitcode in (0, errno.EACCES)
    return process.exitcode == 0


def become_user(action: Callable[[], object], user: int, groups: tuple[int, ...]) -> None:
    """Become another user, and do something; exit with EACCES if it is not permitted."""
    os.setgroups(groups)
    os.setgid(groups[0] if groups else user)
    os.setuid(user)
    os.umask(0o022)
    try:
        action()
    except PermissionError:
        sys.exit(errno.EACCES)


def become_dtt(
    arguments: list[str], around: Surroundings, given: Stream, out: Stream, err: Stream
) -> None:
    """Become the process that a shell would start."""
    import dtt.main

    become(around, given, out, err)
    sys.argv = ["dtt", *arguments]
    dtt.main.main()


def become_script(text: str, around: Surroundings, given: Stream, out: Stream, err: Stream) -> None:
    """Become a process that runs the text of a script."""
    become(around, given, out, err)
    sys.path.insert(0, "")
    exec(compile(text, "<string>", "exec"), {"__name__": "__main__"})


def _hub_variables(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(HUB_VARIABLES)}


def forget_hub() -> None:
    """Forget the modules that have read variables of the Hub, so that they are imported anew."""
    packages = ("huggingface_hub", "transformers", "accelerate")
    for name in [*sys.modules]:
        if name.partition(".")[0] in packages or name in MODULES_OF_HUB or name == "dtt.hf":
            del sys.modules[name]
            package, _, module = name.rpartition(".")
            if package in sys.modules:  # `from PACKAGE import MODULE` looks here first
                vars(sys.modules[package]).pop(module, None)


def become(around: Surroundings, given: Stream, out: Stream, err: Stream) -> None:
    """Take on folder, environment, umask and streams."""
    folder, env, umask, python = around
    os.chdir(folder)
    os.umask(umask)
    if _hub_variables(env) != _hub_variables(os.environ):
        forget_hub()
    os.environ.clear()
    os.environ.update(env)
    for number, where in enumerate((given, out, err)):
        if isinstance(where, Path):
            opened = os.open(where, os.O_WRONLY | os.O_CREAT if number else os.O_RDONLY)
        else:
            opened = where if isinstance(where, int) else where.fileno()
        os.dup2(opened, number)
        if isinstance(where, Connection):
            where.close()
        else:
            os.close(opened)
    # Those of the server would remember of its streams that one can seek in them.
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    warm_python.use(python)
