"""`dtt data`: inspect text and token files, a mixture, and the samples of a training step."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import get_args

from dtt.artifacts.jobdir import JobDir
from dtt.artifacts.manifests import DataManifest
from dtt.base.errors import ConfigError, DamagedError
from dtt.base.reading import read_json
from dtt.checkpoint import store
from dtt.config.data import SourceConfig
from dtt.config.load import load_job
from dtt.config.load import resolve as load_config
from dtt.config.run import RunConfig
from dtt.config.source import is_config
from dtt.data.inspect.conversation_report import BEGIN, END
from dtt.data.inspect.inspector import inspect_path
from dtt.data.inspect.lengths import LengthSummary
from dtt.data.inspect.mixture_preview import MixturePreview, SourceShare, preview_mixture
from dtt.data.inspect.report import InspectOptions, Report, raise_if_damaged
from dtt.data.inspect.step_samples import StepSample, StepSamples
from dtt.data.samples.dataset import Dataset, open_dataset
from dtt.data.samples.shuffle import EMPTY_DATA_HASH
from dtt.data.text.tokenizer import open_tokenizer
from dtt.jobs.job_paths import enter
from dtt.track import jsonl

BAR = 40
"""Width in characters of the longest bar of a histogram."""
SHOWN_LINES = 6
"""Maximum number of lines of an inspected sample to show."""
SHOWN_CONVERSATION_LINES = 40
"""Maximum number of lines of an inspected conversation to show."""
COLOR, PLAIN = "\x1b[32m", "\x1b[0m"
SHORT = 200
"""Number of characters of a document's text to show, unless `full` is set."""

SAMPLE_HASH = re.compile(r"(?:[0-9a-f]{2})+")
"""Pattern of a sample hash in metrics.jsonl, in hexadecimal digits."""


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
    known = get_args(SourceConfig.model_fields["dtype"].annotation)
    if dtype not in known:
        raise ConfigError(
            f"--dtype {dtype} is not a type of raw ids", next=f"use {' or '.join(known)}"
        )
    wishes = InspectOptions(
        samples=samples, everything=everything, hashes=hashes, tokenizer=tokenizer, dtype=dtype
    )
    cfg = load_config(str(path), []).config if is_config(path) else None
    paths = [path] if cfg is None else [*dict.fromkeys(cfg.token_paths)] or [cfg.corpus_dir]
    reports = [inspect_path(one, wishes) for one in paths]
    if as_json:
        facts = [asdict(report) for report in reports]
        print(json.dumps(facts[0] if cfg is None else facts, indent=1))
    else:
        print("\n".join(line for report in reports for line in _report(report)))
    for report in reports:
        raise_if_damaged(report)
    if cfg is not None and not as_json:
        print("\n".join(open_dataset(cfg).left_out() or ["the run uses every conversation"]))


def mix(cfg: RunConfig, *, as_json: bool) -> None:
    """Print the share, samples, tokens and epochs of each data source in the run of `cfg`."""
    mixture = preview_mixture(cfg, open_dataset(cfg))
    print(json.dumps(asdict(mixture), indent=1) if as_json else "\n".join(_mix(mixture)))


def at_step(
    job: Path,
    step: int,
    *,
    rank: int | None,
    ranks: int | None,
    limit: int | None,
    full: bool,
    as_json: bool,
) -> None:
    """Print the samples of step `step` (from 1) and the documents in them.

    With `rank` and `ranks`, prints the samples of one rank out of `ranks`. Raises DamagedError if
    metrics.jsonl records that the step was trained on different samples.
    """
    if (rank is None) != (ranks is None) or (rank is not None and not 0 <= rank < (ranks or 0)):
        raise ConfigError("--rank R and --of N require each other, with R from 0 to N - 1")
    job, _ = enter(job)
    dataset = open_dataset(load_job(job))
    if not 1 <= step <= dataset.steps:
        raise ConfigError(f"{job} has no step {step}", why=f"its steps are 1 to {dataset.steps}")
    places = JobDir(job)
    _restore_streams(dataset, places, step)
    seen = StepSamples.of(dataset, step)
    agrees = _check_samples(seen, dataset, places, step)
    rows = seen.rows(rank or 0, ranks or 1)
    tokenizer = open_tokenizer(dataset.tokenizer)
    samples = (
        seen.read(dataset, row, lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)))
        for row in rows[:limit]
    )
    if as_json:
        facts = {"step": step, "samples_of_step": len(seen.samples), "ledger_agrees": agrees}
        print(json.dumps(facts | {"samples": [asdict(sample) for sample in samples]}, indent=1))
        return
    print(f"step {step} of {job}: {len(seen.samples)} samples, ", end="")
    print("the same as in metrics.jsonl" if agrees else "not trained yet")
    for sample in samples:
        print("\n".join(_sample(sample, full=full)))
    if len(rows[:limit]) < len(rows):
        print(f"\n… and {len(rows) - len(rows[:limit])} more")


def _restore_streams(dataset: Dataset, job: JobDir, step: int) -> None:
    """Restore streamed sources from the newest checkpoint up to `step`, if there is one."""
    before = [saved for saved in store.steps(job.checkpoints) if saved <= step]
    # A checkpoint holds the state of the sources from one step earlier. Without a usable checkpoint
    # they start at the beginning, which only takes longer. A checkpoint that does not belong to
    # these samples is detected afterwards, by the sample hash chain in `_check_samples`.
    with suppress(IndexError, OSError, ValueError, KeyError, TypeError, DamagedError):
        path = store.folder_of(job.checkpoints, before[-1]) / store.POSITION
        dataset.restore(read_json(path)["sources"])


def _check_samples(seen: StepSamples, dataset: Dataset, job: JobDir, step: int) -> bool | None:
    """Compare the samples `seen` with the sample hash chain in metrics.jsonl.

    Returns True if the step was trained on exactly these samples, and None if it has not been
    trained yet. Raises DamagedError if it was trained on different samples.
    """
    wanted = (step - 1, step)
    records = (r for r in jsonl.read(job.metrics, "train") if r["step"] in wanted)
    valid = (r for r in records if SAMPLE_HASH.fullmatch(str(r.get("ledger"))))
    hashes = {0: EMPTY_DATA_HASH} | {r["step"]: bytes.fromhex(r["ledger"]) for r in valid}
    if not all(one in hashes for one in wanted):
        return None
    if seen.follows(hashes[step - 1], hashes[step]):
        return True
    raise DamagedError(
        f"step {step} was trained on other samples than the current data yields",
        where=job.metrics,
        why=_difference(dataset, job),
        next="restore the token files and the configuration that the job had at that step",
    )


def _difference(dataset: Dataset, job: JobDir) -> str:
    """Return the reason why the samples of a step differ from those it was trained on."""
    now = {source.name: source.key for source in dataset.manifest.sources}
    then = {source.name: source.key for source in DataManifest.read(job.root).sources}
    changed = sorted(name for name in now | then if now.get(name) != then.get(name))
    if changed:
        return f"the files of {', '.join(changed)} have changed since"
    return "seed, weights or sizes were changed with --allow-change, or metrics.jsonl was edited"


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
    if report.lengths is not None and report.lengths.documents:
        yield from _histogram(report.lengths)
    yield from _samples(report)
    for title, problems in (("anomalies", report.oddities), ("damaged", report.damaged)):
        if problems:
            yield f"\n  {title}"
            yield from (f"    {problem}" for problem in problems)


def _samples(report: Report) -> Iterator[str]:
    is_chat = "trained_tokens" in report.facts
    shown = SHOWN_CONVERSATION_LINES if is_chat else SHOWN_LINES
    for sample in report.samples:
        yield f"\n  {sample.where}"
        lines = sample.text.strip().splitlines()
        yield from (f"    | {line}" for line in islice(_colored(lines, is_chat=is_chat), shown))
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
    read = report.read
    if report.damaged:
        return f"{read.amount:,} {read.unit}, without damaged files"
    if read.everything:
        return "everything"
    return f"{read.amount:,} of {read.total:,} {read.unit}, evenly spread; --all reads everything"


def _nested(name: str, value: dict[str, object]) -> Iterator[str]:
    """Yield one line for a dictionary of facts, and one line each for nested dictionaries."""
    if all(isinstance(inner, dict) for inner in value.values()):
        for key, inner in value.items():
            assert isinstance(inner, dict)
            yield from _nested(key, inner)
    else:
        yield _line(name, ", ".join(f"{k} {v}" for k, v in value.items() if v is not None))


def _histogram(lengths: LengthSummary) -> Iterator[str]:
    yield (
        f"\n  {lengths.unit} per document ({lengths.documents:,} measured): mean {lengths.mean:,}, "
        f"median {lengths.median:,}, 90 % up to {lengths.p90:,}, longest {lengths.max:,}"
    )
    rows = [(f"{low:,} – {high:,}", n) for low, high, n in lengths.histogram]
    if lengths.empty:
        rows.insert(0, ("0", lengths.empty))
    most = max(n for _, n in rows)
    for label, n in rows:
        yield f"    {label:>23}  {'█' * -(-BAR * n // most):<{BAR}} {n:,}"


def _mix(mix: MixturePreview) -> Iterator[str]:
    width = max(6, *(len(source.name) for source in mix.sources))
    yield (
        f"{'source':<{width}}  {'share':>7}  {'tokens':>15}  {'samples':>11}  {'of run':>11}"
        f"  {'tokens of run':>15}  {'epochs':>8}  {'bytes/token':>11}  exhausted"
    )
    for source in mix.sources:
        yield (
            f"{source.name:<{width}}  {source.share:>7.2%}  {source.tokens:>15,}"
            f"  {source.samples:>11,}  {source.run_samples:>11,}  {source.run_tokens:>15,}"
            f"  {source.epochs:>8.2f}  {_number(source.bytes_per_token):>11}"
            f"  {_exhausted(source, mix)}"
        )
    yield (
        f"{'total':<{width}}  {1:>7.2%}  {sum(s.tokens for s in mix.sources):>15,}"
        f"  {sum(s.samples for s in mix.sources):>11,}  {mix.samples:>11,}  {mix.tokens:>15,}"
        f"  {mix.epochs:>8.2f}  {_number(mix.bytes_per_token):>11}"
    )
    for source in mix.sources:
        if source.utilisation is not None:
            yield f"{source.name}: best-fit packing fills {source.utilisation:.2%} of the positions"
    if len(mix.phases) > 1:
        for phase in mix.phases:
            shares = ", ".join(f"{name} {share:.2%}" for name, share in phase.shares.items())
            yield f"from step {phase.from_step:,}: {shares}"
    yield from mix.rounded
    ends = "" if mix.steps == mix.steps_asked else f" of the {mix.steps_asked:,} requested"
    first, last = mix.samples_per_step
    size = f"{first:,}" if first == last else f"{first:,} to {last:,}"
    yield f"{mix.steps:,} steps{ends}, {size} samples each"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _exhausted(source: SourceShare, mix: MixturePreview) -> str:
    if source.exhausted_at_step is None:
        return "no"
    then = {
        "repeat": "then it starts its next epoch",
        "stop": "then the run ends",
        "renormalise": "then the other sources continue",
    }
    return f"at step {source.exhausted_at_step:,}, {then[mix.on_exhausted]}"


def _sample(sample: StepSample, *, full: bool) -> Iterator[str]:
    yield f"\nsample {sample.sample:,} of {sample.source}, epoch {sample.epoch}"
    for part in sample.documents:
        where = f", from token {part.offset:,}" if part.offset else ""
        yield f"  {part.file}, document {part.document:,}{where}: {part.tokens:,} tokens"
        text = part.text if full or len(part.text) <= SHORT else f"{part.text[:SHORT]} …"
        yield from (f"    | {line}" for line in text.splitlines())
