"""What a run comes to, worked out from config, token files and ranks before it starts."""

from __future__ import annotations

from dataclasses import dataclass

from dtt.artifacts import TokensManifest
from dtt.config.run import RunConfig
from dtt.data import fit
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
    sequences: int
    """In one optimizer step, over all ranks."""
    tokens_per_step: int
    steps: int
    epoch_windows: int
    """Training windows there are."""

    def describe(self, world: World) -> str:
        """Two lines for the start of the log."""
        tokens = self.steps * self.tokens_per_step
        epochs = self.steps * self.sequences / self.epoch_windows
        return (
            f"{self.arch.family}, {self.parameters / 1e6:.2f}M parameters, {self.precision} on "
            f"{world.size} x {world.device.type}{', compiled' if self.compile else ''}\n"
            f"  {self.steps} steps of {self.tokens_per_step} tokens: {tokens / 1e6:.1f}M tokens, "
            f"{tokens / self.parameters:.1f} per parameter, {epochs:.2f} epochs"
        )


def make_plan(cfg: RunConfig, tokens: TokensManifest, windows: int, world: World) -> Plan:
    """Resolve what depends on data and devices; ConfigError when they do not fit the config."""
    train = cfg.train
    sequences = fit.sequences_per_step(train, world.size)
    fit.check_length(tokens, windows, train.seq_len)
    arch = families.get(cfg.model.family).architecture(
        cfg.model,
        fit_vocabulary(cfg.model, tokens.vocab_size),
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
        sequences=sequences,
        tokens_per_step=train.global_batch_tokens,
        steps=train.steps,
        epoch_windows=windows,
    )
