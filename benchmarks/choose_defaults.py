"""Choose the quickstart's defaults by measurement, as planned in benchmarks/choose_defaults.yaml.

    python benchmarks/choose_defaults.py PHASE [--work DIR] [--smoke]

PHASE is a phase of the plan, or `report`, which prints the results so far as Markdown. The novels
are in `$DTT_SHARED/data` (`../shared` by default).

Each run is a `dtt train` job in DIR on one core, as many at a time as there are cores: the loss of
a run depends neither on the number of threads nor on what else the machine does. The phases of
times train one job at a time on all cores; run nothing else meanwhile.

Results are appended to benchmarks/choose_defaults.jsonl, one line for each finished run, which is
never repeated. So a phase that was stopped continues, also in another clone. The first line has the
plan and torch; a phase refuses to continue with others, or with other data. If the source of dtt
has changed, the first run is repeated, and its losses must be the same bit for bit. `--smoke`
trains tiny models for 4 steps on synthetic text, with fewer seeds, and records the results in DIR.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml
from jobs import SHARED_DATA, dtt, make_tokens
from trial_runner import Outcome, Trial, TrialRecord, TrialRunner, git
from trial_statistics import Estimate, main_effects, plackett_burman

from dtt.base import local
from dtt.base.errors import ConfigError, DttError, InputError
from dtt.base.files import exclusive

PLAN = Path(__file__).with_suffix(".yaml")
RECORD = Path(__file__).with_suffix(".jsonl")
TODAY = "today"
ADAMW = "adamw"
Levels = tuple[int, ...]
"""For each factor, -1 (the level of today's defaults) or +1."""


@dataclass(frozen=True)
class Setting:
    """What is trained with each seed of a phase."""

    changes: str
    """What differs from today's settings, in words."""
    overrides: Mapping[str, str]
    """Values of keys."""


@dataclass(frozen=True)
class Plan:
    """The content of choose_defaults.yaml."""

    text: bytes
    smoke: bool

    @cached_property
    def content(self) -> dict[str, Any]:
        """The parsed file; with `smoke`, fewer seeds."""
        content: dict[str, Any] = yaml.safe_load(self.text)
        if self.smoke:
            content["common"] |= content["smoke"]["common"]
            for phase in content["phases"].values():
                phase["seeds"] = phase["seeds"][: content["smoke"]["seeds"]]
                phase["common"] = {}
        return content

    @property
    def sha256(self) -> str:
        """Hash of the file."""
        return hashlib.sha256(self.text).hexdigest()

    @property
    def factors(self) -> list[str]:
        """Names of the factors, in the order of the columns of the design."""
        return list(self.content["factors"])

    @property
    def today(self) -> Levels:
        """The levels of today's defaults."""
        return (-1,) * len(self.factors)

    @property
    def design(self) -> list[Levels]:
        """The settings of the screen: the columns of the design that have a factor."""
        return [row[: len(self.factors)] for row in plackett_burman()]

    def seeds(self, phase: str) -> list[int]:
        """Return the seeds of a phase."""
        return list(self.content["phases"][phase]["seeds"])

    def config(self, phase: str) -> str:
        """Return the name of the configuration of a phase."""
        return str(self.content["phases"][phase]["config"])

    def level(self, factor: str, sign: int, config: str = "quickstart") -> str:
        """Return the text of a level; a configuration may have another one as today's."""
        own = self.content["today"].get(config, {})
        if sign < 0 and factor in own:
            return str(own[factor])
        return str(self.content["factors"][factor]["levels"][sign > 0])

    def setting(self, levels: Levels, config: str = "quickstart") -> Setting:
        """Return the setting with these levels."""
        signs = dict(zip(self.factors, levels, strict=True))
        texts = {factor: self.level(factor, sign, config) for factor, sign in signs.items()}
        changed = [
            " ".join(dict.fromkeys([factor, texts[factor].strip()]))
            for factor, sign in signs.items()
            if sign > 0
        ]
        keys = self.content["settings"].items()
        overrides = {key: str(form).format(**texts) for key, form in keys}
        return Setting(", ".join(changed) or "today's settings", overrides)

    def grid(self, phase: str) -> list[Setting]:
        """Return all combinations of the values in the grid of a phase."""
        axes = self.content["phases"][phase]["grid"]
        points = (
            dict(zip(axes, point, strict=True)) for point in itertools.product(*axes.values())
        )
        return [
            Setting(
                ", ".join(f"{key.removeprefix('optim.')} {value}" for key, value in point.items()),
                {"optim.type": "adamw"} | {key: str(value) for key, value in point.items()},
            )
            for point in points
        ]


class Measurement:
    """All runs of a plan."""

    def __init__(self, plan: Plan, work: Path, record: TrialRecord) -> None:
        self.plan, self.work, self.record = plan, work.absolute(), record

    # ---- what is run ---------------------------------------------------------------------------

    def settings(self, phase: str) -> dict[str, Setting]:
        """Return the settings of a phase by name.

        Raises InputError if an earlier phase, which determines the settings, is not complete.
        """
        plan, config = self.plan, self.plan.config(phase)
        today = {TODAY: plan.setting(plan.today, config)}
        if phase == "screen":
            return {f"row{i:02}": plan.setting(row) for i, row in enumerate(plan.design, 1)}
        if phase == "confirm":
            return today | {n: plan.setting(levels) for n, levels in self.candidates().items()}
        if phase == "transfer":
            better = self.better_candidate()
            return today | {better: plan.setting(self.candidates()[better], config)}
        if phase.startswith("tune-adamw"):
            return {f"point{i:02}": self._scheduled(s) for i, s in enumerate(plan.grid(phase), 1)}
        if phase.startswith("adamw"):
            return {ADAMW: self.tuned_adamw(f"tune-{phase}")}
        if phase == "times":
            return self.settings("confirm") | self.settings("adamw")
        if phase == "times-novels":
            return self.settings("transfer") | self.settings("adamw-novels")
        return today

    def _scheduled(self, setting: Setting) -> Setting:
        """Return a setting of AdamW with the schedule of the better candidate."""
        better = self.plan.setting(self.candidates()[self.better_candidate()]).overrides
        schedule = {key: value for key, value in better.items() if key.startswith("schedule.")}
        return Setting(setting.changes, dict(setting.overrides) | schedule)

    def runs(self, phase: str) -> dict[str, list[Trial]]:
        """Return the runs of a phase by setting, in the order of its seeds."""
        return {
            name: [self._trial(phase, name, setting, seed) for seed in self.plan.seeds(phase)]
            for name, setting in self.settings(phase).items()
        }

    def _trial(self, phase: str, name: str, setting: Setting, seed: int) -> Trial:
        content = self.plan.content
        common = content["common"] | content["phases"][phase].get("common", {})
        values = {"seed": str(seed), **{key: str(value) for key, value in common.items()}}
        # Today's runs of the confirmation are the first of the noise.
        shown = "noise" if (phase, name) == ("confirm", TODAY) else phase
        return Trial(
            f"{shown}/{name}-{seed}", self.plan.config(phase), values | dict(setting.overrides)
        )

    # ---- what came out -------------------------------------------------------------------------

    def outcomes(self, phase: str) -> dict[str, list[Outcome]]:
        """Return the results of a complete phase by setting, in the order of its seeds."""
        try:
            return {
                name: [self.record[trial.name] for trial in trials]
                for name, trials in self.runs(phase).items()
            }
        except KeyError as error:
            raise InputError(
                f"the phase {phase} is not complete: {error.args[0]} has not finished",
                next=f"python benchmarks/choose_defaults.py {phase}",
            ) from None

    def losses(self, phase: str) -> dict[str, list[float]]:
        """Return the last validation losses of a complete phase by setting."""
        return {name: [o.loss for o in each] for name, each in self.outcomes(phase).items()}

    # ---- the rule ------------------------------------------------------------------------------

    def effects(self) -> list[Estimate]:
        """Return the main effects of all columns of the design, in nats."""
        return main_effects(plackett_burman(), list(self.losses("screen").values()))

    def candidates(self) -> dict[str, Levels]:
        """Return the levels of the two settings to confirm, by the rule of the plan."""
        confidence = self.plan.content["confidence"]
        effects = self.effects()[: len(self.plan.factors)]
        lower = tuple(1 if e.value < 0 else -1 for e in effects)
        proven = tuple(1 if e.interval(confidence)[1] < 0 else -1 for e in effects)
        means = [statistics.fmean(losses) for losses in self.losses("screen").values()]
        ranked = [row for _, row in sorted(zip(means, self.plan.design, strict=True))]
        distinct = [s for s in dict.fromkeys([lower, proven, *ranked]) if s != self.plan.today]
        return {"first": distinct[0], "second": distinct[1]}

    def better_candidate(self) -> str:
        """Return the candidate with the lower mean loss in the confirmation."""
        losses = self.losses("confirm")
        return min(self.candidates(), key=lambda name: statistics.fmean(losses[name]))

    def tuned_adamw(self, phase: str) -> Setting:
        """Return the setting of AdamW with the lowest loss in its grid."""
        losses = self.losses(phase)
        return self.settings(phase)[min(losses, key=lambda name: statistics.fmean(losses[name]))]

    # ---- training ------------------------------------------------------------------------------

    def run(self, phase: str) -> None:
        """Train all runs of a phase that have not finished."""
        self.work.mkdir(parents=True, exist_ok=True)
        with exclusive(self.work, "a phase of the measurement"):
            self._check_committed()
            self.record.start({"plan": self.plan.sha256, "torch": metadata.version("torch")})
            config = self.plan.config(phase)
            tokens = self.tokens(config)
            key = json.loads((tokens / "manifest.json").read_text())["key"]
            self.record.start({f"tokens of {config}": key})
            timed = phase.startswith("times")
            threads = local.cores() if timed else 1
            runner = TrialRunner(self.work, self.record, threads)
            if not timed:
                self._check_source(runner)
            # All settings of one seed after another, so that drifts of speed are common to them.
            in_turn = [
                trial for each in zip(*self.runs(phase).values(), strict=True) for trial in each
            ]
            runner.train(in_turn, tokens)

    def _check_source(self, runner: TrialRunner) -> None:
        """Raise ConfigError if the first losses differ with a later source of dtt."""
        if not self.record.sources:
            return
        source = self.record.origin["src"]
        first = self.first_trial()
        again = replace(first, name=f"repeated/{source[:12]}")
        if source not in self.record.sources:
            runner.train([again], self.tokens(first.config))
        if again.name in self.record and not self.repeated_equal(again.name):
            raise ConfigError(
                f"the losses of {again.name} are not those of {first.name}",
                why="since the first run, the source of dtt has changed, and with it its training",
                next="check out the source of the first run, or move the record and "
                f"{self.work} away",
            )

    def first_trial(self) -> Trial:
        """Return the run that was recorded first."""
        name = self.record.lines[1]["run"]
        independent = [self.runs(phase) for phase in ("noise", "screen")]
        trials = [trial for runs in independent for each in runs.values() for trial in each]
        return next(trial for trial in trials if trial.name == name)

    def repeated_equal(self, again: str) -> bool:
        """Return True if all losses of a repetition of the first run are the same bit for bit."""
        return self.record[again].curve == self.record[self.first_trial().name].curve

    def tokens(self, config: str) -> Path:
        """Return the token files of a configuration; create them first if they do not exist."""
        folder = self.work / "data" / config
        tokens = folder / "tokens"
        if not (tokens / "manifest.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            if self.plan.smoke:
                make_tokens(folder)
            else:
                source = ["-d", SHARED_DATA.resolve() / "novels"] if config == "novels" else []
                dtt("download", "-c", config, *source, folder=folder)
                dtt("tokenize", "-c", config, *source, "tokenize.out=tokens", folder=folder)
        return tokens

    def _check_committed(self) -> None:
        files = [str(path) for path in (PLAN, *Path(__file__).parent.glob("*.py"))]
        edited = git("status", "--porcelain", "--", "src", "configs", *files)
        if edited and not self.plan.smoke:
            raise ConfigError(
                "the plan, the scripts or dtt have changes that are not committed",
                why=", ".join(edited.split()[1::2]),
                next="commit them first",
            )


def main(arguments: Sequence[str] | None = None) -> None:
    from defaults_report import report

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("phase", choices=[*yaml.safe_load(PLAN.read_bytes())["phases"], "report"])
    parser.add_argument("--work", type=Path, help="folder of the runs (default: choose-defaults)")
    parser.add_argument("--smoke", action="store_true", help="run 4 steps of tiny models")
    given = parser.parse_args(arguments)
    work = given.work or Path("choose-defaults-smoke" if given.smoke else "choose-defaults")
    plan = Plan(PLAN.read_bytes(), given.smoke)
    record = TrialRecord(work / RECORD.name if given.smoke else RECORD)
    measurement = Measurement(plan, work, record)
    try:
        if given.phase == "report":
            print(report(measurement))
        else:
            measurement.run(given.phase)
    except DttError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
