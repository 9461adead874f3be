"""Whether the data is still what the run has been trained on, on every rank."""

from __future__ import annotations

from dtt.data.dataset import Dataset
from dtt.data.order import extend_ledger
from dtt.errors import DamagedError
from dtt.runtime.dist import World
from dtt.train.state import Position


def check_order(position: Position, dataset: Dataset) -> None:
    """DamagedError unless the order of the data still gives what the last step trained on."""
    if position.step == 0:
        return
    first = dataset.first_sample(position.step - 1)
    following = dataset.first_sample(position.step)
    samples = dataset.samples_at(first, following - first)
    if extend_ledger(position.previous_ledger, samples) != position.ledger:
        raise DamagedError(
            "the data is not in the order that this job was trained in",
            why=f"step {position.step} would now see other samples",
            next="use the token files, the seed and the batches (train.steps, too, if these "
            "are given as shares of it) the job was started with",
        )


def check_ranks(position: Position, world: World) -> None:
    """DamagedError, on every rank, unless all of them have trained on the same samples."""
    mine = (position.ledger, position.tokens)
    if world.agree(mine != world.from_first(mine)):
        raise DamagedError(
            "the processes of this run do not read the same data",
            why=f"the samples of some step since the last save, up to {position.step}, differ",
            next="make every node see the same files, and go on from the last checkpoint",
        )
