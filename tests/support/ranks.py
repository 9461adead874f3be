"""Running a function of a test in other processes: on real ranks of one group, or alone."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from dtt.base.ranks import Ranks
from dtt.mesh.dist import World, start, stop
from dtt.verify.forked_ranks import rank_variables, rendezvous
from support.forked import CONTEXT


def on_ranks(size: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """`work(world, *arguments)` on each of `size` CPU ranks; what they return, by rank.

    `work` is a function at the top of a test module.
    """
    store = rendezvous()
    pipes, processes = [], []
    for rank in range(size):
        here, there = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(
            target=_rank, args=(there, rank, size, store.port, _named(work), arguments)
        )
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    try:
        return [pipe.recv() for pipe in pipes]  # EOFError: that rank failed, see its traceback
    finally:
        for process in processes:
            process.join(timeout=60)
            process.kill()


def start_process(work: Callable[..., Any], *arguments: Any) -> BaseProcess:
    """Start `work(*arguments)` in a process that is forked from a clean one.

    A fork of this process would inherit the locks of threads that do not exist in it.
    """
    process = CONTEXT.Process(target=_call, args=(_named(work), arguments), daemon=True)
    process.start()
    return process


Named = tuple[str, str]
"""File and name of a function: test modules cannot be imported by name."""


def _named(work: Callable[..., Any]) -> Named:
    return work.__code__.co_filename, work.__name__


def _call(work: Named, arguments: tuple[Any, ...]) -> Any:
    file, name = work
    spec = importlib.util.spec_from_file_location("test_on_ranks", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)(*arguments)


def _rank(
    result: Connection, rank: int, size: int, port: int, work: Named, arguments: tuple[Any, ...]
) -> None:
    os.environ.update(rank_variables(rank, size, port))
    world: World = start(Ranks(rank, size, rank, size, "torchrun"), "cpu")
    result.send(_call(work, (world, *arguments)))
    world.barrier()
    stop()
