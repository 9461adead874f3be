"""Pictures of what was measured, as PNG files."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtt.errors import EnvironmentUnfit
from dtt.runtime.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_IN_LEGEND = 12


@dataclass(frozen=True)
class Curve:
    """Points that are joined; `x` holds numbers, or words for an axis of categories."""

    label: str
    x: Sequence[float | str]
    y: Sequence[float]
    error: Sequence[float] = ()
    """Half the height of the bar at each point; 0 for none."""


def figure(
    curves: Sequence[Curve], x_label: str, y_label: str, *, log_x: bool, log_y: bool
) -> Figure:
    """Draw curves over one pair of axes; EnvironmentUnfit without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise EnvironmentUnfit(
            "plots need matplotlib", why="it is not installed", next="pip install 'dtt[plot]'"
        ) from None
    drawing = Figure(figsize=(8, 5), dpi=150, layout="constrained")
    axes = drawing.add_subplot(
        xlabel=x_label,
        ylabel=y_label,
        xscale="log" if log_x else "linear",
        yscale="log" if log_y else "linear",
    )
    words = not all(isinstance(x, int | float) for curve in curves for x in curve.x)
    for number, curve in enumerate(curves):
        # A label that begins with `_` stays out of the legend.
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
    """Text in which matplotlib finds no formula."""
    return text.replace("$", r"\$")


def spread(groups: Iterable[Sequence[Any]]) -> bool:
    """Whether values ask for a logarithmic axis.

    They do if all are above zero and the largest is more than 100 times the smallest.
    """
    values = [value for group in groups for value in group]
    numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in values)
    return bool(values) and numbers and 0 < 100 * min(values) < max(values)


def save(drawing: Figure, path: Path) -> Path:
    """Write a figure as PNG; returns where."""
    png = io.BytesIO()
    drawing.savefig(png, format="png")
    write_atomically(path, png.getvalue())
    return path
