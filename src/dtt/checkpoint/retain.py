"""Which checkpoints stay."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

from dtt.checkpoint import store
from dtt.config.train import CheckpointConfig
from dtt.reading import fits, read_json, retrying, tolerant
from dtt.runtime.files import remove


def kept(folder: Path, rules: CheckpointConfig, diverged: int | None) -> set[int]:
    """Steps that stay: those the rules name, the newest, and the newest of up to step `diverged`.

    `diverged` is the last step with a finite loss before the last one without (None: there was
    none): what is newer may come from weights that were already going astray.
    """
    steps = store.steps(folder)
    keep = set(steps[-rules.keep_last :])
    if rules.keep_every:
        keep |= {step for step in steps if step and step % rules.keep_every == 0}
    if rules.keep_best:
        losses = ((eval_loss(store.folder_of(folder, step)), step) for step in steps)
        scored = sorted((loss, step) for loss, step in losses if math.isfinite(loss))
        keep |= {step for _, step in scored[: rules.keep_best]}
    if diverged is not None:
        keep |= set([step for step in steps if step <= diverged][-1:])
    return keep


def eval_loss(path: Path) -> float:
    """Validation loss of a checkpoint; infinite without an evaluation at its very step."""
    position = tolerant(path / store.POSITION, read_json) or {}
    measured = fits(position, {"evaluated": int, "step": int, "eval_loss": float})
    evaluated = measured and position["evaluated"] == position["step"]
    return float(position["eval_loss"]) if evaluated else math.inf


def prune(folder: Path, rules: CheckpointConfig, diverged: int | None = None) -> list[int]:
    """Delete what need not stay; call only after the newest was verified. Returns the steps."""
    gone = sorted(set(store.steps(folder)) - kept(folder, rules, diverged))
    for step in gone:
        delete(store.folder_of(folder, step))
    return gone


def delete(path: Path) -> None:
    """Delete a checkpoint; renamed first, so that a half-deleted one is never taken for whole."""
    doomed = path.with_name(f"{store.STAGING_PREFIX}{path.name}-pruned")
    path.rename(doomed)
    remove(doomed)


def remove_rejected(folder: Path) -> None:
    """Delete the checkpoints that a newer one has replaced; call once that one is verified."""
    for path in folder.glob(f"{store.STAGING_PREFIX}*{store.REJECTED_SUFFIX}"):
        remove(path)


def sweep_staging(folder: Path) -> None:
    """Delete what interrupted saves and prunings left; call when nobody else writes here."""
    for path in folder.glob(f"{store.STAGING_PREFIX}*"):
        retrying(partial(remove, path))
