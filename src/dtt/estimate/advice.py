"""Search for the smallest change of the configuration with which a run fits in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dtt.base.errors import ConfigError
from dtt.config.parallel import REST
from dtt.estimate.case import Case, make_case
from dtt.estimate.memory import fits

Change = dict[str, Any]
"""New values by key, such as `train.micro_batch`; the key `nodes` stands for `launch.nodes`."""
MOST_NODES = 4096
REMATS = ("none", "selective", "full")
"""Kinds of recomputation, from the one that keeps most to the one that keeps least."""


def remedy(case: Case) -> Change | None:
    """Return the smallest change with which the run fits by the formulas; None if there is none.

    The candidates, in this order: a smaller micro-batch; selective, then full remat; weights
    sharded over all devices; gradients reduce-scattered after each micro-batch; tensor parallelism
    within a node. Each is tried alone, then each with all of those before it; then twice the nodes,
    four times, and so on, alone and with all of the above.
    """
    for change in _changes(case):
        changed = changed_by(case, change)
        if changed is not None and fits(changed):
            return change
    return None


def changed_by(case: Case, change: Change) -> Case | None:
    """Return the case with a change applied; None if the sizes of the run do not allow it."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in change.items():
        if key != "nodes":
            section, name = key.split(".")
            sections.setdefault(section, {})[name] = value
    update = {
        name: getattr(case.cfg, name).model_copy(update=values) for name, values in sections.items()
    }
    cfg = case.cfg.model_copy(update=update)
    nodes = change.get("nodes", case.nodes)
    vocab_size = case.arch.vocab_size
    try:
        return make_case(cfg, case.gpu, nodes, case.gpus_per_node, vocab_size, case.steps)
    except ConfigError:
        return None


def _changes(case: Case) -> Iterator[Change]:
    cfg, spread = case.cfg, {"parallel.replicate": 1, "parallel.shard": REST}
    rows, tensor, devices = case.micro_batch, case.sizes.tensor, case.gpus_per_node
    stronger = REMATS[REMATS.index(cfg.train.remat) + 1 :]
    remat: list[Change] = [{"train.remat": kind, "train.remat_every": 1} for kind in stronger]
    if cfg.train.remat_every > 1 and cfg.train.remat != "none":
        remat.append({"train.remat_every": 1})
    # Shifts halve a micro-batch down to 1, and double a group of devices up to a node.
    kinds: list[list[Change]] = [
        [{"train.micro_batch": rows >> n} for n in range(1, rows.bit_length())],
        remat,
        [spread] if case.sizes.replicate > 1 else [],
        [{"parallel.reduce": "each"}] if cfg.parallel.reduce == "last" else [],
        [
            spread | {"parallel.tensor": tensor << n}
            for n in range(1, (devices // tensor).bit_length())
        ],
    ]
    for kind in kinds:
        yield from kind
    # Now together with the strongest change of every kind before it.
    before: Change = {}
    for kind in kinds:
        for change in kind:
            if before:
                yield before | change
        before |= kind[-1] if kind else {}
    nodes = 2 * case.nodes
    while nodes <= MOST_NODES:
        yield spread | {"nodes": nodes}
        yield before | spread | {"nodes": nodes}
        nodes *= 2


def described(case: Case, change: Change) -> str:
    """Return the command-line arguments for a change; values that stay the same are left out."""
    now = {"nodes": case.nodes, "train.remat_every": case.cfg.train.remat_every}
    changed = {key: value for key, value in change.items() if now.get(key) != value}
    return " ".join(
        f"{'launch.nodes' if key == 'nodes' else key}={v}" for key, v in changed.items()
    )
