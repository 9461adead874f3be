"""From the order of the data to batches on the device, ahead of the training loop."""

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
        """As `Source.read`."""

    def documents(self, samples: Samples, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """As `Source.documents`."""

    def targets(self, samples: Samples) -> int:
        """As `Source.targets`."""


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass takes; everything [rows, seq_len].

    At the longest context a row is a sample; at a shorter one each sample gives several, one after
    the other.
    """

    tokens: Tensor
    targets: Tensor
    """The tokens that follow; PADDING where there is none, or none that counts."""
    documents: Tensor | None
    """Which document of its row each token is in; None when documents may see each other."""


@dataclass(frozen=True)
class Batch:
    """One optimizer step's data, as one rank sees it."""

    samples: Samples
    """Of the whole global batch, over all ranks: what the ledger records."""
    targets: int
    """Tokens to predict in the whole global batch."""
    micro_batches: list[MicroBatch]
    """This rank's share."""


Batches = Generator[Batch, None, None]


@dataclass(frozen=True)
class Share:
    """Which samples of every global batch are this rank's, and how they are cut."""

    rank: int
    size: int
    micro_batch: int
    """Samples in a forward pass."""
    device: torch.device
    mask_documents: bool = False
    eod_mask_loss: bool = False
    """Whether the first token of a document is no target."""

    @classmethod
    def of(cls, cfg: RunConfig, rank: int, size: int, device: torch.device) -> Self:
        """Return the share of a rank in the run that `cfg` describes."""
        data = cfg.data
        masks = data.mask_documents, data.eod_mask_loss
        return cls(rank, size, cfg.train.micro_batch, device, *masks)

    def to_device(
        self, source: Readable, samples: Samples, seq_len: int | None = None
    ) -> list[MicroBatch]:
        """Read this rank's (every size-th) of `samples`, cut into micro-batches.

        Their rows have `seq_len` tokens, which divides a sample; None: as many as a sample.
        """
        mine = samples[self.rank :: self.size]
        if not len(mine):
            return []
        ids = source.read(mine)
        width = ids.shape[1] - 1
        seq_len = seq_len or width
        rows = self.micro_batch * (width // seq_len)
        sent = self._send(ids)
        # Padding is no id: the model may take any for it, as nothing comes after.
        tokens = torch.split(sent[:, :-1].reshape(-1, seq_len).clamp(min=0), rows)
        if not (self.mask_documents or self.eod_mask_loss):
            targets = torch.split(sent[:, 1:].reshape(-1, seq_len), rows)
            return [MicroBatch(x, y, None) for x, y in zip(tokens, targets, strict=True)]
        micro_batches = []
        for x, part in zip(tokens, self._parts(mine), strict=True):
            # By the part, as what is made on the way then stays in the processor's cache.
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
        """Return the number of targets in `samples`, those of all ranks.

        With `eod_mask_loss` it reads them, as only the documents in them tell.
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
        """The samples of each forward pass."""
        return [slice(i, i + self.micro_batch) for i in range(0, len(samples), self.micro_batch)]

    def _send(self, array: npt.NDArray[np.int64] | npt.NDArray[np.int32]) -> Tensor:
        tensor = torch.from_numpy(array)
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor


def _targets_within_documents(
    ids: npt.NDArray[np.int64], doc_ids: npt.NDArray[np.int32]
) -> npt.NDArray[np.int64]:
    """The targets [rows, T] of `ids` [rows, T + 1]; PADDING where a document begins."""
    return np.where(doc_ids[:, 1:] == doc_ids[:, :-1], ids[:, 1:], PADDING)


def training_batches(dataset: Dataset, share: Share, first_step: int) -> Batches:
    """Batches of the steps from `first_step` on (steps count from 0) to the end of the run.

    Step s takes the samples at positions first_sample(s) … first_sample(s + 1) - 1, whatever the
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
            torch.cuda.set_device(share.device)  # each thread has its own current device

    return _ahead(make, range(first_step, dataset.steps), begin)


def _ahead(
    make: Callable[[int], Batch], steps: Iterable[int], begin: Callable[[], None], depth: int = 2
) -> Batches:
    """`make(step)` for all steps, in a thread, each begun `depth` calls before its turn."""
    with ThreadPoolExecutor(1, thread_name_prefix="loader", initializer=begin) as pool:
        ready: deque[Future[Batch]] = deque()
        for step in steps:
            ready.append(pool.submit(make, step))
            if len(ready) > depth:
                yield ready.popleft().result()
        while ready:
            yield ready.popleft().result()
