"""Preview of a data mixture: epochs, tokens and shares per source, computed from sizes alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from dtt.config.run import RunConfig
from dtt.data.samples.dataset import Dataset
from dtt.data.samples.protocol import SampleSource, Streamed

MEASURED = 4096
"""Maximum number of samples per source whose targets are counted to estimate the mean."""


def preview_mixture(cfg: RunConfig, dataset: Dataset) -> dict[str, Any]:
    """Return the facts of the run that `cfg` describes; `dataset` was opened from `cfg`.

    Of each source: `tokens` and `samples` in an epoch; `share`, its fraction of all samples of the
    run; `utilisation`, the share of token positions in its packed samples that hold a token (None
    if not packed); `run_tokens`, its targets in the run, estimated from the mean over samples if
    they are packed, including the first tokens of documents; `exhausted_at_step`, the step that
    sees its last sample for the first time (None if the run ends earlier). Of the run: `steps` for
    which there are samples; `bytes_per_token`, None if unknown for one source.
    """
    mixture, sizes = dataset.mixture, dataset.step_sizes
    samples = dataset.first_sample(dataset.steps)  # excludes an incomplete last step
    counts = mixture.counts(samples).tolist()
    sources = [
        _source(cfg, dataset, number, source, counts[number] / max(samples, 1), counts[number])
        for number, source in enumerate(dataset.sources)
    ]
    tokens = sum(source["run_tokens"] for source in sources)
    known = tokens > 0 and all(source["bytes_per_token"] is not None for source in sources)
    text_bytes = sum(s["run_tokens"] * s["bytes_per_token"] for s in sources) if known else 0
    names = [source.name for source in dataset.sources]
    return {
        "steps": dataset.steps,
        "steps_asked": dataset.requested_steps,
        "samples_per_step": [
            sizes.at(step).sequences
            for step in (0, max(0, dataset.steps - 1))  # first and last
        ],
        "samples": samples,
        "tokens": tokens,
        "bytes_per_token": text_bytes / tokens if known else None,
        "epochs": samples / sum(source["samples"] for source in sources),
        "packing": cfg.data.packing,
        "on_exhausted": mixture.on_exhausted,
        "sources": sources,
        "phases": [  # ranges of steps with constant weights
            {
                "from_step": sizes.step_of(phase.first) + 1,
                "shares": {
                    name: float(weight / sum(phase.weights))
                    for name, weight in zip(names, phase.weights, strict=True)
                },
            }
            for phase in mixture.phases
        ],
        "rounded": dataset.rounded_weights(),
    }


def _source(
    cfg: RunConfig, dataset: Dataset, number: int, source: SampleSource, share: float, count: int
) -> dict[str, Any]:
    exhausted = dataset.mixture.exhausted_after(number)
    places = len(source) * (cfg.train.seq_len + 1)
    targets: float = cfg.train.seq_len  # of text, which would have to be tokenized first
    if not isinstance(source, Streamed):  # the mean over some of the samples
        some = np.linspace(0, len(source) - 1, min(len(source), MEASURED)).astype(np.uint64)
        targets = source.counts(some).targets / len(some)
    return {
        "name": source.name,
        "path": dataset.manifest.sources[number].path,
        "tokens": source.tokens,
        "samples": len(source),
        "bytes_per_token": source.bytes_per_token,
        "utilisation": source.tokens / places if cfg.data.packing != "concat" else None,
        "share": share,
        "run_samples": count,
        "run_tokens": round(count * targets),
        "epochs": count / len(source),
        "exhausted_at_step": exhausted and dataset.step_sizes.step_of(exhausted - 1) + 1,
    }


def mixture_table(mix: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a table of the facts of `preview_mixture`."""
    sources = mix["sources"]
    then = {
        "repeat": "then it starts its next epoch",
        "stop": "then the run ends",
        "renormalise": "then the other sources continue",
    }[mix["on_exhausted"]]
    width = max(6, *(len(source["name"]) for source in sources))
    yield (
        f"{'source':<{width}}  {'share':>7}  {'tokens':>15}  {'samples':>11}  {'of run':>11}"
        f"  {'tokens of run':>15}  {'epochs':>8}  {'bytes/token':>11}  exhausted"
    )
    total = {
        **mix, "name": "total", "share": 1, "run_samples": mix["samples"],
        "run_tokens": mix["tokens"],
        **{key: sum(source[key] for source in sources) for key in ("tokens", "samples")},
    }  # fmt: skip
    for row in (*sources, total):
        per_token, step = row["bytes_per_token"], row.get("exhausted_at_step")
        exhausted = "no" if step is None else f"at step {step:,}, {then}"
        yield (
            f"{row['name']:<{width}}  {row['share']:>7.2%}  {row['tokens']:>15,}"
            f"  {row['samples']:>11,}  {row['run_samples']:>11,}  {row['run_tokens']:>15,}"
            f"  {row['epochs']:>8.2f}  {'' if per_token is None else f'{per_token:.2f}':>11}"
            f"  {'' if row is total else exhausted}".rstrip()
        )
    for source in sources:
        if source["utilisation"] is not None:
            used = f"{source['utilisation']:.2%}"
            yield f"{source['name']}: {mix['packing']} packing fills {used} of the positions"
    if len(mix["phases"]) > 1:
        for phase in mix["phases"]:
            shares = ", ".join(f"{name} {share:.2%}" for name, share in phase["shares"].items())
            yield f"from step {phase['from_step']:,}: {shares}"
    yield from mix["rounded"]
    steps, asked = mix["steps"], mix["steps_asked"]
    ends = "" if steps == asked else f" of the {asked:,} requested"
    first, last = mix["samples_per_step"]
    size = f"{first:,}" if first == last else f"{first:,} to {last:,}"
    yield f"{steps:,} steps{ends}, {size} samples each"
