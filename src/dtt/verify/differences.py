"""Comparison of the records of two runs: the checks D, L, G, N, U and R.

The reference is one process. A check returns the largest relative difference that it saw, its
noise, and raises `Difference` for the first thing that rounding does not explain.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from dtt.artifacts.jobdir import JobDir
from dtt.checkpoint import store, tensors
from dtt.checkpoint.store import Checkpoint
from dtt.track import jsonl
from dtt.verify.recording import CLIPPED, GRADIENTS, HELD, HELD_GRADIENTS, ROWS, digest
from dtt.verify.shrink import SEQ_LEN

EXACT: Mapping[str, float] = {"L": 1e-12, "G": 1e-12, "N": 1e-12, "U": 1e-11, "S": 1e-11}
"""Largest relative differences that count as rounding in fp64. Muon's iteration amplifies it."""
TINY = 1e-300
"""Divisor in place of 0."""
FLOOR = 1e-3
"""A tensor is compared relative to its norm, but at least to this share of the norm of all: the
true gradient of some is 0 (a bias of keys), and rounding all that they have."""


@dataclass(eq=False)
class Difference(Exception):
    """The first thing that differs."""

    check: str
    """Letter of the check; `run` if a layout does not train to its end."""
    what: str
    """Sentence such as `step 1: the gradients of norm.weight differ`."""
    size: float = 1.0
    """Relative difference; 1 for what is not a number."""
    ratio: float | None = None
    """What the values of the layout are, in multiples of the reference, if they all are."""
    names: tuple[str, ...] = ()
    """Tensors that differ."""

    def facts(self) -> dict[str, Any]:
        """Return the difference as a JSON object."""
        return asdict(self) | {"size": self.size if math.isfinite(self.size) else None}

    def describe(self) -> str:
        """Return a sentence for a message."""
        ratio = "" if self.ratio is None else f", {self.ratio:.6g} times those of one process"
        number = math.isfinite(self.size) and self.size != 1.0
        return self.what + ratio + (f" (relative difference {self.size:.1e})" if number else "")


@contextmanager
def part_of(check: str, what: str) -> Iterator[None]:
    """Report a difference found inside as one of another check; `what` begins its message."""
    try:
        yield
    except Difference as found:
        raise replace(found, check=check, what=what + found.what) from None


@dataclass
class Checked:
    """The result of comparing a layout with the reference."""

    noise: dict[str, float] = field(default_factory=dict)
    """Largest relative difference by check; a check that did not run is missing."""
    difference: Difference | None = None

    def saw(self, check: str, size: float) -> None:
        """Record a relative difference that counts as rounding."""
        self.noise[check] = max(self.noise.get(check, 0.0), size)


@dataclass(frozen=True)
class Records:
    """The records of a run: its job directory, and the files of `Recorder`."""

    job: JobDir
    folder: Path
    tolerances: Mapping[str, float] = field(default_factory=lambda: EXACT)
    """Largest relative difference from this run, as the reference, that counts as rounding."""

    def metrics(self, kind: str, step: int) -> list[dict[str, Any]]:
        """Return the records of a kind and step in metrics.jsonl; step 1 includes step 0.

        The losses of several sources are values of their own, as `losses.NAME`.
        """
        records = (r for r in jsonl.read(self.job.metrics) if r["kind"] == kind)
        return [_flat(r) for r in records if max(1, r["step"]) == step]

    @cached_property
    def steps(self) -> list[int]:
        """The steps that were recorded, in order."""
        return sorted({int(p.name.split("-")[1]) for p in self.folder.glob(f"{GRADIENTS}-*")})

    def tensors(self, kind: str, step: int) -> dict[str, Tensor]:
        """Return recorded tensors, put together from the parts of all ranks."""
        stored = tensors.read(sorted(self.folder.glob(f"{kind}-{step}-*")))
        return {name: one[()] for name, one in stored.items()}

    def checkpoint(self, step: int) -> Checkpoint:
        """Return the checkpoint of a step."""
        return store.at_step(self.job.checkpoints, step)

    def rows(self, step: int) -> dict[int, list[dict[str, Tensor]]]:
        """Return the samples of a step by data-parallel rank: one entry for each of its ranks."""
        found: dict[int, list[dict[str, Tensor]]] = {}
        for path in sorted(self.folder.glob(f"{ROWS}-{step}-*")):
            found.setdefault(int(path.name.split("-")[2]), []).append(load_file(path))
        return found

    def held(self, kind: str, step: int) -> Iterator[tuple[int, str, str, str]]:
        """Yield (rank, name, place, hash) of each part that a rank held after a step."""
        for path in sorted(self.folder.glob(f"{kind}-{step}-*")):
            rank = int(path.name.split("-")[2])
            for name, box, bits in json.loads(path.read_text()):
                yield rank, name, str(box), bits


def _flat(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record with the values of its objects one level up."""
    flat: dict[str, Any] = {}
    for name, value in record.items():
        inner = value.items() if isinstance(value, dict) else [("", value)]
        flat |= {f"{name}.{key}".rstrip("."): one for key, one in inner}
    return flat


def compare(found: Records, reference: Records, checked: Checked, letters: str) -> None:
    """Compare a run with the reference by the checks of these letters; raise `Difference`.

    Step by step: what is wrong in the update of a step is in the loss of the next.
    """
    for step in reference.steps:
        for check, compute in CHECKS.items():
            if check in letters:
                checked.saw(check, compute(found, reference, step))


def check_data(found: Records, reference: Records, step: int) -> float:
    """Compare the samples of a step, their order, targets and documents."""
    ours, theirs = _joined(found.rows(step), step), _joined(reference.rows(step), step)
    for name, values in theirs.items():
        other = ours.get(name)
        if other is None or other.shape != values.shape:
            same = False
        elif values.is_floating_point():  # computed by the reference model of DPO
            same = _norm(other - values) <= reference.tolerances["U"] * _norm(values)
        else:
            same = torch.equal(other, values)
        if not same:
            raise Difference("D", f"step {step}: the {name} of the samples differ")
    return 0.0


def _joined(rows: Mapping[int, list[dict[str, Tensor]]], step: int) -> dict[str, Tensor]:
    """Return the samples in the order of the global batch.

    Data-parallel rank r of R has every R-th sample. Ranks that share a batch must have the same.
    """
    for index, ranks in rows.items():
        for other in ranks[1:]:
            if any(not torch.equal(other[name], values) for name, values in ranks[0].items()):
                why = f"ranks that share data-parallel rank {index} have different samples"
                raise Difference("D", f"step {step}: {why}")
    first = [ranks[0] for _, ranks in sorted(rows.items())]
    joined = {"terms": first[0]["terms"]}
    for name in [name for name in first[0] if name != "terms"]:
        # At a shorter context, a sample is several rows.
        parts = [
            rank[name].reshape(-1, SEQ_LEN // rank[name].shape[1], rank[name].shape[1])
            for rank in first
        ]
        if len({part.shape for part in parts}) > 1:
            raise Difference("D", f"step {step}: ranks have different numbers of samples")
        joined[name] = torch.stack(parts, dim=1).flatten(0, 2)
    return joined


def check_losses(found: Records, reference: Records, step: int) -> float:
    """Compare the numbers in the records of training and validation but the norm."""
    worst = 0.0
    for kind in ("train", "eval"):
        ours, theirs = found.metrics(kind, step), reference.metrics(kind, step)
        if len(ours) != len(theirs):
            raise Difference("L", f"step {step}: there are {len(ours)} {kind} records")
        for record, expected in zip(ours, theirs, strict=True):
            named = f"step {record['step']}: {'' if kind == 'train' else 'validation: '}"
            for name in sorted(expected.keys() - {"grad_norm"}, key=lambda n: (n != "loss", n)):
                # Relative to the loss at least: a margin of two answers may be near 0.
                pair, scale = (record.get(name), expected[name]), expected["loss"]
                limit = reference.tolerances["L"]
                worst = max(worst, _compare_numbers("L", f"{named}`{name}`", *pair, limit, scale))
    return worst


def check_norms(found: Records, reference: Records, step: int) -> float:
    """Compare the global norm, whether the step was skipped, and the clipped gradients."""
    (record,), (expected,) = (r.metrics("train", step) for r in (found, reference))
    if record.get("skipped") != expected.get("skipped"):
        raise Difference(
            "N", f"step {step}: it is {'' if record.get('skipped') else 'not '}skipped"
        )
    norms, limit = (record["grad_norm"], expected["grad_norm"]), reference.tolerances["N"]
    size = _compare_numbers("N", f"step {step}: the gradient norm", *norms, limit)
    if expected.get("skipped"):
        return size  # under DDP only the rank with the NaN sees it before the guard does
    return max(size, check_gradients(found, reference, step, "N", CLIPPED))


def check_gradients(
    found: Records, reference: Records, step: int, check: str = "G", kind: str = GRADIENTS
) -> float:
    """Compare the gradient of every parameter, before clipping or as clipped."""
    ours, theirs = found.tensors(kind, step), reference.tensors(kind, step)
    named = f"step {step}: the {'clipped ' if kind == CLIPPED else ''}gradients"
    return _compare(check, named, ours, theirs, theirs, reference.tolerances[check])


def compare_checkpoints(check: str, found: Records, reference: Records, step: int) -> float:
    """Compare the checkpoints of a step, weights relative to the update of the step."""
    limit, at = reference.tolerances[check], f"step {step}: "
    ours, theirs = (records.checkpoint(step).tensors(store.MODEL) for records in (found, reference))
    # The initial weights are in no checkpoint: the weights of step 1 are compared as such.
    before = reference.checkpoint(step - 1).tensors(store.MODEL) if step > 1 else {}
    updates = {name: value - before.get(name, 0.0) for name, value in theirs.items()}
    worst = _compare(check, f"{at}the updated weights", ours, theirs, updates, limit)
    # By kind, such as `exp_avg`. Each rank has a random number generator of its own.
    states: list[dict[str, dict[str, Tensor]]] = [{}, {}]
    for state, records in zip(states, (found, reference), strict=True):
        for path, value in records.checkpoint(step).tensors(store.STATE).items():
            if not path.startswith("rng"):
                state.setdefault(path.rpartition("/")[2], {})[path] = value
    for key in sorted(states[0].keys() | states[1].keys()):
        ours, theirs = (state.get(key, {}) for state in states)
        what = f"{at}`{key}` of the saved state"
        worst = max(worst, _compare(check, what, ours, theirs, theirs, limit))
    return worst


def check_replicas(found: Records, _reference: Records, step: int) -> float:
    """Compare the bits of gradients, weights and state that several ranks hold."""
    at = f"step {step}: ranks"
    skipped = found.metrics("train", step)[0].get("skipped")
    for kind, what in ((HELD_GRADIENTS, "the gradient of "), (HELD, "")):
        if kind == HELD_GRADIENTS and skipped:
            continue  # a NaN has no defined bits
        seen: dict[tuple[str, str], tuple[int, str]] = {}
        for rank, name, place, bits in found.held(kind, step):
            if name.startswith("rng"):  # each rank has its own, for dropout
                first, _ = seen.setdefault((bits, ""), (rank, bits))
                if first != rank:
                    raise Difference("R", f"{at} {first} and {rank} draw the same random numbers")
                continue
            first, expected = seen.setdefault((name, place), (rank, bits))
            if bits != expected:
                why = f"{at} {first} and {rank} hold different bits of {what}{name}"
                raise Difference("R", why, names=(name,))
    return 0.0


CHECKS: Mapping[str, Callable[[Records, Records, int], float]] = {
    "D": check_data,
    "L": check_losses,
    "G": check_gradients,
    "N": check_norms,
    "U": partial(compare_checkpoints, "U"),
    "R": check_replicas,
}


def compare_bits(found: Checkpoint, expected: Checkpoint) -> None:
    """Compare the bits of everything in two checkpoints."""
    for kind in (store.MODEL, store.STATE):
        ours, theirs = found.tensors(kind), expected.tensors(kind)
        for name in sorted(ours.keys() | theirs.keys()):
            # Not torch.equal, for which a NaN differs from itself.
            if not {name} <= ours.keys() & theirs.keys() or digest(ours[name]) != digest(
                theirs[name]
            ):
                raise Difference("S", f"the bits of {name} differ", names=(name,))
    ours_at, theirs_at = (c.position() | {"run_id": None, "speed": None} for c in (found, expected))
    for key, value in theirs_at.items():
        if ours_at.get(key) != value:
            raise Difference("S", f"`{key}` is {ours_at.get(key)}, not {value}")


def _compare(
    check: str,
    what: str,
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    scales: Mapping[str, Tensor],
    tolerance: float,
) -> float:
    """Compare tensors by name; the difference of each is relative to the norm of its `scale`."""
    for name in sorted(found.keys() ^ expected.keys()):
        verb = "include" if name in found else "lack"
        raise Difference(check, f"{what} {verb} {name}", names=(name,))
    norms = {name: _norm(scale) for name, scale in scales.items()}
    floor = FLOOR * math.sqrt(sum(n * n for n in norms.values() if math.isfinite(n)))
    sizes = {}
    for name, value in expected.items():
        ours, theirs = found[name].double(), value.double()
        # Infinitely far apart where only one has a NaN.
        same_nans = ours.shape == theirs.shape and torch.equal(ours.isnan(), theirs.isnan())
        apart = _norm(ours - theirs) if same_nans else math.inf
        sizes[name] = apart / max(norms[name], floor, TINY)
    worst = max(sizes.values(), default=0.0)
    wrong = {name: size for name, size in sizes.items() if size > tolerance}
    if not wrong:
        return worst
    first = max(wrong, key=lambda name: wrong[name])
    others = "" if len(wrong) == 1 else f" and {len(wrong) - 1} of {len(expected) - 1} others"
    ratios = {_ratio(found[name], expected[name]) for name in wrong}
    ratio = ratios.pop() if len(ratios) == 1 else None
    raise Difference(check, f"{what} of {first}{others} differ", worst, ratio, tuple(wrong))


def _norm(tensor: Tensor) -> float:
    """Return the norm of the tensor, without the NaN of the guard's window before it is full."""
    return float(torch.linalg.vector_norm(torch.nan_to_num(tensor.double(), nan=0.0)))


def _ratio(found: Tensor, expected: Tensor) -> float | None:
    """Return r, rounded to six digits, if `found` is r times `expected`; else None."""
    found, expected = found.double().flatten(), expected.double().flatten()
    if found.shape != expected.shape:
        return None
    ratio = float(found @ expected) / max(float(expected @ expected), TINY)
    rest = _norm(found - ratio * expected)
    return float(f"{ratio:.6g}") if rest <= 1e-6 * max(_norm(found), TINY) else None


def _compare_numbers(
    check: str, what: str, found: Any, expected: Any, tolerance: float, scale: float | None = None
) -> float:
    """Compare two values of records, relative to the larger of `expected` and `scale`."""
    if found == expected:
        return 0.0
    numbers = isinstance(found, float | int) and isinstance(expected, float | int)
    size = abs(found - expected) / max(abs(expected), scale or 0.0, TINY) if numbers else 1.0
    if size > tolerance:
        ratio = found / expected if numbers and expected else None
        raise Difference(check, f"{what} is {found}, not {expected}", size, ratio)
    return float(size)
