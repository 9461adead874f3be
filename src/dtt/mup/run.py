"""`dtt mup coord-check | transfer`: check that hyperparameters transfer across model widths.

Coordinate check (Yang et al., arXiv 2203.03466, appendix D.1): the output of a layer should neither
grow nor vanish with the width, before the first update or after several. Transfer (figure 1 there):
the best learning rates at different widths should be equal.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from math import gcd
from statistics import fmean, linear_regression
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dtt.base.errors import ConfigError, Diverged
from dtt.base.log import log
from dtt.base.ranks import Ranks
from dtt.config.base import Section
from dtt.config.model import ModelConfig
from dtt.config.optim import Optimizer
from dtt.config.run import RunConfig
from dtt.config.scaling import MupConfig
from dtt.data.samples.dataset import open_dataset
from dtt.data.samples.loader import BatchReader, training_batches
from dtt.mesh import dist
from dtt.mesh.dist import World
from dtt.model.architecture import decoder_architecture
from dtt.model.decoder import Decoder, params_of
from dtt.model.init import initialize
from dtt.optim import built, groups
from dtt.optim.rounding import StochasticRounding
from dtt.track.jsonl import plain
from dtt.train.objectives.loss_function import loss_function
from dtt.train.run_plan import make_plan
from dtt.train.step import Passes, update

KINDS = ("embed", "attn", "mlp", "residual", "logits")
"""Kinds of activations: token embeddings; outputs of attention and of the MLP, averaged over the
layers; the residual stream after the last layer; logits."""
INPUTS = ("embed", "residual")
"""Kinds that are recorded as the input of a module, not as its output."""
TOLERANCE = 0.35
"""Largest exponent of the width that passes; without muP it is 0.5 or more."""
OCTAVES = range(-3, 4)
"""Default learning rates of `transfer`, in octaves relative to that of the configuration."""
LAST = 0.1
"""Fraction of the steps, at the end of the run, whose mean loss is the final loss."""

Magnitudes = Mapping[str, float]
"""Mean absolute activation by kind."""
Number = TypeVar("Number", int, float)


class ShortTraining:
    """A newly initialised model, with its data and optimizers."""

    def __init__(self, cfg: RunConfig, world: World) -> None:
        """Create the model; `world` is a single process.

        Raise the errors of `open_dataset` and `make_plan`.
        """
        dataset = open_dataset(cfg)
        self.plan = make_plan(cfg, dataset, world)
        self._train = cfg.train
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
            multiplier = 1.0 if at_peak else self.plan.schedule.multiplier(step)
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


def coord_check(cfg: RunConfig, widths: str, *, as_json: bool) -> None:
    """Measure activation sizes at several widths, and print their exponents of the width.

    Sizes are those before the first step and after each step, on the same micro-batch. Learning
    rates are at their peak from the start, because there are few steps. Raises Diverged if an
    activation depends on the width.
    """
    cfg, sizes = _with_mup(cfg, widths)
    world = dist.start(Ranks(), cfg.train.device)
    measured = {}
    for width in sizes:
        log.info("width %d: %d steps", width, cfg.train.steps)
        training = ShortTraining(at_width(cfg, width), world)
        tokens_BT = training.first_batch.micro_batches[0].tokens
        at_start = activations(training.model, tokens_BT)
        after = (activations(training.model, tokens_BT) for _ in training.losses(at_peak=True))
        measured[width] = [at_start, *after]
    found = slopes(measured)
    rows: list[tuple[str, ...]] = [("step", *KINDS)]
    rows += [(str(step), *(f"{one[k]:.2f}" for k in KINDS)) for step, one in enumerate(found)]
    facts = {"slopes": found, "sizes": measured}
    _report(cfg, rows, faults(found, TOLERANCE), facts, as_json=as_json)


@torch.no_grad()
def activations(model: Decoder, tokens_BT: Tensor) -> Magnitudes:
    """Return the sizes in a forward pass in fp32."""
    watched = {"layers.0": "embed", "norm": "residual", "": "logits"}
    for i in range(model.arch.n_layers):
        watched |= {f"layers.{i}.attn_post_norm": "attn", f"layers.{i}.mlp_post_norm": "mlp"}
    seen: dict[str, list[float]] = {kind: [] for kind in KINDS}

    def record(kind: str, _module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        activation = inputs[0] if kind in INPUTS else output
        seen[kind].append(activation.abs().mean().item())

    with ExitStack() as stack:
        for name, kind in watched.items():
            hook = model.get_submodule(name).register_forward_hook(partial(record, kind))
            stack.callback(hook.remove)
        model.eval()
        model(tokens_BT)
        model.train()
    return {kind: fmean(values) for kind, values in seen.items()}


def slopes(measured: Mapping[int, Sequence[Magnitudes]]) -> list[Magnitudes]:
    """Return, for each step, the slope of log(size) over log(width) by kind.

    `measured` holds the sizes after each step by width. A slope is NaN unless all sizes are finite
    and positive.
    """
    widths = [math.log(width) for width in measured]

    def slope(sizes: Sequence[float]) -> float:
        if not all(0.0 < size < math.inf for size in sizes):
            return math.nan
        return linear_regression(widths, [math.log(size) for size in sizes]).slope

    return [
        {kind: slope([sizes[kind] for sizes in at_step]) for kind in KINDS}
        for at_step in zip(*measured.values(), strict=True)
    ]


def faults(slopes: Sequence[Magnitudes], tolerance: float) -> list[str]:
    """Return a line per kind that grows with the width at any step, or vanishes after the last.

    Only the last step counts for vanishing: logits start as sums of random terms, which muP's
    multiplier makes as small as 1 / sqrt(width), until the head has learnt. `tolerance` is the
    largest slope that passes.
    """
    lines = []
    for kind in KINDS:
        of_steps = [math.inf if math.isnan(sizes[kind]) else sizes[kind] for sizes in slopes]
        most, step = max((slope, step) for step, slope in enumerate(of_steps))
        last = slopes[-1][kind]
        if most > tolerance:
            lines.append(f"{kind} grows as width^{most:.2f} at step {step}")
        elif last < -tolerance:
            lines.append(f"{kind} vanishes as width^{last:.2f}")
    return lines


def transfer(cfg: RunConfig, widths: str, rates: str | None, *, as_json: bool) -> None:
    """Train at several widths and learning rates, and print the final losses and the best rates.

    Raises Diverged if the best learning rate depends on the width.
    """
    cfg, sizes = _with_mup(cfg, widths)
    tried = [cfg.optim.lr * 2.0**octave for octave in OCTAVES]
    if rates is not None:
        tried = _numbers("--lrs", rates, float, "1e-3,2e-3")
    world = dist.start(Ranks(), cfg.train.device)
    losses: dict[int, dict[float, float]] = {width: {} for width in sizes}
    for width in sizes:
        for lr in tried:
            log.info("width %d, lr %.3g: %d steps", width, lr, cfg.train.steps)
            losses[width][lr] = final_loss(cfg, width, lr, world)
    best = {width: min(by_rate, key=by_rate.__getitem__) for width, by_rate in losses.items()}
    rows = [("width", *(f"{lr:.2g}" for lr in tried), "best lr")]
    rows += [
        (str(width), *(f"{loss:.3f}" for loss in losses[width].values()), f"{lr:.2g}")
        for width, lr in best.items()
    ]
    facts = {"best": best, "losses": losses}
    _report(cfg, rows, drift(best, tried), facts, as_json=as_json)


def final_loss(cfg: RunConfig, width: int, lr: float, world: World) -> float:
    """Train the run at a width with the peak rate `lr`; return its final loss in nats per token.

    The loss is infinite if the run diverges.
    """
    optim = with_rate(cfg.optim, lr)
    training = ShortTraining(at_width(cfg.model_copy(update={"optim": optim}), width), world)
    losses = torch.stack(list(training.losses()))
    loss = losses[-max(1, round(LAST * len(losses))) :].mean().item()
    return loss if math.isfinite(loss) else math.inf


def with_rate(optim: Optimizer, lr: float) -> Optimizer:
    """Return the settings with the peak rate `lr`; all other rates keep their proportion to it.

    A weight decay by horizon then follows its rate, as in a run with these settings.
    """
    scaled: Optimizer = _scaled(optim, lr / optim.lr)
    return scaled.model_copy(update={"lr": lr})


def _scaled(value: Any, factor: float) -> Any:
    """Return a value of the configuration with the keys `lr` below it multiplied by `factor`."""
    if isinstance(value, tuple):
        return tuple(_scaled(one, factor) for one in value)
    if not isinstance(value, Section):
        return value
    found = {name: _scaled(getattr(value, name), factor) for name in type(value).model_fields}
    if found.get("lr") is not None:
        found["lr"] *= factor
    return value.model_copy(update=found)


def drift(best: Mapping[int, float], tried: Sequence[float]) -> list[str]:
    """Return why the best rates by width depend on the width; nothing if they do not.

    A rate next to the best one of another width is no drift: the true optimum lies between two.
    """
    places = [tried.index(rate) for rate in best.values()]
    faults = [
        f"the best learning rate at width {width} is at the end of the grid"
        for width, place in zip(best, places, strict=True)
        if place in (0, len(tried) - 1)
    ]
    if (steps := max(places) - min(places)) > 1:
        faults.append(f"the best learning rates are {steps} places of the grid apart")
    return faults


def short_warmup(cfg: RunConfig, steps: int) -> dict[str, str]:
    """Return a shorter warm-up for runs of `steps` steps, if that of `cfg` is longer than these."""
    warmup = cfg.schedule.warmup
    most = {"steps": steps, "tokens": steps * cfg.train.global_batch_tokens}
    longer = warmup.unit in most and warmup.amount > most[warmup.unit]
    return {"schedule.warmup": "10%"} if longer else {}


def _with_mup(cfg: RunConfig, widths: str) -> tuple[RunConfig, list[int]]:
    """Return the run with muP, and the widths, at each of which the model can be built.

    The base of muP is that of the configuration, or else the narrowest of `widths`.
    """
    if not cfg.optim.supports_mup:
        raise ConfigError(
            "muP has no rule for an optimizer of your own",
            where="optim.type",
            next="check with optim.type=adamw or optim.type=muon",
        )
    found = _numbers("--widths", widths, int, "64,128,256")
    for width in found:
        at_width(cfg, width)
    if not isinstance(cfg.scaling, MupConfig):
        cfg = cfg.model_copy(update={"scaling": MupConfig(base_dim=found[0])})
    return cfg, found


def _report(
    cfg: RunConfig,
    rows: Sequence[Sequence[str]],
    faults: Sequence[str],
    facts: dict[str, Any],
    *,
    as_json: bool,
) -> None:
    """Print the table of a check, or its facts as JSON; raise Diverged if there are faults."""
    if as_json:
        verdict = {"scaling": cfg.scaling.model_dump(), "passed": not faults, "faults": faults}
        print(json.dumps(plain(verdict | facts), indent=1))
    else:
        print("\n".join("".join(f"{cell:>10}" for cell in row) for row in rows))
        print("FAIL" if faults else "pass")
    if faults:
        raise Diverged(
            "muP check failed: the model depends on its width",
            why="; ".join(faults),
            next="narrow models and few steps are noisy: try other --widths, more train.steps or "
            "lower rates (optim.lr, --lrs), and report a failure that persists",
        )


def _numbers(option: str, text: str, kind: Callable[[str], Number], example: str) -> list[Number]:
    """Parse two or more different positive numbers, such as `64,128`; return them sorted.

    Raises ConfigError for anything else.
    """
    try:
        found = sorted({kind(one) for one in text.split(",")})
    except ValueError:
        found = []
    if len(found) < 2 or not all(0 < one < math.inf for one in found):
        raise ConfigError(
            f"{option} {text}: expected two or more different positive numbers",
            next=f"separate them with commas, such as {option} {example}",
        )
    return found
