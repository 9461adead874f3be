"""Bytes of optimizer state and of checkpoints."""

from __future__ import annotations

from math import prod

from dtt.estimate.case import FP32, Case, Weight
from dtt.optim import eight_bit
from dtt.optim.built import OWN


def optimizer_state(case: Case) -> int:
    """Return the bytes of optimizer state on one device.

    AdamW keeps two moments per weight, Muon one, NorMuon another number per row, and hyperball the
    norm of a matrix in each row. A moment of 8 bits is a byte per weight and a scale per block of a
    row. That of an optimizer of a user's own is measured.
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
    if case.muon is None:
        return 0
    return (case.muon.normuon_beta2 is not None) + (case.muon.scale == "hyperball")


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
