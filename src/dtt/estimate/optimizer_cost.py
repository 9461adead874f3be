"""Bytes of optimizer state and checkpoints, and the memory and communication of a step of Muon.

Muon's use the assignment of matrices to ranks that the optimizer itself makes
(`dtt.optim.muon.redistribution`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import prod

from dtt.estimate.case import FP32, Case, Weight
from dtt.optim import eight_bit
from dtt.optim.built import OWN
from dtt.optim.muon.newton_schulz import HALVED
from dtt.optim.muon.optimizer import BATCH_ELEMENTS
from dtt.optim.muon.redistribution import Matrix, buckets


def optimizer_state(case: Case) -> int:
    """Return the bytes of optimizer state on one device.

    AdamW keeps two moments per weight, Muon one, and NorMuon another number per row. A moment of 8
    bits is a byte per weight and a scale per block of a row. That of an optimizer of a user's own
    is measured.
    """
    if case.own_state is not None:  # 0.0 of one without state
        return round(case.own_state * case.held(case.trained))
    muon = case.held(case.muons)
    small = [weight for weight in case.weights if weight.optimizer == eight_bit.NAME]
    adamw = case.held(case.trained) - muon - case.held(small)
    rows = sum(-(-weight.part[0] // case.spread) for weight in case.muons)
    codes = sum(_of_8_bits(case, w, case.held([w]) // w.part[-1], w.part[-1]) for w in small)
    return codes + case.weight_bytes * (2 * adamw + muon + _numbers_per_row(case) * rows)


def _of_8_bits(case: Case, weight: Weight, rows: int, columns: int) -> int:
    """Return the bytes of both moments of some rows of a weight, of which `columns` are held."""
    scale = max(FP32, case.weight_bytes)
    return 2 * rows * (columns + scale * eight_bit.blocks_of(weight.shape))


def _numbers_per_row(case: Case) -> int:
    """Return the numbers that Muon keeps for each row of a matrix."""
    return int(case.muon is not None and case.muon.normuon_beta2 is not None)


def checkpoint_bytes(case: Case) -> int:
    """Return the bytes of a checkpoint: weights, optimizer state and EMA of the whole model.

    The step counts that AdamW keeps are too small to count.
    """
    by: dict[str, list[Weight]] = {}
    for weight in case.all_weights:
        by.setdefault(weight.optimizer, []).append(weight)
    owned, adamw, muon, small = (
        sum(weight.numel for weight in by.get(name, ()))
        for name in (OWN, "adamw", "muon", eight_bit.NAME)
    )
    trained = owned + adamw + muon + small
    rows = _numbers_per_row(case) * sum(w.shape[0] for w in by.get("muon", ()))
    codes = sum(
        _of_8_bits(case, w, prod(w.shape[:-1]), w.shape[-1]) for w in by.get(eight_bit.NAME, ())
    )
    average = FP32 * trained if case.cfg.train.ema_decay is not None else 0
    state = codes + round((case.own_state or 0.0) * owned)
    return case.weight_bytes * (trained + 2 * adamw + muon + rows) + state + average


def checkpoints_at_once(case: Case) -> int:
    """Return the maximum number of checkpoints on disk: those kept, and one being written."""
    rules = case.cfg.checkpoint
    forever = case.steps // rules.keep_every if rules.keep_every else 0
    kept = rules.keep_last + rules.keep_best + forever
    return min(kept + 1, -(-case.steps // rules.every))


def buffers(case: Case) -> int:
    """Return the peak bytes of a step of Muon, without weights, gradients and optimizer state.

    A bucket is averaged into momenta and orthogonalised. With several devices, what others have
    sent, and what is sent back, is there meanwhile: buckets overlap.
    """
    # What variants of the update hold besides (NorMuon, cautious decay) is not counted:
    # a bucket has at most BATCH_ELEMENTS, so that is less than half a GB.
    w, e = case.weight_bytes, case.product_bytes
    worst = 0.0
    for bucket in buckets(case.matrices, case.stage_devices, BATCH_ELEMENTS):
        held = sum(matrix.local_elements for matrix in bucket)
        owned = [matrix for matrix in bucket if matrix.assigned_rank == 0]
        own = _numbers(owned)
        batch = max(
            sum(matrix.local_elements for matrix in bucket if matrix.shape == shape)
            for shape in {matrix.shape for matrix in bucket}
        )
        averaging = w * (held + 2 * batch)  # all gradients, and old and new momenta of one batch
        orthogonalizing = _newton_schulz(case, owned)
        if case.stage_devices == 1:
            peak = max(averaging, w * held + orthogonalizing)
        else:
            there = e * (2 * own + held / _copies(case) if case.sizes.sharded else own)
            home = e * (2 * held + _copies(case) * own)
            peak = there + home + max(averaging, orthogonalizing)
        worst = max(worst, peak)
    return int(worst)


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
