"""What a step of Muon holds and sends, for its own sharing out of matrices (`dtt.optim.owners`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from dtt.optim.muon import BATCH_ELEMENTS
from dtt.optim.newton_schulz import HALVED
from dtt.optim.owners import Matrix, buckets
from dtt.train.estimate.case import Case

FP32 = 4


class Phase(NamedTuple):
    """Of the update of a bucket, as `Muon` takes turns at them; bytes."""

    peak: float
    rest: float
    """What is left until the next one."""


def buffers(case: Case) -> int:
    """Bytes at the worst moment, beside weights, gradients and state. Each turn another bucket
    begins, and all that have begun go a phase further, the latest first."""
    cut = buckets(case.matrices, case.devices, BATCH_ELEMENTS)
    updates = [list(_phases(case, bucket)) for bucket in cut]
    worst, rests = 0.0, [0.0] * len(updates)
    for turn in range(len(updates) + 2):
        for i in reversed(range(len(updates))):
            if 0 <= turn - i < len(updates[i]):
                peak, rest = updates[i][turn - i]
                worst = max(worst, sum(rests) - rests[i] + peak)
                rests[i] = rest
    return int(worst)


def _phases(case: Case, bucket: Sequence[Matrix]) -> Iterator[Phase]:
    """On the first device, which has the costliest matrix: average gradients and send them,
    orthogonalise and send the updates, apply these. What is sent, and what comes, lies there once
    more until the next phase has begun; where each device holds whole matrices, only updates are
    sent."""
    w, e = case.weight_bytes, case.product_bytes
    held = sum(matrix.held for matrix in bucket)
    owned = [matrix for matrix in bucket if matrix.owner == 0]
    own = _numbers(owned)
    batch = max(
        sum(matrix.held for matrix in bucket if matrix.shape == shape)
        for shape in {matrix.shape for matrix in bucket}
    )
    averaging = w * (held + 2 * batch)  # all gradients, and momenta of a batch, old and new
    applying = _applying(case, batch)
    orthogonalizing = max(_newton_schulz(case, owned), _row_norms(case, owned))
    if case.devices == 1:
        yield Phase(max(averaging, w * held + orthogonalizing, e * held + applying), 0)
        return
    there = e * (2 * own + held / _copies(case) if case.sizes.sharded else own)
    home = e * (2 * held + _copies(case) * own)
    asking = max(averaging, w * held + there)
    answering = there + max(orthogonalizing, e * own + home)
    if case.sizes.sharded:
        yield Phase(asking, there)
        yield Phase(answering, home)
    else:
        yield Phase(max(asking, answering), home)
    yield Phase(home + applying, 0)


def _applying(case: Case, batch: float) -> float:
    """Bytes beside the updates: old weights, and updates as wide as these, which NorMuon scales
    into new ones. Cautious decay compares old weights with updates, a byte a number."""
    assert case.muon is not None
    w, e = case.weight_bytes, case.product_bytes
    wide = (e != w) + (case.muon.normuon_beta2 is not None)
    # The product that is compared, then the decayed weights beside the result of the comparison.
    cautious = w + 1 if case.muon.cautious_weight_decay else 0
    return batch * (w * (1 + wide) + cautious)


def _row_norms(case: Case, owned: Sequence[Matrix]) -> float:
    """Bytes of all updates and, for NorMuon, of the largest stack in fp32 with its squares."""
    if case.muon is None or case.muon.normuon_beta2 is None:
        return 0
    shapes = [matrix.shape for matrix in owned]
    stack = max((shapes.count(shape) * prod(shape) for shape in set(shapes)), default=0)
    copies = 1 if case.product_bytes == FP32 else 2
    return case.product_bytes * _numbers(owned) + FP32 * copies * stack


def exchanged(case: Case) -> float:
    """Bytes of a step that the busiest device sends or receives, whichever are more.

    Owners receive what they lack of their matrices, and send each device the part of the update
    that it holds, both as Newton-Schulz takes them.
    """
    copies = _copies(case)
    ranks = case.devices // copies
    owned, stays, asked = (defaultdict[int, float](float) for _ in range(3))
    for matrix in case.matrices:
        owned[matrix.owner] += prod(matrix.shape)
        stays[matrix.owner] += 2 * matrix.held
        asked[matrix.owner // ranks] += matrix.held  # of each device of the owner's copy
    held = sum(asked.values())
    return case.product_bytes * max(
        max(asked[rank // ranks] + copies * owned[rank], owned[rank] + held) - stays[rank]
        for rank in range(case.devices)
    )


def _copies(case: Case) -> int:
    """How many devices hold each number of a matrix."""
    return case.sizes.replicate if case.sizes.sharded else case.devices


def _numbers(matrices: Sequence[Matrix]) -> int:
    return sum(prod(matrix.shape) for matrix in matrices)


def _newton_schulz(case: Case, owned: Sequence[Matrix]) -> float:
    """Bytes of all updates but one stack's, and of what this one, the worst, takes meanwhile: X,
    the next X, and two of X X^T and its like; or three of these, or as they are made of halves."""
    worst = 0.0
    for shape in {matrix.shape for matrix in owned}:
        n = sum(matrix.shape == shape for matrix in owned)
        short, long = sorted(shape)
        halves = case.gpu.kind == "cpu" and case.product_bytes == 4 and short >= HALVED
        grams = (4.75 if halves else 3) * short * short
        working = n * (short * long + max(short * long + 2 * short * short, grams))
        worst = max(worst, _numbers(owned) - n * short * long + working)
    return case.product_bytes * worst
