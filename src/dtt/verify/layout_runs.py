"""Comparison of the layouts of one small configuration with one process, by running them.

Each layout runs three times: four steps; the last three again, from its own first checkpoint, which
must give the same bits; and the last three from the checkpoint of one process, the first of
which has a gradient that is not finite and so must be skipped.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from dtt.artifacts.jobdir import JobDir
from dtt.artifacts.manifests import ExportManifest
from dtt.base.errors import DttError, ExitCode
from dtt.base.files import write_atomically
from dtt.config.key_types import tag_of
from dtt.config.own import kept_files
from dtt.config.run import RunConfig
from dtt.hf import export
from dtt.verify import forked_ranks, recording
from dtt.verify.differences import (
    EXACT,
    Checked,
    Difference,
    Records,
    compare,
    compare_bits,
    compare_checkpoints,
    part_of,
)
from dtt.verify.layouts import REFERENCE, Layout
from dtt.verify.random_text import write_inputs
from dtt.verify.recording import Recorder
from dtt.verify.shrink import SEQUENCES, STEPS, Small

LOGIT_TOLERANCE = 1e-6
"""Largest relative difference between fp32 logits of `transformers` and dtt."""
MARGIN = 10.0
"""Tolerance of rounding where it is not fp64, as a multiple of what another order of sums shows."""
MOST = 0.1
"""Largest relative difference between the gradients of two runs of one process: beyond, they are
random, as with dropout."""
SKIPPED = 2
"""Step that has a NaN in the runs that skip a step."""
REFUSED = ExitCode.USAGE, ExitCode.INPUT_MISSING, ExitCode.UNFIT
"""Exit codes of a run that dtt refuses, rather than one that goes wrong."""


class CannotRun(DttError):
    """A run that dtt refuses, so that there is nothing to compare."""

    exit_code = ExitCode.USAGE


def export_job(job: str, out: Path) -> None:
    """Export the newest checkpoint of a job, in a process of its own."""
    export.run(job, [], out=out, upload=None, private=False)


def tolerances(noise: Mapping[str, float]) -> dict[str, float]:
    """Return the largest differences that count as rounding, from those of two runs alone.

    Two runs may be equal by chance: a loss of another layout then differs in its last bit.
    """
    found = {name: max(least, MARGIN * noise.get(name, 0.0)) for name, least in EXACT.items()}
    return found | {"S": max(found["S"], found["U"])}


def write_configurations(folder: Path, configs: Mapping[str, RunConfig | None]) -> list[str]:
    """Write configurations and the files of their own classes; return the names of the former."""
    given = {f"{name}.yaml": cfg for name, cfg in configs.items() if cfg is not None}
    for name, cfg in given.items():
        text = yaml.safe_dump(cfg.model_dump(mode="json"), sort_keys=False)
        (folder / name).write_text(text)
        for path, content in kept_files(cfg, folder).items():
            write_atomically(path, content)
    return list(given)


@dataclass
class LayoutRuns:
    """A small configuration with its runs, in a folder of its own."""

    folder: Path
    small: Small
    checks: str = "DLGNURS"
    """Letters of the checks to do; X is a call of its own."""
    exact: bool = True
    """True in fp64. Otherwise the tolerances follow from a second run of the reference."""
    train: Callable[..., None] = recording.train
    """Function that each rank calls. Tests plant faults there."""
    export: Callable[..., None] = export_job

    def prepare(self) -> None:
        """Write the configuration, its inputs and the job that it starts from, if any."""
        self.folder.mkdir(parents=True)
        inputs = write_configurations(
            self.folder, {"texts": self.small.texts, "rows": self.small.rows}
        )
        made = forked_ranks.run(self.folder, 1, write_inputs, inputs, log="inputs")
        if made.code != 0:
            raise CannotRun("the inputs of the comparison cannot be made", why=made.text)
        write_configurations(self.folder, {"run": self.small.run, "base": self.small.base})
        if self.small.base is not None:
            self._run_alone("base", config="base.yaml")

    @cached_property
    def reference(self) -> Records:
        """The run of one process, which takes each batch in one pass."""
        found = self._run_alone("reference", config="run.yaml")
        # Some classes of transformers compute routers and norms in fp32, whatever the dtype.
        if self.exact and tag_of(self.small.run.model) != "transformers":
            return found
        # The same sums in another order: what it changes is rounding.
        noise, again = Checked(), self._run("again", config="run.yaml")
        anything = dict.fromkeys(EXACT, math.inf)
        compare(again, replace(found, tolerances=anything), noise, "LGNU")
        if (size := noise.noise.get("G", 0.0)) > MOST:
            # With such tolerances, any layout would pass.
            raise CannotRun(
                "two runs of one process differ, so no layout can be compared with them",
                why=f"gradients differ by {size:.0e} of their norm, which is no rounding",
                next="turn dropout off: the log of a run names its keys, such as "
                "model.config.attention_dropout=0.0",
            )
        return replace(found, tolerances=tolerances(noise.noise))

    @cached_property
    def skipping(self) -> Records:
        """The last three steps of one process, the first of which is skipped."""
        found = self._run_alone("skipping", resume=self.reference, skip=True)
        return replace(found, tolerances=self.reference.tolerances)

    def check(self, layout: Layout) -> Checked:
        """Run a layout and compare it with the reference."""
        checked = Checked()
        try:
            self._check(layout, checked)
        except Difference as found:
            checked.difference = found
        return checked

    def _check(self, layout: Layout, checked: Checked) -> None:
        reference, name = self.reference, layout.name.replace(" ", "")
        run = self._run(name, layout, config="run.yaml")
        compare(run, reference, checked, self.checks)
        if "S" not in self.checks:
            return
        with part_of("S", "resumed after step 1: "):
            again = self._run(f"{name}-resumed", layout, resume=run)
            if self.exact:
                compare_bits(again.checkpoint(STEPS), run.checkpoint(STEPS))
            else:  # kernels of a GPU may add in any order
                compare_checkpoints("S", again, reference, STEPS)
        # Both ways between layouts. The ranks must also agree on a step with a NaN on one of them.
        with part_of("S", "resumed from one process, with a step that is skipped: "):
            moved = self._run(f"{name}-moved", layout, resume=reference, skip=True)
            noise = Checked()
            compare(moved, self.skipping, noise, "DLNUR")
            checked.saw("S", max(noise.noise.values()))
        with part_of("S", "resumed in one process: "):
            alone = self._run(f"{name}-alone", resume=run, one_pass=True)
            checked.saw("S", compare_checkpoints("S", alone, reference, STEPS))

    def check_export(self, layout: Layout, checked: Checked) -> None:
        """Export the job of a layout, and compare its logits with those of `transformers`."""
        job, out = f"jobs/{layout.name.replace(' ', '')}", self.folder / "export"
        ended = forked_ranks.run(self.folder, 1, self.export, job, out, log="export")
        if ended.code == ExitCode.UNFIT:  # transformers is not installed
            return
        size = math.inf if ended.code else ExportManifest.read(out).max_logit_difference
        if size > LOGIT_TOLERANCE:
            what = ended.text if ended.code else "the logits of transformers differ"
            checked.difference = Difference("X", what, size)
        checked.saw("X", size)

    def _run_alone(self, name: str, **how: Any) -> Records:
        """Train in one process; raise CannotRun if it fails: then there is no reference."""
        try:
            return self._run(name, one_pass=True, **how)
        except Difference as found:
            raise CannotRun("one process cannot train", why=found.what) from None

    def _run(
        self,
        name: str,
        layout: Layout = REFERENCE,
        *,
        config: str = "",
        resume: Records | None = None,
        one_pass: bool = False,
        skip: bool = False,
    ) -> Records:
        """Train on a layout, from the start or from step 1 of another run; return the records.

        With `one_pass`, a batch is one micro-batch. With `skip`, step 2 has a NaN and is skipped.
        Raises `Difference` if it fails, and CannotRun if dtt refuses it.
        """
        keys = [f"parallel.{key}={value}" for key, value in layout.section.items()]
        keys.append(f"train.micro_batch={SEQUENCES if one_pass else 1}")
        if resume is None:
            keys.append(f"name={name}")
        else:
            shutil.copytree(resume.job.root, self.folder / "jobs" / name)
            keys.append(f"jobs/{name}")
        if skip:
            keys.append("guard.non_finite=skip")
        recorder = Recorder(self.folder / "records" / name, SKIPPED if skip else None)
        arguments = (config, keys, None if resume is None else 1, recorder)
        ended = forked_ranks.run(self.folder, layout.ranks, self.train, *arguments, log=name)
        if ended.code in REFUSED:
            raise CannotRun(f"dtt refuses to train with {layout.name}", why=ended.text)
        if ended.code != 0:
            how = "hangs" if ended.code is None else f"exits with {ended.code}"
            raise Difference("run", f"training {how}: {ended.text}")
        return Records(JobDir(self.folder / "jobs" / name), self.folder / "records" / name)
