"""Plot every learning-rate schedule as one picture: docs/schedules.png.

    python docs/schedules.py [FILE.png]

The left half shows each type over a run of 1,000 steps, the right half every shape of a WSD decay.
The rates are those that training uses, one point per step.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from dtt.config.schedule import Schedule
from dtt.optim.lr_curves import (
    ConstantConfig,
    CosineConfig,
    InverseSqrtConfig,
    LinearConfig,
    WsdConfig,
)
from dtt.optim.resolved_schedule import resolve_schedule
from dtt.track.plot import save

STEPS = 1000
TYPES: dict[str, Schedule] = {
    "constant": ConstantConfig(warmup=100),
    "linear": LinearConfig(warmup=100),
    "cosine, floor 0.1": CosineConfig(warmup=100),
    "inverse-sqrt": InverseSqrtConfig(warmup=100),
    "wsd, decay 20%": WsdConfig(warmup=100),
}
SHAPES: dict[str, Schedule] = {
    "1-sqrt": WsdConfig(decay=1.0),
    "linear": WsdConfig(decay=1.0, shape="linear"),
    "cosine": WsdConfig(decay=1.0, shape="cosine"),
    "exponential, floor 0.05": WsdConfig(decay=1.0, shape="exponential", floor=0.05),
}


def draw(axes: Axes, configs: Mapping[str, Schedule]) -> None:
    """Plot a curve for each schedule, and print its first and last value."""
    for name, config in configs.items():
        schedule = resolve_schedule(config, STEPS, lambda step: step)
        rates = [schedule.multiplier(step) for step in range(STEPS)]
        axes.plot(range(1, STEPS + 1), rates, label=name, linewidth=1.2)
        print(f"{name:<24} step 1: {rates[0]:.4f}  step {STEPS}: {rates[-1]:.4f}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def main() -> None:
    """Plot both halves and save the picture."""
    default = Path(__file__).with_name("schedules.png")
    drawing = Figure(figsize=(9, 3.4), dpi=100, layout="constrained")
    left, right = drawing.subplots(1, 2, sharey=True)
    left.set(title="type", xlabel="step", ylabel="share of the peak rate")
    right.set(title="shape of a wsd decay", xlabel="step of the decay")
    draw(left, TYPES)
    draw(right, SHAPES)
    path = save(drawing, Path(sys.argv[1]) if len(sys.argv) > 1 else default)
    Image.open(path).quantize(64).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
