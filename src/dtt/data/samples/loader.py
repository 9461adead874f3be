"""The data loader: reads the samples of each step and prefetches batches onto the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any, Self

import numpy.typing as npt
import torch
from torch import Tensor

from dtt.base.errors import DttError
from dtt.base.log import log
from dtt.base.targets import IGNORE_INDEX
from dtt.config.run import RunConfig
from dtt.data.samples.dataset import Dataset
from dtt.data.samples.protocol import SampleNumbers, SampleSource
from dtt.data.samples.shard_check import ShardCheck
from dtt.data.samples.token_shards import Shard
from dtt.data.samples.token_source import TokenSource

SampleReader = SampleSource | Dataset
"""A source, or a mixture of several."""


@dataclass(frozen=True)
class MicroBatch:
    """Input of one forward pass; all tensors are [rows, seq_len].

    At the longest context length a row is a sample. At a shorter one, each sample is divided into
    several consecutive rows.
    """

    tokens: Tensor
    """int64 input ids; padding is replaced by id 0."""
    targets: Tensor
    """int64 next tokens; IGNORE_INDEX where there is none or where it is excluded from the loss."""
    doc_ids: Tensor | None
    """int32 document index of each token; None if attention crosses document boundaries."""
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    """Further values of the targets that the objective needs; see `SampleRows.extra`."""


@dataclass(frozen=True)
class Batch:
    """The data of one optimizer step on one rank."""

    samples: SampleNumbers
    """Sample numbers of the global batch, over all ranks; input of the sample hash chain."""
    targets: int
    """Number of targets (tokens to predict) in the global batch."""
    terms: int
    """Number of terms that the loss of the global batch is the mean of: its targets, or with
    preference data its pairs."""
    micro_batches: list[MicroBatch]
    """The micro-batches of this rank."""
    tokens: int | None = None
    """Number of tokens in the global batch, without padding; None without conversations."""


Batches = Generator[Batch, None, None]


@dataclass(frozen=True)
class BatchReader:
    """Reader of one rank's samples of every global batch, in micro-batches."""

    rank: int
    size: int
    """Number of ranks that read different samples."""
    micro_batch: int
    """Samples per forward pass."""
    device: torch.device
    check: ShardCheck | None = None
    """Check of the token files that are read; None: they are not checked."""

    @classmethod
    def of(cls, cfg: RunConfig, rank: int, size: int, device: torch.device) -> Self:
        """Return the reader of a rank in the run that `cfg` describes."""
        return cls(rank, size, cfg.train.micro_batch, device)

    def checking(self, rank: int, size: int) -> Self:
        """Return this reader with a check of token files, which `size` ranks share."""
        return replace(self, check=ShardCheck(rank, size))

    def read(
        self, source: SampleReader, samples: SampleNumbers, seq_len: int | None = None
    ) -> list[MicroBatch]:
        """Read this rank's part of `samples` (every size-th) and divide it into micro-batches.

        Rows have `seq_len` tokens, which must divide the length of a sample; None is the full
        length.
        """
        if self.check is not None:
            # The samples of all ranks: the one that checks a shard need not be one that reads it.
            self.check.reads(_shards(source, samples))
        # Every size-th sample: neither the number of ranks nor the micro-batch changes the samples
        # of a step.
        local_samples = samples[self.rank :: self.size]
        if not len(local_samples):
            return []
        rows = source.read(local_samples)
        width = rows.ids.shape[1] - 1
        seq_len = seq_len or width
        # A shorter context gives more rows, so that a micro-batch keeps its number of tokens, and
        # its memory.
        count = self.micro_batch * (width // seq_len)  # rows per micro-batch
        # IGNORE_INDEX is not a valid embedding index. Any id may replace it: padding is at the end
        # of a sample, so no token of a document attends to it, and its targets are ignored.
        tokens = (part.clamp(min=0) for part in self._parts(rows.ids[:, :-1], seq_len, count))
        targets = self._parts(rows.targets, seq_len, count)
        doc_ids: Iterable[Tensor | None] = repeat(None)
        if rows.doc_ids is not None:
            doc_ids = self._parts(rows.doc_ids[:, :-1], seq_len, count)
        extra = {name: self._parts(values, seq_len, count) for name, values in rows.extra.items()}
        return [
            MicroBatch(x, y, documents, {name: parts[i] for name, parts in extra.items()})
            for i, (x, y, documents) in enumerate(zip(tokens, targets, doc_ids, strict=False))
        ]

    def _parts(self, array: npt.NDArray[Any], seq_len: int, count: int) -> Sequence[Tensor]:
        """Return an array [N, S] on the device, in parts of `count` rows of `seq_len`."""
        tensor = torch.from_numpy(array.reshape(-1, seq_len))
        if self.device.type == "cuda":
            # Pinned memory makes the copy asynchronous; the stream orders it before the step.
            tensor = tensor.pin_memory().to(self.device, non_blocking=True)
        return torch.split(tensor, count)

    def read_on_all(self, source: SampleReader, samples: SampleNumbers) -> list[MicroBatch]:
        """Read as `read` does, but return at least one micro-batch on every rank.

        A rank that has no sample gets one without targets: it must run the forward pass, too, since
        sharded ranks gather weights together.
        """
        micro_batches = self.read(source, samples)
        if micro_batches or self.size == 1:
            return micro_batches
        # The tokens of another sample, not zeros: their number and documents have usual shapes.
        (other,) = replace(self, rank=0, size=1).read(source, samples[:1])
        return [replace(other, targets=torch.full_like(other.targets, IGNORE_INDEX))]


def _shards(source: SampleReader, samples: SampleNumbers) -> Iterator[Shard]:
    """Yield the shards that contain these samples."""
    if isinstance(source, TokenSource):
        yield from source.shards_of(samples)
    elif isinstance(source, Dataset):
        for part, numbers, _ in source.by_source(samples):
            yield from _shards(part, numbers)


def training_batches(dataset: Dataset, reader: BatchReader, first_step: int) -> Batches:
    """Return a generator of batches, from `first_step` (counted from 0) to the end of the run.

    Step s consumes the samples at positions first_sample(s) … first_sample(s + 1) - 1, for any
    number of ranks.
    """

    def read_batch(step: int) -> Batch:
        first = dataset.first_sample(step)
        try:
            samples = dataset.order(first, dataset.first_sample(step + 1) - first)
            micro_batches = reader.read(dataset, samples, dataset.step_sizes.at(step).seq_len)
            counts = dataset.counts(samples)
            tokens = None if dataset.manifest.chat is None else counts.tokens
            return Batch(samples, counts.targets, counts.terms, micro_batches, tokens)
        except DttError:
            # The exception surfaces in the training loop, which does not know the step of the
            # thread.
            log.error("rank %d cannot read the data of step %d", reader.rank, step + 1)
            raise

    def set_up_thread() -> None:
        if reader.device.type == "cuda":
            torch.cuda.set_device(reader.device)  # the current device is a per-thread setting

    return _prefetched(read_batch, range(first_step, dataset.steps), set_up_thread)


def _prefetched(
    read_batch: Callable[[int], Batch],
    steps: Iterable[int],
    set_up_thread: Callable[[], None],
    depth: int = 2,
) -> Batches:
    """Yield `read_batch(step)` for all steps; a thread reads up to `depth` steps in advance."""
    # One thread: two would have to agree on the order in which sources are read.
    with ThreadPoolExecutor(1, thread_name_prefix="loader", initializer=set_up_thread) as pool:
        pending: deque[Future[Batch]] = deque()
        for step in steps:
            pending.append(pool.submit(read_batch, step))
            # `depth` steps ahead: the device never waits, unless reading is slower than training on
            # average.
            if len(pending) > depth:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
