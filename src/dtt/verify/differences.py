"""Comparison of the records of two runs: the checks D, L, G, N, U and R.

The reference is one process. A check returns the largest relative difference that it saw, its
noise, and the first thing that differs by more than rounding in fp64 explains.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from dtt.artifacts.jobdir import JobDir
from dtt.checkpoint import store, tensors
from dtt.checkpoint.store import Checkpoint
from dtt.track import jsonl
from dtt.verify.recording import CLIPPED, GRADIENTS, HELD, HELD_GRADIENTS, ROWS
from dtt.verify.shrink import SEQ_LEN

EXACT: Mapping[str, float] = {"L": 1e-12, "G": 1e-12, "N": 1e-12, "U": 1e-11, "S": 1e-11}
"""Largest relative differences that count as rounding in fp64. Muon's iteration amplifies it."""
FLOOR = 1e-3
"""A tensor is compared relative to its norm, but at least to this share of the norm of all: the
true gradient of some is 0 (a bias of keys), and rounding all that they have."""


@dataclass(frozen=True)
class Difference:
    """The first thing that differs in a check."""

    check: str
    what: str
    """Sentence without its subject's layout, such as `the gradients of norm.weight differ`."""
    size: float
    """Relative difference."""
    ratio: float | None = None
    """What the values of the layout are, in multiples of the reference, if they all are."""
    names: tuple[str, ...] = ()
    """Parameters that differ."""

    def facts(self) -> dict[str, Any]:
        """Return the difference as a JSON object."""
        return asdict(self) | {"size": self.size if math.isfinite(self.size) else None}

    def describe(self) -> str:
        """Return a sentence for a message."""
        ratio = "" if self.ratio is None else f", {self.ratio:.6g} times those of one process"
        return f"{self.what}{ratio} (relative difference {self.size:.1e})"


@dataclass
class Checked:
    """The result of comparing a layout with the reference."""

    noise: dict[str, float] = field(default_factory=dict)
    """Largest relative difference by check; a check that did not run is missing."""
    difference: Difference | None = None

    def add(self, check: str, size: float, difference: Difference | None) -> None:
        """Add what a check found; the first difference counts."""
        self.noise[check] = max(self.noise.get(check, 0.0), size)
        if self.difference is None:
            self.difference = difference

    def merge(self, other: Checked) -> None:
        """Add the result of further checks."""
        for check, size in other.noise.items():
            self.add(check, size, other.difference)

    def as_part_of(self, check: str, what: str) -> Checked:
        """Return the result as that of another check; `what` begins its message."""
        found = self.difference
        size = max(self.noise.values(), default=0.0)
        if found is not None:
            found = replace(found, check=check, what=what + found.what)
        return Checked({check: size}, found)


@dataclass(frozen=True)
class Records:
    """The records of a run: its job directory, and the files of `Recorder`."""

    job: JobDir
    folder: Path
    tolerances: Mapping[str, float] = field(default_factory=lambda: EXACT)
    """Largest relative difference from this run, as the reference, that counts as rounding."""

    def with_tolerance(self, tolerance: float) -> Records:
        """Return the records as a reference for runs that are not in fp64."""
        return replace(self, tolerances=dict.fromkeys(EXACT, tolerance))

    def metrics(self, kind: str, step: int) -> list[dict[str, Any]]:
        """Return the records of a kind and step in metrics.jsonl; step 1 includes step 0."""
        records = (r for r in jsonl.read(self.job.metrics) if r["kind"] == kind)
        return [r for r in records if max(1, r["step"]) == step]

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
            for name, box, digest in json.loads(path.read_text()):
                yield rank, name, str(box), digest


def compare(found: Records, reference: Records, letters: str = "DLGNUR") -> Checked:
    """Compare a run with the reference by the checks of these letters.

    Step by step: what is wrong in the update of a step is in the loss of the next.
    """
    checked = Checked()
    for step in reference.steps:
        for check, compute in CHECKS.items():
            if check in letters and checked.difference is None:
                checked.add(check, *compute(found, reference, step))
    return checked


Found = tuple[float, Difference | None]


def check_data(found: Records, reference: Records, step: int) -> Found:
    """Compare the samples of a step, their order, targets and documents."""
    try:
        theirs, ours = _joined(reference.rows(step)), _joined(found.rows(step))
    except ValueError as error:
        return 1.0, Difference("D", f"step {step}: {error}", 1.0)
    for name, values in theirs.items():
        other = ours.get(name)
        if other is None or other.shape != values.shape:
            same = False
        elif values.is_floating_point():  # computed by the reference model of DPO
            same = _relative(other, values) <= reference.tolerances["U"]
        else:
            same = torch.equal(other, values)
        if not same:
            return 1.0, Difference("D", f"step {step}: the {name} of the samples differ", 1.0)
    return 0.0, None


def _joined(rows: Mapping[int, list[dict[str, Tensor]]]) -> dict[str, Tensor]:
    """Return the samples in the order of the global batch.

    Data-parallel rank r of R has every R-th sample. Ranks that share a batch must have the same.
    """
    for index, ranks in rows.items():
        for other in ranks[1:]:
            if any(not torch.equal(other[name], values) for name, values in ranks[0].items()):
                raise ValueError(f"ranks that share data-parallel rank {index} have other samples")
    first = {index: ranks[0] for index, ranks in rows.items()}
    joined = {"terms": first[0]["terms"]}
    for name in first[0].keys() - {"terms"}:
        # At a shorter context, a sample is several rows.
        parts = [
            part[name].reshape(-1, SEQ_LEN // part[name].shape[1], part[name].shape[1])
            for _, part in sorted(first.items())
        ]
        if len({part.shape for part in parts}) > 1:
            raise ValueError("data-parallel ranks have different numbers of samples")
        joined[name] = torch.stack(parts, dim=1).flatten(0, 2)
    return joined


def check_losses(found: Records, reference: Records, step: int) -> Found:
    """Compare the numbers in the records of training and validation but the norm."""
    worst = 0.0
    for kind in ("train", "eval"):
        ours, theirs = found.metrics(kind, step), reference.metrics(kind, step)
        if len(ours) != len(theirs):
            return 1.0, Difference("L", f"step {step}: there are {len(ours)} {kind} records", 1.0)
        for record, expected in zip(ours, theirs, strict=True):
            for name in sorted(expected.keys() - {"grad_norm"}, key=lambda n: (n != "loss", n)):
                value, true = record.get(name), expected[name]
                # Relative to the loss at least: a margin of two answers may be near 0.
                size = _relative_number(value, true, expected["loss"])
                worst = max(worst, size)
                if size > reference.tolerances["L"]:
                    where = "" if kind == "train" else "validation: "
                    what = f"step {record['step']}: {where}`{name}` is {value}, not {true}"
                    return worst, Difference("L", what, size, _ratio_of_numbers(value, true))
    return worst, None


def check_gradients(found: Records, reference: Records, step: int) -> Found:
    """Compare the gradient of every parameter before clipping."""
    return _recorded("G", "gradients", GRADIENTS, found, reference, step)


def check_norms(found: Records, reference: Records, step: int) -> Found:
    """Compare the global norm, whether the step was skipped, and the clipped gradients."""
    (record,), (expected,) = (r.metrics("train", step) for r in (found, reference))
    value, true = record["grad_norm"], expected["grad_norm"]
    worst = _relative_number(value, true)
    if worst > reference.tolerances["N"] or record.get("skipped") != expected.get("skipped"):
        what = f"step {step}: the gradient norm is {value}, not {true}"
        return worst, Difference("N", what, worst, _ratio_of_numbers(value, true))
    if expected.get("skipped"):
        return worst, None  # under DDP only the rank with the NaN sees it before the guard does
    size, difference = _recorded("N", "clipped gradients", CLIPPED, found, reference, step)
    return max(worst, size), difference


def _recorded(
    check: str, what: str, kind: str, found: Records, reference: Records, step: int
) -> Found:
    ours, theirs = found.tensors(kind, step), reference.tensors(kind, step)
    named = f"step {step}: the {what}"
    return _compare(check, named, ours, theirs, theirs, reference.tolerances[check])


def check_updates(found: Records, reference: Records, step: int) -> Found:
    """Compare the weights and all state of the optimizers in the checkpoint of a step."""
    ours, theirs = found.checkpoint(step), reference.checkpoint(step)
    return compare_checkpoints("U", ours, theirs, reference, step)


def compare_checkpoints(
    check: str, found: Checkpoint, expected: Checkpoint, reference: Records, step: int
) -> Found:
    """Compare two checkpoints of a step; weights relative to the update of the step."""
    weights = expected.tensors(store.MODEL)
    try:
        before = reference.checkpoint(step - 1).tensors(store.MODEL)
    except Exception:  # noqa: BLE001  the first step: the initial weights are in no checkpoint
        before = {name: torch.zeros_like(value) for name, value in weights.items()}
    updates = {name: value - before[name] for name, value in weights.items()}
    tolerance = reference.tolerances[check]
    ours, what = found.tensors(store.MODEL), f"step {step}: the updated weights"
    size, difference = _compare(check, what, ours, weights, updates, tolerance)
    if difference is not None:
        return size, difference
    ours, theirs = (_comparable(c.tensors(store.STATE)) for c in (found, expected))
    worst = size
    for key in sorted({name.rpartition("/")[2] for name in [*ours, *theirs]}):
        of_ours, of_theirs = (
            {name: value for name, value in state.items() if name.rpartition("/")[2] == key}
            for state in (ours, theirs)
        )
        what = f"step {step}: `{key}` of the saved state"
        size, difference = _compare(check, what, of_ours, of_theirs, of_theirs, tolerance)
        worst = max(worst, size)
        if difference is not None:
            return worst, difference
    return worst, None


def _comparable(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state without the random number generators, of which each rank has its own."""
    return {name: value.double() for name, value in state.items() if not name.startswith("rng")}


def check_replicas(found: Records, _reference: Records, step: int) -> Found:
    """Compare the bits of gradients, weights and state that several ranks hold."""
    skipped = found.metrics("train", step)[0].get("skipped")
    for kind, what in ((HELD_GRADIENTS, "the gradient of "), (HELD, "")):
        if kind == HELD_GRADIENTS and skipped:
            continue  # a NaN has no defined bits
        seen: dict[tuple[str, str], tuple[int, str]] = {}
        for rank, name, place, digest in found.held(kind, step):
            if name.startswith("rng"):  # each rank has its own, for dropout
                first, _ = seen.setdefault((digest, ""), (rank, digest))
                if first != rank:
                    why = f"step {step}: ranks {first} and {rank} draw the same random numbers"
                    return 1.0, Difference("R", why, 1.0)
                continue
            first, expected = seen.setdefault((name, place), (rank, digest))
            if digest != expected:
                why = f"step {step}: ranks {first} and {rank} hold different bits of "
                return 1.0, Difference("R", f"{why}{what}{name}", 1.0, None, (name,))
    return 0.0, None


CHECKS: Mapping[str, Callable[[Records, Records, int], Found]] = {
    "D": check_data,
    "L": check_losses,
    "G": check_gradients,
    "N": check_norms,
    "U": check_updates,
    "R": check_replicas,
}


def _compare(
    check: str,
    what: str,
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    scales: Mapping[str, Tensor],
    tolerance: float,
) -> Found:
    """Compare tensors by name; the difference of each is relative to the norm of its `scale`."""
    norms = {name: _norm(_without_nan(scale)) for name, scale in scales.items()}
    floor = FLOOR * math.sqrt(sum(n * n for n in norms.values() if math.isfinite(n)))
    sizes: dict[str, float] = {}
    for name in found.keys() - expected.keys():
        return 1.0, Difference(check, f"{what} include {name}", 1.0, None, (name,))
    for name, value in expected.items():
        if name not in found or found[name].shape != value.shape:
            return 1.0, Difference(check, f"{what} lack {name}", 1.0, None, (name,))
        apart = _norm(_without_nan(found[name]) - _without_nan(value))
        if not torch.equal(found[name].isnan(), value.isnan()):
            apart = math.inf
        size = apart / max(norms[name], floor, 1e-300) if apart else 0.0
        sizes[name] = size if math.isfinite(size) else math.inf
    worst = max(sizes.values(), default=0.0)
    wrong = {name: size for name, size in sizes.items() if size > tolerance}
    if not wrong:
        return worst, None
    ratios = {name: _ratio(found[name], expected[name]) for name in wrong}
    first = max(wrong, key=lambda name: wrong[name])
    others = "" if len(wrong) == 1 else f" and {len(wrong) - 1} of {len(expected) - 1} others"
    named = f"{what} of {first}{others} differ"
    values = [r for r in ratios.values() if r is not None]
    alike = len(values) == len(ratios) and max(values) - min(values) < 1e-6 * abs(max(values))
    return worst, Difference(check, named, worst, values[0] if alike else None, tuple(wrong))


def _without_nan(tensor: Tensor) -> Tensor:
    """Return the tensor in fp64 with 0 for NaN, which the guard's window has before it is full."""
    return torch.nan_to_num(tensor.double(), nan=0.0)


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.double()))


def _ratio(found: Tensor, expected: Tensor) -> float | None:
    """Return r if `found` is r times `expected`, else None."""
    found, expected = found.double().flatten(), expected.double().flatten()
    ratio = float(found @ expected) / max(float(expected @ expected), 1e-300)
    rest = _norm(found - ratio * expected)
    return ratio if rest <= 1e-6 * max(_norm(found), 1e-300) else None


def _relative(found: Tensor, expected: Tensor) -> float:
    return _norm(found - expected) / max(_norm(expected), 1e-300)


def _relative_number(found: Any, expected: Any, scale: float | None = None) -> float:
    """Return the difference of two values relative to the larger of `expected` and `scale`.

    For values that are no numbers it is 0 or 1.
    """
    if found == expected:
        return 0.0
    if not (isinstance(found, float | int) and isinstance(expected, float | int)):
        return 1.0
    return float(abs(found - expected) / max(abs(expected), scale or 0.0, 1e-300))


def _ratio_of_numbers(found: Any, expected: Any) -> float | None:
    numbers = isinstance(found, float | int) and isinstance(expected, float | int)
    return found / expected if numbers and expected else None
