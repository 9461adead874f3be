"""Estimated memory and communication of a step of Muon.

It uses the assignment of matrices to ranks that the optimizer itself makes
(`dtt.optim.muon.shard_assignment`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from dtt.estimate.case import FP32, Case
from dtt.optim.muon.newton_schulz import HALVED
from dtt.optim.muon.optimizer import BATCH_ELEMENTS
from dtt.optim.muon.shard_assignment import Matrix, buckets


class MuonPhase(NamedTuple):
    """One phase of the update of a bucket, between two yields of `Muon._update`; in bytes."""

    peak: float
    """Maximum held in the phase."""
    rest: float
    """Bytes that stay allocated until the next phase."""


def buffers(case: Case) -> int:
    """Return the peak bytes of a step, not counting weights, gradients and optimizer state.

    In each turn one more bucket starts, and all that have started advance by a phase, the latest
    first, as in `dtt.optim.muon.all_to_all.stagger`.
    """
    cut = buckets(case.matrices, case.stage_devices, BATCH_ELEMENTS)
    updates = [list(_phases(case, bucket)) for bucket in cut]
    worst, rests = 0.0, [0.0] * len(updates)
    for turn in range(len(updates) + 3):
        for i in reversed(range(len(updates))):
            if 0 <= turn - i < len(updates[i]):
                peak, rest = updates[i][turn - i]
                worst = max(worst, sum(rests) - rests[i] + peak)
                rests[i] = rest
    return int(worst)


def _phases(case: Case, bucket: Sequence[Matrix]) -> Iterator[MuonPhase]:
    """Yield the phases of a bucket on the first device, which gets the most expensive matrix.

    The phases are: update momenta and send them to the assigned ranks; orthogonalise and send the
    updates; apply the updates. Send and receive buffers exist until the next phase has started.
    Without sharding, each device holds full matrices, and only updates are sent.
    """
    w, e = case.weight_bytes, case.product_bytes
    held = sum(matrix.local_elements for matrix in bucket)
    owned = [matrix for matrix in bucket if matrix.assigned_rank == 0]
    own = _numbers(owned)
    batch = max(
        sum(matrix.local_elements for matrix in bucket if matrix.shape == shape)
        for shape in {matrix.shape for matrix in bucket}
    )
    averaging = w * (held + 2 * batch)  # all gradients, and old and new momenta of one batch
    applying = _applying(case, batch)
    orthogonalizing = max(_newton_schulz(case, owned), _row_norms(case, owned))
    if case.stage_devices == 1:
        yield MuonPhase(max(averaging, w * held + orthogonalizing, e * held + applying), 0)
        return
    there = e * (2 * own + held / _copies(case) if case.sizes.sharded else own)
    home = e * (2 * held + _copies(case) * own)
    asking = max(averaging, w * held + there)
    answering = there + max(orthogonalizing, e * own + home)
    if case.sizes.sharded:
        yield MuonPhase(asking, there)
        yield MuonPhase(answering, home)
    else:
        yield MuonPhase(max(asking, answering), home)
    if case.sizes.sharded and case.muon is not None and case.muon.scale == "hyperball":
        yield MuonPhase(home + applying, home)  # the sums over matrices are in flight
    yield MuonPhase(home + applying, 0)


def _applying(case: Case, batch: float) -> float:
    """Return the bytes needed to apply updates, not counting the updates themselves.

    These are the old weights, and the updates cast to their dtype, which NorMuon scales into new
    tensors. Hyperball first adds up products of weights and updates, all in fp32. Cautious decay
    compares old weights with updates: a byte per element for the result.
    """
    assert case.muon is not None
    w, e = case.weight_bytes, case.product_bytes
    wide = (e != w) + (case.muon.normuon_beta2 is not None)
    # First the product of update and weight, then the decayed weights along with the boolean mask.
    if case.muon.scale == "hyperball":
        casts = (w != FP32) + (e != FP32) + (case.muon.normuon_beta2 is not None)
        return batch * (w + FP32 * (1 + casts))
    cautious = w + 1 if any(weight.cautious for weight in case.muons) else 0
    return batch * (w * (1 + wide) + cautious)


def _row_norms(case: Case, owned: Sequence[Matrix]) -> float:
    """Return the bytes of all updates and the largest stack in fp32 with its squares (NorMuon).

    0 without NorMuon.
    """
    if case.muon is None or case.muon.normuon_beta2 is None:
        return 0
    shapes = [matrix.shape for matrix in owned]
    stack = max((shapes.count(shape) * prod(shape) for shape in set(shapes)), default=0)
    copies = 1 if case.product_bytes == FP32 else 2
    return case.product_bytes * _numbers(owned) + FP32 * copies * stack


def exchanged(case: Case) -> float:
    """Return the bytes that the busiest device sends or receives in a step, whichever is more.

    The assigned ranks receive the missing parts of their matrices, and send each device the part of
    the update that it holds, both in the dtype of Newton-Schulz.
    """
    copies = _copies(case)
    ranks = case.stage_devices // copies
    owned, stays, asked, copied = (defaultdict[int, float](float) for _ in range(4))
    for matrix in case.matrices:
        if matrix.holders:
            # A whole expert stays where it is; its other replicas get the update.
            copied[matrix.assigned_rank] += (len(matrix.holders) - 1) * prod(matrix.shape)
            continue
        owned[matrix.assigned_rank] += prod(matrix.shape)
        stays[matrix.assigned_rank] += 2 * matrix.local_elements
        asked[matrix.assigned_rank // ranks] += (
            matrix.local_elements
        )  # from each device of the assigned rank's replica
    held = sum(asked.values())
    return case.product_bytes * max(
        max(asked[rank // ranks] + copies * owned[rank], owned[rank] + held)
        - stays[rank]
        + copied[rank]
        for rank in range(case.stage_devices)
    )


def _copies(case: Case) -> int:
    """Return the number of devices that hold each element of a matrix."""
    return case.sizes.replicate if case.sizes.sharded else case.stage_devices


def _numbers(matrices: Sequence[Matrix]) -> int:
    return sum(prod(matrix.shape) for matrix in matrices)


def _newton_schulz(case: Case, owned: Sequence[Matrix]) -> float:
    """Return the bytes while the most expensive stack of matrices is orthogonalised.

    These are the updates of all other stacks and, for this one: X and the larger of, first, the
    next X with two matrices of the size of X X^T and, second, three matrices of that size (4.75
    where `newton_schulz._gram` skips the redundant half).
    """
    worst = 0.0
    for shape in {matrix.shape for matrix in owned}:
        n = sum(matrix.shape == shape for matrix in owned)
        short, long = sorted(shape)
        halves = case.gpu.kind == "cpu" and case.product_bytes == 4 and short >= HALVED
        grams = (4.75 if halves else 3) * short * short
        working = n * (short * long + max(short * long + 2 * short * short, grams))
        worst = max(worst, _numbers(owned) - n * short * long + working)
    return case.product_bytes * worst
