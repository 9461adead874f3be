"""Plots of metrics, as PNG files."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtt.base.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
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
    drawing = empty(8, 5, dpi=150)
    axes = drawing.add_subplot(
        xlabel=x_label,
        ylabel=y_label,
        xscale="log" if log_x else "linear",
        yscale="log" if log_y else "linear",
    )
    _draw(axes, curves)
    return drawing


@dataclass(frozen=True)
class Panel:
    """One plot of a grid; all x values are positive numbers."""

    title: str
    curves: Sequence[Curve]


def grid(
    rows: Sequence[Sequence[Panel]],
    x_label: str,
    y_label: str,
    *,
    log_y: bool,
    panel_width: float = 2.4,
) -> Figure:
    """Draw a grid of panels with logarithmic x axes; the panels of a column share the y axis.

    Raises the same errors as `figure`.
    """
    columns = len(rows[0])
    drawing = empty(panel_width * columns + 1.0, 2.6 * len(rows) + 0.5, dpi=80)
    all_axes = drawing.subplots(len(rows), columns, sharex=True, sharey="col", squeeze=False)
    for axes_of_row, row in zip(all_axes, rows, strict=True):
        for axes, panel in zip(axes_of_row, row, strict=True):
            axes.set(title=_plain(panel.title), xscale="log", yscale="log" if log_y else "linear")
            _draw(axes, panel.curves)
            x = sorted({x for x in panel.curves[0].x if isinstance(x, int | float)})
            axes.set_xticks(x, [f"{value:.3g}" for value in x], rotation=45, fontsize="small")
            axes.minorticks_off()
    if log_y:
        for axes in all_axes[0]:
            low, high = axes.get_ylim()  # at least a decade: small changes must look small
            wider = max(1.0, (10.0 * low / high) ** 0.5)
            axes.set_ylim(low / wider, high * wider)
    drawing.supxlabel(x_label)
    drawing.supylabel(y_label)
    return drawing


def empty(width: float, height: float, dpi: int) -> Figure:
    """Return an empty figure of `width` × `height` inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=dpi, layout="constrained")


def _draw(axes: Axes, curves: Sequence[Curve]) -> None:
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
