"""`dtt data`: inspect text and token files, a mixture, and the samples of a training step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from dtt.base.terminal import one_line
from dtt.config.run import RunConfig
from dtt.data.inspect.inspector import inspect_path
from dtt.data.inspect.report import BEGIN, END, InspectOptions, Report, raise_if_damaged
from dtt.data.samples.dataset import open_dataset

SHOWN_LINES = 6
"""Maximum number of lines of an inspected sample to show."""
SHOWN_CONVERSATION_LINES = 40
"""Maximum number of lines of an inspected conversation to show."""


def inspect(path: Path, options: InspectOptions, *, as_json: bool) -> None:
    """Print a summary of the data at `path`; then raise DamagedError if a file is damaged."""
    report = inspect_path(path, options)
    print(json.dumps(asdict(report), indent=1) if as_json else "\n".join(_report(report)))
    raise_if_damaged(report)


def mix(cfg: RunConfig) -> None:
    """Print the share, tokens and epochs of each data source in the run of `cfg`, and its steps.

    Also prints which conversations the run does not take as they are.
    """
    dataset = open_dataset(cfg)
    print("\n".join([dataset.describe(), *dataset.left_out()]))
    steps, asked = dataset.steps, dataset.requested_steps
    ends = "" if steps == asked else f" of the {asked:,} requested"
    print(f"  {steps:,} steps{ends} of {dataset.step_sizes.describe(max(steps, 1))}")


def _report(report: Report) -> Iterator[str]:
    yield f"{report.path}: {report.kind}"
    yield _line("files", f"{report.files:,}, {report.file_bytes / 1e6:,.3f} MB")
    for name, value in report.facts.items():
        if isinstance(value, dict):
            yield from _nested(name, value)
        elif value is not None:
            yield _line(name, f"{value:,}" if isinstance(value, int) else value)
    if report.documents is not None:
        about = "about " if report.documents_estimated else ""
        yield _line("documents", f"{about}{report.documents:,}")
    if report.tokens is not None:
        yield _line("tokens", f"{report.tokens:,}")
    if report.text_bytes is not None:
        per_token = report.text_bytes / report.tokens if report.tokens else None
        each = "" if per_token is None else f", {per_token:.2f} per token"
        yield _line("text", f"{report.text_bytes:,} bytes{each}")
    yield _line("read", _amount_read(report))
    if report.verified:
        # Selections beside a corpus are listed, and their files not hashed.
        every = "every file of the corpus" if report.kind == "corpus of dtt" else "every file"
        yield _line("verified", "no" if report.damaged else f"{every} matches its manifest")
    if (some := report.lengths) and some["documents"]:
        yield _line(
            f"{some['unit']} each",
            f"mean {some['mean']:,}, median {some['median']:,}, 90 % up to {some['p90']:,}, "
            f"longest {some['max']:,} ({some['documents']:,} documents measured)",
        )
    yield from _samples(report)
    for title, problems in (("anomalies", report.oddities), ("damaged", report.damaged)):
        if problems:
            yield f"\n  {title}"
            yield from (f"    {problem}" for problem in problems)


def _samples(report: Report) -> Iterator[str]:
    is_chat = "trained_tokens" in report.facts
    shown = SHOWN_CONVERSATION_LINES if is_chat else SHOWN_LINES
    for sample in report.samples:
        yield f"\n  {sample['where']}"
        lines = sample["text"].strip().splitlines()[:shown]
        yield from (f"    | {one_line(line)}" for line in lines)
    if is_chat and report.samples:
        yield f"    trained tokens are between {BEGIN} and {END}"


def _line(name: str, value: object) -> str:
    return f"  {name:<18} {value}"


def _amount_read(report: Report) -> str:
    amount, total, unit = (report.read[key] for key in ("amount", "total", "unit"))
    if report.damaged:
        return f"{amount:,} {unit}, without damaged files"
    if report.is_exact:
        return "everything"
    return f"{amount:,} of {total:,} {unit}, evenly spread; --all reads everything"


def _nested(name: str, value: dict[str, object]) -> Iterator[str]:
    """Yield one line for a dictionary of facts, and one line each for nested dictionaries."""
    if all(isinstance(inner, dict) for inner in value.values()):
        for key, inner in value.items():
            assert isinstance(inner, dict)
            yield from _nested(key, inner)
    else:
        yield _line(name, ", ".join(f"{k} {v}" for k, v in value.items() if v is not None))
