"""Short training of a model in this process on a run's data, without a job or checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from math import gcd

import torch
from torch import Tensor

from dtt.base.errors import ConfigError
from dtt.config.model import ModelConfig
from dtt.config.run import RunConfig
from dtt.data.samples.dataset import open_dataset
from dtt.data.samples.loader import BatchReader, training_batches
from dtt.mesh.dist import World
from dtt.model.architecture import decoder_architecture
from dtt.model.decoder import Decoder, params_of
from dtt.model.init import initialize
from dtt.optim import built, groups
from dtt.optim.rounding import StochasticRounding
from dtt.train.objectives.loss_function import loss_function
from dtt.train.run_plan import make_plan
from dtt.train.run_schedule import RunSchedule
from dtt.train.step import Passes, update


class ShortTraining:
    """A newly initialised model, with its data and optimizers."""

    def __init__(self, cfg: RunConfig, world: World) -> None:
        """Create the model; `world` is a single process.

        Raise the errors of `open_dataset` and `make_plan`.
        """
        dataset = open_dataset(cfg)
        self.plan = make_plan(cfg, dataset, world)
        self._train = cfg.train
        self._schedule = RunSchedule(self.plan.steps, self.plan.schedule, dataset.step_sizes)
        self._no_skip = torch.zeros((), device=world.device)
        with world.device:
            arch = decoder_architecture(self.plan.arch, "muP")
            self.model = Decoder(arch).to(self.plan.precision.weights)
        initialize(self.model, cfg.seed, self.plan.scaling.base)
        self._rounding = StochasticRounding.of(
            cfg.seed, self.plan.precision.weights, weights=cfg.train.stochastic_rounding
        )
        self._params = params_of(self.model)
        facts = self.plan.facts(self._rounding)
        self._optimizers = built.build(cfg.optim, self._params, facts)
        built.check_weights(self._optimizers, world.gather)
        reader = BatchReader.of(cfg, 0, 1, world.device)
        batches = training_batches(dataset, reader, 0)
        self.first_batch = next(batches)
        self._batches = chain([self.first_batch], batches)

    def losses(self, *, at_peak: bool = False) -> Iterator[Tensor]:
        """Train to the end of the run; after each step, yield its loss [] in nats per token.

        The losses stay on the device. Learning rates are those of the run, or `at_peak` throughout.
        """
        passes = Passes(self.model, self.plan.precision)
        loss = loss_function(z_loss=self._train.z_loss)
        for step, batch in enumerate(self._batches):
            multiplier = 1.0 if at_peak else self._schedule.multiplier(step)
            groups.set_learning_rate(self._optimizers, multiplier)
            losses = passes.run(batch.micro_batches, loss, batch.targets)
            self._params.clip(self._train.clip_norm or float("inf"))
            # Without an anomaly guard.
            update(self._optimizers, self._no_skip, step=step, rounding=self._rounding)
            yield losses.loss


def at_width(cfg: RunConfig, width: int) -> RunConfig:
    """Return the run with another `model.dim`: heads of the same size, the rest in proportion.

    The number of heads and the size of the MLP scale with the width. Raise ConfigError if the
    number of heads would not be an integer.
    """
    model = cfg.model
    assert isinstance(model, ModelConfig), "the configuration refuses muP for others"
    kv_heads = model.n_kv_heads or model.n_heads
    step = model.dim // gcd(model.dim, model.n_heads, kv_heads)
    if width % step:
        raise ConfigError(
            f"the model cannot be {width} wide with heads of the same size",
            why=f"it has {model.n_heads} heads, {kv_heads} for keys, at a width of {model.dim}",
            next=f"--widths {step},{2 * step},{4 * step}, or another model.n_heads",
        )
    sizes = {
        "dim": width,
        "n_heads": model.n_heads * width // model.dim,
        "n_kv_heads": model.n_kv_heads and model.n_kv_heads * width // model.dim,
        "head_dim": model.resolved_head_dim,
        "ffn_dim": model.ffn_dim and model.ffn_dim * width // model.dim,
    }
    return cfg.model_copy(update={"model": model.model_copy(update=sizes)})
