"""Search for the smallest change of the configuration with which a run fits in memory."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, takewhile
from typing import Any

from dtt.base.errors import ConfigError
from dtt.config.parallel import REST
from dtt.estimate.case import Case, make_case
from dtt.estimate.memory import fits

Change = dict[str, Any]
"""New values by key, such as `train.micro_batch`; the key `nodes` stands for `launch.nodes`."""
MOST_NODES = 4096


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
    choices = (_batches(case), _remat(case), _shards(case), _reduce(case), _tensor(case))
    kinds = [list(choice) for choice in choices]
    for kind in kinds:
        yield from kind
    # Now together with the strongest change of every kind before it.
    before: Change = {}
    for kind in kinds:
        for change in kind:
            if before:
                yield before | change
        before |= kind[-1] if kind else {}
    doubled = accumulate(range(12), lambda nodes, _: 2 * nodes, initial=2 * case.nodes)
    for nodes in takewhile(lambda n: n <= MOST_NODES, doubled):
        spread = {"parallel.replicate": 1, "parallel.shard": REST, "nodes": nodes}
        yield spread
        yield before | spread


def _batches(case: Case) -> Iterator[Change]:
    rows = case.micro_batch
    while rows > 1:
        rows //= 2
        yield {"train.micro_batch": rows}


def _remat(case: Case) -> Iterator[Change]:
    kinds = {"none": ("selective", "full"), "selective": ("full",), "full": ()}
    for kind in kinds[case.cfg.train.remat]:
        yield {"train.remat": kind, "train.remat_every": 1}
    if case.cfg.train.remat_every > 1 and case.cfg.train.remat != "none":
        yield {"train.remat_every": 1}


def _shards(case: Case) -> Iterator[Change]:
    if case.sizes.replicate > 1:
        yield {"parallel.replicate": 1, "parallel.shard": REST}


def _reduce(case: Case) -> Iterator[Change]:
    if case.cfg.parallel.reduce == "last":
        yield {"parallel.reduce": "each"}


def _tensor(case: Case) -> Iterator[Change]:
    size = 2 * case.sizes.tensor
    while size <= case.gpus_per_node:
        rest = {"parallel.replicate": 1, "parallel.shard": REST}
        yield rest | {"parallel.tensor": size}
        size *= 2


def described(case: Case, change: Change) -> str:
    """Return the command-line arguments for a change; values that stay the same are left out."""
    now = {"nodes": case.nodes, "train.remat_every": case.cfg.train.remat_every}
    changed = {key: value for key, value in change.items() if now.get(key) != value}
    return " ".join(
        f"{'launch.nodes' if key == 'nodes' else key}={v}" for key, v in changed.items()
    )
