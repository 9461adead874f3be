"""`dtt eval`: evaluate a model, or compare two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dtt.base.errors import ConfigError
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
                next="dtt eval SOURCE, or dtt eval compare JOB[@STEP] JOB[@STEP]",
            )
