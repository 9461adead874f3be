"""Recipe files: what a benchmark trains, on which data, and how its runs are scored."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, PositiveFloat, PositiveInt

from dtt.artifacts.manifest import fingerprint
from dtt.base.errors import ConfigError, InputError
from dtt.config import explain, load, source, validation
from dtt.config.base import Section
from dtt.config.run import NAME

Text = Annotated[str, Field(min_length=1)]
METRIC = r"^(eval\.(loss|bits_per_byte)|task\.([\w-]+|\*)\.\w+)$"
MOST_FILES = 10_000
BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")


class PublishedTokens(Section):
    """Token files in the format of llm.c that are published as a dataset on the Hub."""

    repo: Text
    """Dataset repository, such as `kjj0/fineweb10B-gpt2`."""
    revision: str | None = None
    """Branch, tag or commit; null: the main branch at the first download."""
    files: Annotated[tuple[Text, ...], Field(min_length=1)]
    """Names of the files; `{000001..000103}` stands for all numbers from 1 to 103. A file whose
    name contains `val` is held out."""
    tokenizer: Text
    """Model on the Hub whose tokenizer made the files."""
    folder: Path
    """Folder to download to."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield an error for names that are not those of files in `folder`."""
        try:
            names = self.names()
        except ValueError as error:
            yield "files", str(error)
            return
        wrong = [name for name in names if not re.fullmatch(rf"{NAME}\.bin", name)]
        if wrong:
            yield "files", f"must be names of .bin files without folders, got {wrong[0]!r}"
        if len(set(names)) < len(names):
            yield "files", "a name appears twice"

    def names(self) -> list[str]:
        """Return the names of all files. Raise ValueError for more than MOST_FILES."""
        names: list[str] = []
        for pattern in self.files:
            found = BRACES.search(pattern)
            if found is None:
                names.append(pattern)
                continue
            first, last, digits = int(found[1]), int(found[2]), len(found[1])
            if not 0 < last - first + 1 <= MOST_FILES:
                raise ValueError(f"{found[0]} must name between 1 and {MOST_FILES:,} files")
            names += [BRACES.sub(f"{n:0{digits}}", pattern, 1) for n in range(first, last + 1)]
        return names


class ScoreRule(Section):
    """The metric of a recipe's runs, and the target that they must reach, if there is one."""

    metric: Annotated[str, Field(pattern=METRIC)]
    """`eval.loss`, `eval.bits_per_byte`, or `task.NAME.METRIC`. With `*` as NAME, it is the mean
    over all benchmark tasks of the run."""
    label: Text
    """Name of the metric in tables."""
    goal: Literal["min", "max"] = "min"
    """Direction of the metric: `min` if lower is better."""
    target: FiniteFloat | None = None
    """Value at which a run is stopped. The steps, tokens and seconds of training up to the
    evaluation that reaches it are the score. null: a run ends with its schedule, and the value of
    its last evaluation is the score."""
    margin: PositiveFloat | None = None
    """Significance threshold of the mean of n runs: (target - mean) * sqrt(n) >= margin. null: the
    95 % confidence interval of the mean must lie beyond the target."""
    beside: tuple[Annotated[str, Field(pattern=METRIC)], ...] = ()
    """Further metrics of the same evaluation that are recorded."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield an error for a margin without a target."""
        if self.margin is not None and self.target is None:
            yield "margin", "needs a target"

    def reached(self, value: float) -> bool:
        """Return True if a value reaches the target; False without a target."""
        if self.target is None:
            return False
        return value <= self.target if self.goal == "min" else value >= self.target


class ReferencePoint(Section):
    """A published result to compare with."""

    name: Text
    value: FiniteFloat
    unit: Text
    hardware: Text
    date: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")]
    source: Annotated[str, Field(pattern=r"^https://")]


class Recipe(Section):
    """The contents of a recipe file."""

    description: Text
    """What is measured, in one line."""
    needs: Text
    """Data to download and suitable hardware, in one line."""
    config: Text
    """Configuration to train, as `-c` takes it."""
    overrides: tuple[str, ...] = ()
    """Settings `key=value` that override the configuration."""
    tokens: PublishedTokens | None = None
    """Published token files; null: the configuration names its data."""
    runs: PositiveInt
    """Default number of runs, with the seeds 0, 1, …"""
    score: ScoreRule
    differences: tuple[Text, ...] = ()
    """Known differences from the rules of the published results, because of which a result of this
    recipe is no official record."""
    references: tuple[ReferencePoint, ...] = ()
    """Published results."""


@dataclass(frozen=True)
class RecipeFile:
    """A checked recipe file."""

    path: Path
    recipe: Recipe

    @property
    def name(self) -> str:
        """The name of the recipe: that of its file without the suffix."""
        return self.path.stem

    @property
    def key(self) -> str:
        """Hash of what is trained and how it is scored."""
        rules = {"config", "overrides", "tokens", "score"}
        return fingerprint(self.recipe.model_dump(mode="json", include=rules))

    def arguments(self) -> list[str]:
        """Return the `key=value` arguments of its runs, without name and seed."""
        tokens = self.recipe.tokens
        data = [] if tokens is None else [
            f"data.tokens={tokens.folder}",
            f"data.tokenizer={tokens.folder / 'tokenizer.json'}",
        ]  # fmt: skip
        return [*self.recipe.overrides, *data]


def shipped() -> list[RecipeFile]:
    """Return all shipped recipes, by name."""
    return [read(path) for path in sorted(_folder().glob("*.yaml"))]


def read(path: Path) -> RecipeFile:
    """Read a recipe file. Raises ConfigError, which lists every mistake with its line."""
    extends, layer = source.read_file(path, explain.texts(Recipe))
    if extends:
        raise ConfigError("a recipe cannot extend another file", where=path)
    recipe, problems = validation.validate(Recipe, source.nested(layer))
    if recipe is None:
        raise load.Mistakes(problems, layer, "the recipe", next="docs/bench.md shows each key")
    if not re.fullmatch(NAME, path.stem):
        raise ConfigError(
            f"{path.stem!r} cannot be the name of a recipe",
            where=path,
            why="its results get a folder of that name",
            next="rename the file, with letters, digits, '.', '_' and '-' only",
        )
    return RecipeFile(path, recipe)


def find(name: str) -> RecipeFile:
    """Return a shipped recipe by name, or that of a YAML file.

    Raises InputError if there is none, and ConfigError for a file with the name of a shipped one.
    """
    path, shipped_file = Path(name), _folder() / f"{name}.yaml"
    known = sorted(path.stem for path in _folder().glob("*.yaml"))
    if name in known:
        return read(shipped_file)
    if path.suffix in (".yaml", ".yml") and path.is_file():
        if path.stem in known and not path.samefile(_folder() / f"{path.stem}.yaml"):
            raise ConfigError(
                f"{path.stem} is the name of a shipped recipe",
                where=path,
                why="results of both would be in one folder",
                next=f"mv {path} {path.with_stem(f'my-{path.stem}')}",
            )
        return read(path)
    close = difflib.get_close_matches(name, known, n=1)
    raise InputError(
        f"no recipe {name!r}",
        why="it is neither a shipped recipe nor a YAML file",
        next=f"dtt bench {close[0]}" if close else f"dtt bench {' | '.join(known)}",
    )


def _folder() -> Path:
    return load.shipped_configs() / "bench"
