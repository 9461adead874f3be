"""`dtt eval`: evaluate a model, or compare two."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dtt.base.errors import ConfigError
from dtt.config.load import resolve
from dtt.evaluate.evaluation import evaluate


def run(arguments: Sequence[str], *, harness: Sequence[str] = (), **options: Any) -> None:
    """Evaluate a model, or compare the results of two: `compare A B`; see `evaluate`.

    With `harness`, evaluates these tasks of lm-evaluation-harness instead.
    """
    match arguments:
        case ["compare", one, other]:
            from dtt.evaluate import compare

            compare.run(one, other, harness=harness, **options)
        case [source] if source != "compare" and harness:
            from dtt.evaluate import harness as lm_eval

            lm_eval.run(source, harness, **options)
        case [source] if source != "compare":
            evaluate(source, **options)
        case _:
            raise ConfigError(
                "dtt eval takes one model, or `compare` and two",
                why=f"got {' '.join(arguments)}",
                next=_meant(arguments),
            )


def _meant(arguments: Sequence[str]) -> str:
    """Return the command that someone meant who named several models, or tasks without --tasks."""
    source, *rest = arguments
    if source == "compare" or any(Path(name.partition("@")[0]).is_dir() for name in rest):
        return "dtt eval SOURCE, or dtt eval compare JOB[@STEP] JOB[@STEP]"
    return f"dtt eval {source} --tasks {','.join(rest)}"


def with_keys(arguments: Sequence[str], tasks: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Split arguments into models and `eval.KEY=VALUE`; return the models, and the values by key.

    The values include `tasks`, if there are any. Raises ConfigError for keys of other sections,
    which do not affect an evaluation, and for tasks that are given twice.
    """
    given = [one for one in arguments if re.match(r"[a-z_.]+=", one) and not Path(one).exists()]
    sources = [one for one in arguments if one not in given]
    options: dict[str, Any] = {"tasks": tasks} if tasks else {}
    section = resolve(None, given).config.eval
    for key in dict.fromkeys(one.partition("=")[0] for one in given):
        name = key.removeprefix("eval.")
        if name == key or name == "every":
            raise ConfigError(f"dtt eval does not read {key}", next="dtt config explain eval")
        if name in options:
            raise ConfigError(f"--{name} and {key} are both given")
        options[name] = getattr(section, name)
    return sources, options
