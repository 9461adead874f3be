"""Checks that the data, and its order, is the same as before a resume and on every rank."""

from __future__ import annotations

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
    samples = dataset.samples_at(first, following - first)
    if extend_data_hash(position.previous_ledger, samples) != position.ledger:
        raise DamagedError(
            "the data is not in the order that this job was trained in",
            why=f"step {position.step} would now use different samples",
            next="use the token files, the seed and the batches (train.steps, too, if these "
            "are given as shares of it) the job was started with",
        )


def check_ranks(position: Position, world: World) -> None:
    """Raise DamagedError, on every rank, unless all ranks have trained on the same samples."""
    progress = (position.ledger, position.tokens)
    if world.agree(progress != world.from_first(progress)):
        raise DamagedError(
            "the processes of this run do not read the same data",
            why=f"the samples of some step since the last save, up to {position.step}, differ",
            next="make every node see the same files, and resume from the last checkpoint",
        )
