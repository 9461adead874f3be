"""Plots of metrics, as PNG files."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtt.base.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_IN_LEGEND = 12


@dataclass(frozen=True)
class Curve:
    """A line plot; `x` holds numbers, or strings for a categorical axis."""

    label: str
    x: Sequence[float | str]
    y: Sequence[float]
    error: Sequence[float] = ()
    """Half the height of the error bar at each point, 0 for no bar; empty for no error bars."""


def figure(
    curves: Sequence[Curve], x_label: str, y_label: str, *, log_x: bool, log_y: bool
) -> Figure:
    """Draw curves into one plot; EnvironmentUnfit without matplotlib."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(8, 5), dpi=150, layout="constrained")
    axes = drawing.add_subplot(
        xlabel=x_label,
        ylabel=y_label,
        xscale="log" if log_x else "linear",
        yscale="log" if log_y else "linear",
    )
    words = not all(isinstance(x, int | float) for curve in curves for x in curve.x)
    for number, curve in enumerate(curves):
        # matplotlib omits labels that start with `_` from the legend.
        label = _plain(curve.label) if number < MOST_IN_LEGEND else "_"
        x = [_plain(str(value)) for value in curve.x] if words else list(curve.x)
        if curve.error:
            axes.errorbar(x, curve.y, yerr=curve.error, label=label, marker="o", capsize=3)
        else:
            axes.plot(x, curve.y, label=label)
    if any(curve.label for curve in curves):
        more = len(curves) - MOST_IN_LEGEND
        axes.legend(fontsize="small", title=f"and {more} more" if more > 0 else None)
    axes.grid(alpha=0.3)
    return drawing


def _plain(text: str) -> str:
    """Escape `$`, so that matplotlib does not parse formulas in the text."""
    return text.replace("$", r"\$")


def spread(groups: Iterable[Sequence[Any]]) -> bool:
    """Return True if the values need a logarithmic axis.

    That is the case if all are positive and the largest is more than 100 times the smallest.
    """
    values = [value for group in groups for value in group]
    numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in values)
    return bool(values) and numbers and 0 < 100 * min(values) < max(values)


def save(drawing: Figure, path: Path) -> Path:
    """Write a figure as PNG, and return `path`."""
    png = io.BytesIO()
    drawing.savefig(png, format="png")
    write_atomically(path, png.getvalue())
    return path
