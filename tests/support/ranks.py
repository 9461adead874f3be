"""Running a function of a test on several real ranks, in one gloo process group."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
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
    source = (work.__code__.co_filename, work.__name__)
    pipes, processes = [], []
    for rank in range(size):
        here, there = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(
            target=_rank, args=(there, rank, size, store.port, source, arguments)
        )
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    try:
        return [pipe.recv() for pipe in pipes]  # EOFError: that rank failed, see its traceback
    finally:
        for process in processes:
            process.join(timeout=30)
            process.kill()


def _rank(
    result: Connection,
    rank: int,
    size: int,
    port: int,
    source: tuple[str, str],
    arguments: tuple[Any, ...],
) -> None:
    os.environ.update(rank_variables(rank, size, port))
    file, name = source
    spec = importlib.util.spec_from_file_location("test_on_ranks", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    world: World = start(Ranks(rank, size, rank, size, "torchrun"), "cpu")
    result.send(getattr(module, name)(world, *arguments))
    world.barrier()
    stop()
