"""Random configurations that live a whole life: trained, resumed, evaluated, sampled, exported.

tests/verify/nightly_random.py compares layouts in fp64. This asks another question: does whatever
the check of a configuration accepts also work, in the precision and on the layout it asks for? A
combination is either refused before the first step, as a mistake of the user, or every command ends
well and a resume gives the bits of the uninterrupted run.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import ConfigError, ExitCode
from dtt.checkpoint import store
from dtt.config.run import RunConfig
from dtt.config.validation import validate
from dtt.track import jsonl
from dtt.verify import forked_ranks
from dtt.verify.differences import Difference, compare_bits
from dtt.verify.layout_runs import write_configurations
from dtt.verify.layouts import reduced_layout
from dtt.verify.random_text import write_inputs
from dtt.verify.shrink import SEQUENCES, STEPS, Small, shrink
from support import forked_runs, random_configurations
from support.local_tasks import write_tasks
from support.running import Done, Dtt

RESUMED = 2
"""Step whose checkpoint the second run starts from: after the warm-up, before the decay."""
PRECISIONS: tuple[tuple[str, ...], ...] = (
    ("train.precision=fp32",), ("train.precision=fp32",),
    ("train.precision=bf16",), ("train.precision=bf16",),
    ("train.precision=bf16-pure",),
    ("train.precision=bf16-pure", "train.stochastic_rounding=true"),
)  # fmt: skip
TASKS = ["tasks/sums.yaml", "tasks/replies.yaml"]
REFUSED = ExitCode.USAGE, ExitCode.UNFIT
"""Exit codes of a combination that dtt refuses by name."""
SECONDS = ("seconds", "tokens_per_second", "mfu", "time", "memory", "wait", "speed")
"""Parts of the names of metrics that a resumed run need not repeat."""


class Broken(AssertionError):
    """A combination that was accepted and does not work."""


def draws(seed: int) -> Iterator[tuple[str, RunConfig]]:
    """Yield random configurations that the check accepts, of four features and a precision."""
    source = random.Random(seed)
    for arguments, cfg in random_configurations.configurations(seed, counts=(4,)):
        values = cfg.model_dump(mode="json")
        precision = source.choice(PRECISIONS)
        for argument in precision:
            key, value = argument.removeprefix("train.").split("=")
            values["train"][key] = {"true": True}.get(value, value)
        accepted, _ = validate(RunConfig, json.loads(json.dumps(values)))
        if accepted is not None:
            yield f"{arguments} {' '.join(precision)}", accepted


@dataclass(frozen=True)
class Life:
    """One configuration, small enough to run, in a folder of its own."""

    folder: Path
    small: Small
    run: RunConfig
    ranks: int

    @classmethod
    def of(cls, cfg: RunConfig, folder: Path, inputs: dict[str, Path]) -> Life:
        """Prepare the inputs, which are copied from an earlier life with the same ones."""
        small = shrink(cfg, exact=False)
        layout = reduced_layout(cfg)
        values = small.run.model_dump(mode="json")
        values["parallel"] |= layout.section
        values["train"] |= {
            # A batch of two micro-batches on each data-parallel rank.
            "micro_batch": max(1, SEQUENCES // (2 * layout.sizes.replicate * layout.sizes.shard)),
            "device": "cpu", "compile": False,
            "eval_every": 2, "eval_tokens": 512, "eval_answers": 2, "eval_answer_tokens": 4,
            "sample_every": 2, "sample_tokens": 4,
            "precision": cfg.train.precision, "stochastic_rounding": cfg.train.stochastic_rounding,
        }  # fmt: skip
        values["eval"] = {"tasks": TASKS, "every": 2, "batch_tokens": 1024}
        run, problems = validate(RunConfig, json.loads(json.dumps(values)))
        if run is None:
            raise ConfigError(f"the small configuration is refused: {problems}")
        life = cls(folder, small, run, layout.ranks)
        life._write(inputs)
        return life

    def _write(self, inputs: dict[str, Path]) -> None:
        small = self.small
        key = json.dumps([c and c.model_dump(mode="json") for c in (small.texts, small.rows)])
        if key not in inputs:
            made = self.folder.with_name(f"inputs-{len(inputs)}")
            made.mkdir(parents=True)
            named = write_configurations(made, {"texts": small.texts, "rows": small.rows})
            ended = forked_ranks.run(made, 1, write_inputs, named, log="inputs")
            assert ended.code == 0, ended.text
            inputs[key] = made
        shutil.copytree(inputs[key], self.folder)
        write_tasks(self.folder / "tasks", 2)
        write_configurations(self.folder, {"run": self.run, "base": small.base})

    def live(self) -> str | None:
        """Run all commands. Return why dtt refused the combination, or None; raise Broken."""
        if self.small.base is not None:
            self._command("train", "-c", "base.yaml")
        done = self._start("train", "-c", "run.yaml", "name=run")
        if done.returncode in REFUSED:
            if (self.folder / "jobs/run/metrics.jsonl").exists():
                raise Broken(f"refused after the start:\n{done.stderr[-2000:]}")
            return _refusal(done)
        self._check(done, "train")
        self._resume()
        self._command("eval", "jobs/run")
        self._command("generate", "jobs/run", "-p", "ab cd", "--max-new-tokens", "4")
        self._command("export", "jobs/run", "--out", "export", "export.dtype=fp32")
        return None

    def _resume(self) -> None:
        """Resume a copy of the job, as it was after an earlier step, and compare the bits."""
        shutil.copytree(self.folder / "jobs/run", self.folder / "jobs/again")
        self._check(self._start("train", "jobs/again", "--from-step", RESUMED), "resume")
        whole, again = (JobDir(self.folder / "jobs" / name) for name in ("run", "again"))
        try:
            compare_bits(*(store.at_step(j.checkpoints, STEPS) for j in (again, whole)))
        except Difference as found:
            raise Broken(f"the resumed run differs: {found}") from None
        for old, new in zip(_records(whole), _records(again), strict=True):
            if old != new:
                changed = {k for k in old.keys() | new.keys() if old.get(k) != new.get(k)}
                raise Broken(f"records of the resumed run differ in {changed}:\n{old}\n{new}")

    def _command(self, *arguments: object) -> None:
        self._check(self._start(*arguments, ranks=1), str(arguments[0]))

    def _start(self, *arguments: object, ranks: int = 0) -> Done:
        return forked_runs.start(Dtt(self.folder), *arguments, ranks=ranks or self.ranks).wait()

    @staticmethod
    def _check(done: Done, what: str) -> None:
        if done.returncode or "Traceback" in done.stderr:
            raise Broken(f"{what} exits with {done.returncode}:\n{done.stderr[-3000:]}")


def _refusal(done: Done) -> str:
    """Return the message of a refusal, which names the reason and no bug."""
    lines = done.stderr.splitlines()
    # The other ranks only say that one has ended.
    messages = [i for i, line in enumerate(lines) if line.startswith("dtt: ")]
    first = next((i for i in messages if "another" not in lines[i]), None)
    if first is None or "bug" in done.stderr:
        raise Broken(f"refused without a message:\n{done.stderr[-2000:]}")
    return "\n".join(lines[first : first + 4])


def _records(job: JobDir) -> list[Mapping[str, Any]]:
    """Return the records of the steps after the resume, without times."""
    return [
        {k: v for k, v in record.items() if not any(part in k for part in SECONDS)}
        for record in jsonl.read(job.metrics)
        if record.get("step", 0) > RESUMED and record["kind"] in ("train", "eval")
    ]
