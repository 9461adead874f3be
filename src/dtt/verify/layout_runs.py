"""Comparison of the layouts of one small configuration with one process, by running them.

Each layout runs three times: four steps; the last three again, from its own first checkpoint, which
must give the same bits; and the last three from the checkpoint of one process, the first of
which has a gradient that is not finite and so must be skipped.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
import yaml

from dtt.artifacts.jobdir import JobDir
from dtt.artifacts.manifest import fingerprint
from dtt.artifacts.manifests import ExportManifest
from dtt.base.errors import DttError, ExitCode
from dtt.checkpoint import store
from dtt.hf import export
from dtt.verify import forked_ranks, recording
from dtt.verify.differences import (
    Checked,
    Difference,
    Records,
    compare,
    compare_checkpoints,
)
from dtt.verify.layouts import REFERENCE, Layout
from dtt.verify.random_text import write_inputs
from dtt.verify.recording import Recorder
from dtt.verify.shrink import SEQUENCES, STEPS, Small

LOGIT_TOLERANCE = 1e-6
"""Largest relative difference between fp32 logits of `transformers` and dtt."""
MARGIN = 100.0
"""Tolerance of rounding, as a multiple of what a second run of the reference shows."""
SKIP = "guard.non_finite=skip"


REFUSED = ExitCode.USAGE, ExitCode.INPUT_MISSING, ExitCode.UNFIT
"""Exit codes of a run that dtt refuses, rather than one that goes wrong."""


class CannotRun(DttError):
    """A run that dtt refuses, so that there is nothing to compare."""

    exit_code = ExitCode.USAGE


def export_job(job: str, out: Path) -> None:
    """Export the newest checkpoint of a job, in a process of its own."""
    export.run(job, [], out=out, upload=None, private=False)


@dataclass
class LayoutRuns:
    """A small configuration with its runs, in a folder of its own."""

    folder: Path
    small: Small
    checks: str = "DLGNURS"
    """Letters of the checks to do; X is a call of its own."""
    inputs: dict[str, Path] = field(default_factory=dict)
    """Folders of inputs that earlier cases have made, which this one adds to."""
    exact: bool = True
    """True in fp64. Otherwise the tolerances follow from a second run of the reference."""
    train: Callable[..., None] = recording.train
    """Function that each rank calls. Tests plant faults there."""
    export: Callable[..., None] = export_job

    def prepare(self) -> None:
        """Write the configuration, its inputs and the job that it starts from, if any."""
        self.folder.mkdir(parents=True)
        self._make_inputs()
        for name, cfg in (("run", self.small.run), ("base", self.small.base)):
            if cfg is not None:
                text = yaml.safe_dump(cfg.model_dump(mode="json"), sort_keys=False)
                (self.folder / f"{name}.yaml").write_text(text)
        if self.small.base is not None:
            self._must_end("base", "base.yaml", [])

    def _make_inputs(self) -> None:
        """Write the token files, or copy them from an earlier case that has the same."""
        small = self.small
        key = fingerprint([c and c.model_dump(mode="json") for c in (small.texts, small.rows)])
        if key in self.inputs:
            shutil.copytree(self.inputs[key], self.folder, dirs_exist_ok=True)
            return
        made = forked_ranks.run(self.folder, 1, write_inputs, small.texts, small.rows, log="inputs")
        if made.code != 0:
            raise CannotRun("the inputs of the comparison cannot be made", why=made.text)
        kept = self.folder.with_name(f"inputs-{len(self.inputs)}")
        shutil.copytree(self.folder, kept)
        self.inputs[key] = kept

    @cached_property
    def reference(self) -> Records:
        """The run of one process, which takes each batch in one pass."""
        found = self._must_end("reference", "run.yaml", [f"train.micro_batch={SEQUENCES}"])
        if self.exact:
            return found
        # The same sums in another order: what it changes is rounding.
        noise = compare(self._must_end("again", "run.yaml", []), found.with_tolerance(math.inf))
        largest = max(noise.noise["U"], noise.noise["N"])
        return found.with_tolerance(MARGIN * largest)

    @cached_property
    def skipping(self) -> Records:
        """The last two steps of one process, the first of which is skipped."""
        job = self._copy(self.reference, "skipping")
        return self._must_end("skipping", "", [job, SKIP], from_step=1, spoilt=2)

    def _must_end(
        self,
        name: str,
        config: str,
        arguments: Sequence[str],
        *,
        from_step: int | None = None,
        spoilt: int | None = None,
    ) -> Records:
        ended = self._start(name, REFERENCE, config, arguments, from_step, spoilt)
        if ended.code != 0:
            raise CannotRun("one process cannot run the small configuration", why=ended.text)
        return self._records(name)

    def check(self, layout: Layout) -> Checked:
        """Run a layout and compare it with the reference."""
        reference, name = self.reference, layout.name.replace(" ", "")
        ended = self._start(name, layout, "run.yaml", [])
        if ended.code != 0:
            return _failed("run", "", ended)
        checked = compare(self._records(name), reference, self.checks)
        if "S" in self.checks and checked.difference is None:
            self._check_resume(layout, name, checked)
            self._check_moves(layout, name, checked)
        return checked

    def _check_resume(self, layout: Layout, name: str, checked: Checked) -> None:
        """Resume after the first step: the same layout must give the same bits."""
        resumed = f"{name}-resumed"
        job = self._copy(self._records(name), resumed)
        ended = self._start(resumed, layout, "", [job], from_step=1)
        if ended.code != 0:
            checked.merge(_failed("S", "resumed after step 1, ", ended))
            return
        found, expected = (self._records(n).checkpoint(STEPS) for n in (resumed, name))
        if self.exact:
            checked.add("S", *_same_bits(found, expected))
        else:  # kernels of a GPU may add in any order
            checked.add("S", *compare_checkpoints("S", found, expected, self.reference, STEPS))

    def _check_moves(self, layout: Layout, name: str, checked: Checked) -> None:
        """Resume on another layout: from one process to this one, and from this one to one.

        The former also has a step that the guard must skip on all ranks.
        """
        moved = f"{name}-moved"
        job = self._copy(self.reference, moved)
        ended = self._start(moved, layout, "", [job, SKIP], from_step=1, spoilt=2)
        what = "resumed from the checkpoint of one process, with a step that is skipped, "
        if ended.code != 0:
            checked.merge(_failed("S", what, ended))
            return
        again = compare(self._records(moved), self.skipping, "DLNUR")
        if again.difference is not None:
            checked.merge(again.as_part_of("S", what))
        alone = f"{name}-alone"
        job = self._copy(self._records(name), alone)
        arguments = [job, *REFERENCE.keys, f"train.micro_batch={SEQUENCES}"]
        ended = self._start(alone, REFERENCE, "", arguments, from_step=1)
        if ended.code != 0:
            checked.merge(_failed("S", "resumed in one process, ", ended))
            return
        last = self._records(alone).checkpoint(STEPS)
        reference = self.reference
        checked.add(
            "S", *compare_checkpoints("S", last, reference.checkpoint(STEPS), reference, STEPS)
        )

    def check_export(self, layout: Layout) -> Checked:
        """Export the job of a layout, and compare its logits with those of `transformers`."""
        checked, name = Checked(), layout.name.replace(" ", "")
        out = self.folder / "export"
        ended = forked_ranks.run(self.folder, 1, self.export, f"jobs/{name}", out, log="export")
        if ended.code == ExitCode.UNFIT:  # transformers is not installed
            return checked
        if ended.code != 0:
            return _failed("X", "the export ", ended)
        size = ExportManifest.read(out).max_logit_difference
        wrong = size > LOGIT_TOLERANCE
        what = f"the logits of transformers differ by up to {size:.1e}"
        checked.add("X", size, Difference("X", what, size) if wrong else None)
        return checked

    def _start(
        self,
        name: str,
        layout: Layout,
        config: str,
        arguments: Sequence[str],
        from_step: int | None = None,
        spoilt: int | None = None,
    ) -> forked_ranks.Ended:
        """Train on a layout; the records are in records/NAME, the job in jobs/NAME."""
        named = [f"name={name}"] if config else []
        keys = [*named, *layout.keys, *arguments]
        recorder = Recorder(self.folder / "records" / name, spoilt)
        arguments_of = (config, keys, from_step, recorder)
        ended = forked_ranks.run(self.folder, layout.ranks, self.train, *arguments_of, log=name)
        if ended.code in REFUSED:
            raise CannotRun(f"dtt refuses to train with {layout.name}", why=ended.text)
        return ended

    def _records(self, name: str) -> Records:
        return Records(JobDir(self.folder / "jobs" / name), self.folder / "records" / name)

    def _copy(self, records: Records, name: str) -> str:
        """Copy a job, to resume it from an earlier step; return the folder of the copy."""
        shutil.copytree(records.job.root, self.folder / "jobs" / name)
        return f"jobs/{name}"


def _failed(check: str, what: str, ended: forked_ranks.Ended) -> Checked:
    how = "hangs" if ended.code is None else f"exits with {ended.code}"
    text = "".join(f"\n  {line}" for line in ended.text.splitlines())
    return Checked({check: 1.0}, Difference(check, f"{what}it {how}:{text}", 1.0))


def _same_bits(
    found: store.Checkpoint, expected: store.Checkpoint
) -> tuple[float, Difference | None]:
    """Compare the bits of everything in two checkpoints."""
    for kind in (store.MODEL, store.STATE):
        ours, theirs = found.tensors(kind), expected.tensors(kind)
        for name in sorted(ours.keys() ^ theirs.keys()):
            return 1.0, Difference("S", f"resumed after step 1, {name} is missing", 1.0)
        for name, value in theirs.items():
            if not torch.equal(ours[name], value):
                what = f"resumed after step 1, the bits of {name} differ"
                return 1.0, Difference("S", what, 1.0, None, (name,))
    ours_at, theirs_at = (c.position() | {"run_id": None, "speed": None} for c in (found, expected))
    for key, value in theirs_at.items():
        if ours_at.get(key) != value:
            what = f"resumed after step 1, `{key}` is {ours_at.get(key)}, not {value}"
            return 1.0, Difference("S", what, 1.0)
    return 0.0, None
