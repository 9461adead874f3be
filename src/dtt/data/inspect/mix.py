"""What a mixture comes to in a run, worked out before it starts: nothing is read but sizes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dtt.config.data import TokensDataConfig
from dtt.config.run import RunConfig
from dtt.data.dataset import Dataset
from dtt.data.source import Source

MEASURED = 4096
"""Samples whose targets are counted to know how many an average one has."""


@dataclass(frozen=True)
class SourceShare:
    """One source in the run."""

    name: str
    path: str
    tokens: int
    """In an epoch."""
    samples: int
    """In an epoch."""
    bytes_per_token: float | None
    utilisation: float | None
    """Share of the places in its samples that hold a token; None where all do."""
    share: float
    """Of all samples of the run."""
    run_samples: int
    run_tokens: int
    """Targets, to within the difference of samples that are not full; with data.eod_mask_loss also
    the first tokens of documents."""
    epochs: float
    exhausted_at_step: int | None
    """The step that sees its last sample for the first time; None: the run does not come so far."""


@dataclass(frozen=True)
class PhaseShares:
    """A stretch of the run in which weights stay the same."""

    from_step: int
    shares: dict[str, float]


@dataclass(frozen=True)
class Mix:
    """A run's data in numbers."""

    steps: int
    """That there are samples for."""
    steps_asked: int
    samples_per_step: list[int]
    """Of the first step, and of the last."""
    samples: int
    tokens: int
    bytes_per_token: float | None
    """Of all that the run sees; None if one source does not know."""
    epochs: float
    """Samples of the run over those of all sources."""
    packing: str
    on_exhausted: str
    sources: list[SourceShare]
    phases: list[PhaseShares]
    rounded: list[str]
    """The shares that differ by more than 1 % from the weights."""


def work_out(cfg: RunConfig, dataset: Dataset) -> Mix:
    """Work it out for the run that `cfg` describes; `dataset` is what it opens."""
    packing = cfg.data.packing if isinstance(cfg.data, TokensDataConfig) else "concat"
    mixture = dataset.mixture
    samples = dataset.first_sample(dataset.steps)  # a step that is not whole is not trained
    counts = mixture.counts(samples).tolist()
    sources = []
    for number, source in enumerate(dataset.sources):
        exhausted = mixture.exhausted_after(number)
        places = len(source) * (cfg.train.seq_len + 1)
        sources.append(
            SourceShare(
                name=source.name,
                path=dataset.manifest.sources[number].path,
                tokens=source.tokens,
                samples=len(source),
                bytes_per_token=source.bytes_per_token,
                utilisation=source.tokens / places if packing == "best-fit" else None,
                share=counts[number] / max(samples, 1),
                run_samples=counts[number],
                run_tokens=round(
                    counts[number] * _targets(source, cfg, packed=packing != "concat")
                ),
                epochs=counts[number] / len(source),
                exhausted_at_step=exhausted and dataset.stages.step_of(exhausted - 1) + 1,
            )
        )
    tokens = sum(source.run_tokens for source in sources)
    text = [source.bytes_per_token for source in sources if source.bytes_per_token is not None]
    known = len(text) == len(sources) and tokens > 0
    return Mix(
        steps=dataset.steps,
        steps_asked=cfg.train.steps,
        samples_per_step=[
            dataset.stages.at(step).sequences for step in (0, max(0, dataset.steps - 1))
        ],
        samples=samples,
        tokens=tokens,
        bytes_per_token=sum(s.run_tokens * b for s, b in zip(sources, text, strict=True)) / tokens
        if known
        else None,
        epochs=samples / sum(source.samples for source in sources),
        packing=packing,
        on_exhausted=mixture.on_exhausted,
        sources=sources,
        phases=_phases(dataset),
        rounded=dataset.rounded_weights(),
    )


def _targets(source: Source, cfg: RunConfig, *, packed: bool) -> float:
    """Targets in an average sample."""
    if not packed:
        return cfg.train.seq_len
    some = np.linspace(0, len(source) - 1, min(len(source), MEASURED)).astype(np.uint64)
    return source.targets(some) / len(some)


def _phases(dataset: Dataset) -> list[PhaseShares]:
    names = [source.name for source in dataset.sources]
    phases = []
    for phase in dataset.mixture.phases:
        total = sum(phase.weights)
        shares = {n: float(w / total) for n, w in zip(names, phase.weights, strict=True)}
        phases.append(PhaseShares(dataset.stages.step_of(phase.first) + 1, shares))
    return phases
