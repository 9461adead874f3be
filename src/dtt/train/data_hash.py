"""Checks that the data, and its order, is the same as before a resume and on every rank."""

from __future__ import annotations

import socket

from dtt.base.errors import DamagedError
from dtt.data.samples.dataset import Dataset
from dtt.data.samples.shuffle import extend_data_hash
from dtt.mesh.dist import World
from dtt.train.state import Position


def check_order(position: Position, dataset: Dataset) -> None:
    """Raise DamagedError unless the data still yields the samples that the last step trained on.

    It compares the sample hash chain over these samples with the one in `position`.
    """
    if position.step == 0:
        return
    first = dataset.first_sample(position.step - 1)
    following = dataset.first_sample(position.step)
    samples = dataset.order(first, following - first)
    if extend_data_hash(position.previous_data_hash, samples) != position.data_hash:
        raise DamagedError(
            "the data is not in the order that this job was trained in",
            why=f"step {position.step} would now use different samples",
            next="use the token files, the seed and the batches (train.steps, too, if these "
            "are given as shares of it) the job was started with",
        )


def check_nodes(dataset: Dataset, world: World) -> None:
    """Raise DamagedError, on every rank, unless all ranks have opened the same data.

    Text or tokens on the local disks of nodes may be of different revisions, and their samples have
    the same numbers, so that the sample hash chain cannot tell them apart.
    """
    found = world.gather((dataset.manifest.key, socket.gethostname()))
    key, first = found[0]
    other = next((node for theirs, node in found if theirs != key), None)
    if other is not None:
        raise DamagedError(
            "the nodes of this run do not have the same data",
            why=f"its content on {other} differs from that on {first}",
            next="download it on every node again, with download.revision=COMMIT for a Hub dataset",
        )


def check_ranks(position: Position, world: World) -> None:
    """Raise DamagedError, on every rank, unless all ranks have trained on the same samples."""
    progress = (position.data_hash, position.tokens)
    if world.maximum(progress != world.from_first(progress)):
        raise DamagedError(
            "the processes of this run do not read the same data",
            why=f"the samples of some step since the last save, up to {position.step}, differ",
            next="make every node see the same files, and resume from the last checkpoint",
        )
