"""Preview of a data mixture: epochs, tokens and shares per source, computed from sizes alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dtt.config.run import RunConfig
from dtt.data.samples.dataset import Dataset
from dtt.data.samples.protocol import Source, Streamed

MEASURED = 4096
"""Maximum number of samples per source whose targets are counted to estimate the mean."""


@dataclass(frozen=True)
class SourceShare:
    """One source of the mixture and its part in the run."""

    name: str
    path: str
    tokens: int
    """Tokens in an epoch."""
    samples: int
    """Samples in an epoch."""
    bytes_per_token: float | None
    utilisation: float | None
    """Share of token positions in its packed samples that hold a token; None if not packed."""
    share: float
    """Share of all samples of the run."""
    run_samples: int
    run_tokens: int
    """Targets in the run, estimated from the mean over samples if they are packed.

    Includes the first tokens of documents, even if data.eod_mask_loss excludes them from the loss.
    """
    epochs: float
    exhausted_at_step: int | None
    """Step that sees the source's last sample for the first time; None if the run ends earlier."""


@dataclass(frozen=True)
class PhaseShares:
    """A range of steps with constant mixture weights."""

    from_step: int
    shares: dict[str, float]


@dataclass(frozen=True)
class MixturePreview:
    """Summary of the data of a run."""

    steps: int
    """Number of steps for which there are samples."""
    steps_asked: int
    samples_per_step: list[int]
    """Samples in the first step and in the last."""
    samples: int
    tokens: int
    bytes_per_token: float | None
    """Mean over the tokens of the run; None if unknown for one source."""
    epochs: float
    """Samples of the run divided by the samples of all sources."""
    packing: str
    on_exhausted: str
    sources: list[SourceShare]
    phases: list[PhaseShares]
    rounded: list[str]
    """A line for each share that differs by more than 1 % from its weight."""


def preview_mixture(cfg: RunConfig, dataset: Dataset) -> MixturePreview:
    """Preview the mixture of the run that `cfg` describes; `dataset` was opened from `cfg`."""
    packing = cfg.data.packing
    mixture = dataset.mixture
    samples = dataset.first_sample(dataset.steps)  # excludes an incomplete last step
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
                run_tokens=round(counts[number] * _targets(source, cfg)),
                epochs=counts[number] / len(source),
                exhausted_at_step=exhausted and dataset.step_sizes.step_of(exhausted - 1) + 1,
            )
        )
    tokens = sum(source.run_tokens for source in sources)
    text = [source.bytes_per_token for source in sources if source.bytes_per_token is not None]
    known = len(text) == len(sources) and tokens > 0
    return MixturePreview(
        steps=dataset.steps,
        steps_asked=dataset.requested_steps,
        samples_per_step=[
            dataset.step_sizes.at(step).sequences for step in (0, max(0, dataset.steps - 1))
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


def _targets(source: Source, cfg: RunConfig) -> float:
    """Return the mean number of targets per sample, measured on some of the samples."""
    if isinstance(source, Streamed):  # text would have to be tokenized first
        return cfg.train.seq_len
    some = np.linspace(0, len(source) - 1, min(len(source), MEASURED)).astype(np.uint64)
    return source.counts(some).targets / len(some)


def _phases(dataset: Dataset) -> list[PhaseShares]:
    names = [source.name for source in dataset.sources]
    phases = []
    for phase in dataset.mixture.phases:
        total = sum(phase.weights)
        shares = {n: float(w / total) for n, w in zip(names, phase.weights, strict=True)}
        phases.append(PhaseShares(dataset.step_sizes.step_of(phase.first) + 1, shares))
    return phases
