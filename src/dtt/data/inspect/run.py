"""`dtt data`: inspect text and token files, a mixture, and the samples of a training step."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path

from dtt.artifacts.token_folders import token_paths
from dtt.base.errors import ConfigError
from dtt.base.terminal import Coded, one_line
from dtt.config.load import resolve as load_config
from dtt.config.run import RunConfig
from dtt.config.source import is_config
from dtt.config.sources import Rows
from dtt.data.inspect.conversation_report import BEGIN, END
from dtt.data.inspect.inspector import inspect_path
from dtt.data.inspect.mixture_folder import write_mixture
from dtt.data.inspect.mixture_preview import mixture_table, preview_mixture
from dtt.data.inspect.report import InspectOptions, Report, raise_if_damaged
from dtt.data.samples.dataset import open_dataset
from dtt.data.samples.own_source import encoded

SHOWN_LINES = 6
"""Maximum number of lines of an inspected sample to show."""
SHOWN_CONVERSATION_LINES = 40
"""Maximum number of lines of an inspected conversation to show."""
COLOR, PLAIN = "\x1b[32m", "\x1b[0m"


def inspect(
    path: Path,
    *,
    samples: int,
    everything: bool,
    hashes: bool,
    tokenizer: Path | None,
    dtype: str,
    as_json: bool,
) -> None:
    """Print a summary of the data at `path`; then raise DamagedError if a file is damaged.

    If `path` is a configuration, the summary describes the token files of its run, and lists the
    conversations that the run leaves out.
    """
    wishes = InspectOptions(
        samples=samples, everything=everything, hashes=hashes, tokenizer=tokenizer, dtype=dtype
    )
    # A .json is data: configurations of runs are YAML.
    is_run = is_config(path) and path.suffix != ".json"
    cfg = load_config(str(path), []).config if is_run else None
    paths = [path]
    if cfg is not None:  # its token files, encoded rows, or corpus
        own = cfg.sources or (cfg.data,)
        paths = [*dict.fromkeys(token_paths(cfg) or cfg.data.input_paths(cfg))]
        paths += [encoded(rows, cfg) for rows in own if isinstance(rows, Rows)]
        if not paths:
            raise ConfigError(
                f"the samples of {own[0].type} are made as they are read: there is no data to "
                "inspect",
                next="dtt data at-step shows those of a job",
            )
    reports = [inspect_path(one, wishes) for one in paths]
    if as_json:
        facts = [asdict(report) for report in reports]
        print(json.dumps(facts[0] if cfg is None else facts, indent=1))
    else:
        for line in (line for report in reports for line in _report(report)):
            print(line)  # one by one, since those with colors are printed as they are
    for report in reports:
        raise_if_damaged(report)
    if cfg is not None and not as_json:
        print("\n".join(open_dataset(cfg).left_out() or ["the run uses every conversation"]))


def mix(cfg: RunConfig, write: Path | None = None, *, as_json: bool) -> None:
    """Print the share, samples, tokens and epochs of each data source in the run of `cfg`.

    With `write`, write the mixture into that folder instead, and print what it holds.
    """
    if write is not None:
        facts, table = write_mixture(cfg, open_dataset(cfg), write)
        print(json.dumps(facts, indent=1) if as_json else table)
        return
    mixture = preview_mixture(cfg, open_dataset(cfg))
    print(json.dumps(mixture, indent=1) if as_json else "\n".join(mixture_table(mixture)))


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
        yield _line("verified", "every file matches its manifest" if not report.damaged else "no")
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
        lines = [one_line(line) for line in sample["text"].strip().splitlines()]
        colored = islice(_colored(lines, is_chat=is_chat), shown)
        yield from (Coded(f"    | {line}") for line in colored)
    if is_chat and report.samples:
        yield f"    trained tokens are between {BEGIN} and {END}"


def _colored(lines: list[str], *, is_chat: bool) -> Iterator[str]:
    """Yield the lines of a sample, with trained text in color if a terminal shows them."""
    if not (is_chat and sys.stdout.isatty() and "NO_COLOR" not in os.environ):
        yield from lines
        return
    trained = False
    for line in lines:
        start = COLOR if trained else ""
        trained = line.rfind(BEGIN) > line.rfind(END) or (trained and END not in line)
        text = line.replace(BEGIN, f"{COLOR}{BEGIN}").replace(END, f"{END}{PLAIN}")
        yield f"{start}{text}{PLAIN}"


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
