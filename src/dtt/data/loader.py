"""The data loader: reads the samples of each step and prefetches batches onto the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dtt.config.run import RunConfig
from dtt.data.dataset import Dataset
from dtt.data.source import PADDING, Samples
from dtt.errors import DttError
from dtt.runtime.log import log


class Readable(Protocol):
    """A source, or a mixture of several."""

    def read(self, samples: Samples) -> npt.NDArray[np.int64]:
        """Return token ids; see `Source.read`."""

    def documents(self, samples: Samples, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """Return document indices; see `Source.documents`."""

    def targets(self, samples: Samples) -> int:
        """Return the number of targets; see `Source.targets`."""


@dataclass(frozen=True)
class MicroBatch:
    """Input of one forward pass; all tensors are [rows, seq_len].

    At the longest context length a row is a sample. At a shorter one, each sample is divided into
    several consecutive rows.
    """

    tokens: Tensor
    """int64 input ids; padding is replaced by id 0."""
    targets: Tensor
    """int64 next tokens; PADDING where there is none or where it is excluded from the loss."""
    documents: Tensor | None
    """int32 document index of each token; None if attention crosses document boundaries."""


@dataclass(frozen=True)
class Batch:
    """The data of one optimizer step on one rank."""

    samples: Samples
    """Sample numbers of the global batch, over all ranks; input of the sample hash chain."""
    targets: int
    """Number of targets (tokens to predict) in the global batch."""
    micro_batches: list[MicroBatch]
    """The micro-batches of this rank."""


Batches = Generator[Batch, None, None]


@dataclass(frozen=True)
class Share:
    """The part of every global batch that one rank reads, and its division into micro-batches."""

    rank: int
    size: int
    """Number of ranks that read different samples."""
    micro_batch: int
    """Samples per forward pass."""
    device: torch.device
    mask_documents: bool = False
    """If True, micro-batches carry the document index of each token, for the attention mask."""
    eod_mask_loss: bool = False
    """If True, the first token of each document is excluded from the targets."""

    @classmethod
    def of(cls, cfg: RunConfig, rank: int, size: int, device: torch.device) -> Self:
        """Return the share of a rank in the run that `cfg` describes."""
        data = cfg.data
        masks = data.mask_documents, data.eod_mask_loss
        return cls(rank, size, cfg.train.micro_batch, device, *masks)

    def to_device(
        self, source: Readable, samples: Samples, seq_len: int | None = None
    ) -> list[MicroBatch]:
        """Read this rank's part of `samples` (every size-th) and divide it into micro-batches.

        Rows have `seq_len` tokens, which must divide the length of a sample; None is the full
        length.
        """
        mine = samples[self.rank :: self.size]
        if not len(mine):
            return []
        ids = source.read(mine)
        width = ids.shape[1] - 1
        seq_len = seq_len or width
        rows = self.micro_batch * (width // seq_len)
        sent = self._send(ids)
        # PADDING is not a valid embedding index. Any id may replace it: padding is at the end of a
        # sample, so no real token attends to it, and its targets are PADDING.
        tokens = torch.split(sent[:, :-1].reshape(-1, seq_len).clamp(min=0), rows)
        if not (self.mask_documents or self.eod_mask_loss):
            targets = torch.split(sent[:, 1:].reshape(-1, seq_len), rows)
            return [MicroBatch(x, y, None) for x, y in zip(tokens, targets, strict=True)]
        micro_batches = []
        for x, part in zip(tokens, self._parts(mine), strict=True):
            # One part at a time, so that the temporary arrays stay in the processor's cache.
            doc_ids = source.documents(mine[part], ids[part])
            y = sent[part, 1:]
            if self.eod_mask_loss:
                y = self._send(_targets_within_documents(ids[part], doc_ids))
            documents = None
            if self.mask_documents:
                documents = self._send(doc_ids[:, :-1].reshape(-1, seq_len))
            micro_batches.append(MicroBatch(x, y.reshape(-1, seq_len), documents))
        return micro_batches

    def targets(self, source: Readable, samples: Samples) -> int:
        """Return the number of targets in `samples`, over all ranks.

        With `eod_mask_loss` the samples are read, because the number depends on where documents
        start.
        """
        if not self.eod_mask_loss:
            return source.targets(samples)
        found = 0
        for part in self._parts(samples):
            ids = source.read(samples[part])
            doc_ids = source.documents(samples[part], ids)
            found += int((_targets_within_documents(ids, doc_ids) != PADDING).sum())
        return found

    def _parts(self, samples: Samples) -> list[slice]:
        """Return the slice of `samples` for each forward pass."""
        return [slice(i, i + self.micro_batch) for i in range(0, len(samples), self.micro_batch)]

    def _send(self, array: npt.NDArray[np.int64] | npt.NDArray[np.int32]) -> Tensor:
        tensor = torch.from_numpy(array)
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor


def _targets_within_documents(
    ids: npt.NDArray[np.int64], doc_ids: npt.NDArray[np.int32]
) -> npt.NDArray[np.int64]:
    """Return the targets [rows, T] of `ids` [rows, T + 1]; PADDING where a document starts."""
    return np.where(doc_ids[:, 1:] == doc_ids[:, :-1], ids[:, 1:], PADDING)


def training_batches(dataset: Dataset, share: Share, first_step: int) -> Batches:
    """Return a generator of batches, from `first_step` (counted from 0) to the end of the run.

    Step s consumes the samples at positions first_sample(s) … first_sample(s + 1) - 1, for any
    number of ranks.
    """

    def make(step: int) -> Batch:
        first = dataset.first_sample(step)
        try:
            samples = dataset.samples_at(first, dataset.first_sample(step + 1) - first)
            mine = share.to_device(dataset, samples, dataset.stages.at(step).seq_len)
            return Batch(samples, share.targets(dataset, samples), mine)
        except DttError:
            log.error("rank %d cannot read the data of step %d", share.rank, step + 1)
            raise

    def begin() -> None:
        if share.device.type == "cuda":
            torch.cuda.set_device(share.device)  # the current device is a per-thread setting

    return _ahead(make, range(first_step, dataset.steps), begin)


def _ahead(
    make: Callable[[int], Batch], steps: Iterable[int], begin: Callable[[], None], depth: int = 2
) -> Batches:
    """Yield `make(step)` for all steps, computed in a thread up to `depth` steps in advance."""
    with ThreadPoolExecutor(1, thread_name_prefix="loader", initializer=begin) as pool:
        ready: deque[Future[Batch]] = deque()
        for step in steps:
            ready.append(pool.submit(make, step))
            if len(ready) > depth:
                yield ready.popleft().result()
        while ready:
            yield ready.popleft().result()
