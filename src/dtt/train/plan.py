"""What a run comes to, worked out from config, data and ranks before it starts."""

from __future__ import annotations

from dataclasses import dataclass

from dtt.config.run import RunConfig
from dtt.data import fit
from dtt.data.dataset import Dataset
from dtt.errors import ConfigError
from dtt.model import count, families
from dtt.model.architecture import Architecture, fit_context, fit_vocabulary
from dtt.runtime.dist import World, native_bf16


@dataclass(frozen=True)
class Plan:
    """The numbers every part of training needs."""

    arch: Architecture
    parameters: int
    flops_per_token: int
    precision: str
    """fp32 or bf16."""
    compile: bool
    tokens_per_step: int
    """Places for them; a few hold padding where documents are packed."""
    steps: int
    """Until the end of the run, or until the data is exhausted."""
    data: str
    """A line for each source."""

    def describe(self, world: World) -> str:
        """A few lines for the start of the log."""
        tokens = self.steps * self.tokens_per_step
        return (
            f"{self.arch.family}, {self.parameters / 1e6:.2f}M parameters, {self.precision} on "
            f"{world.size} x {world.device.type}{', compiled' if self.compile else ''}\n"
            f"  {self.steps} steps of {self.tokens_per_step} tokens: {tokens / 1e6:.1f}M tokens, "
            f"{tokens / self.parameters:.1f} per parameter\n{self.data}"
        )


def make_plan(cfg: RunConfig, dataset: Dataset, world: World) -> Plan:
    """Resolve what depends on data and devices; ConfigError when they do not fit the config."""
    train = cfg.train
    fit.sequences_per_step(train, world.size)
    if dataset.steps == 0:
        raise ConfigError(
            "the data is exhausted before the end of the first step",
            why=f"{dataset.mixture.end} sequences, a step takes {dataset.sequences}",
            next="data.on_exhausted=repeat, a smaller train.global_batch_tokens, or more text",
        )
    arch = families.get(cfg.model.family).architecture(
        cfg.model,
        fit_vocabulary(cfg.model, dataset.manifest.vocab_size),
        fit_context(cfg.model, train.seq_len),
    )
    precision = train.precision
    if precision == "auto":
        precision = "bf16" if native_bf16(world.device) else "fp32"
    return Plan(
        arch=arch,
        parameters=count.parameters(arch),
        flops_per_token=count.flops_per_token(arch, train.seq_len),
        precision=precision,
        compile=world.device.type == "cuda" if train.compile is None else train.compile,
        tokens_per_step=train.global_batch_tokens,
        steps=dataset.steps,
        data=dataset.describe(),
    )
