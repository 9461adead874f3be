"""The data that a report shows of a sweep: its table of results, and the metric over each key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dtt.jobs import sweep_results as results
from dtt.jobs.sweep_results import ResultRow
from dtt.jobs.sweep_trials import Sweep
from dtt.track.plot import spread


def of_sweep(sweep: Sweep) -> dict[str, Any]:
    """Return the table, best row first, and a plot for each key that varies, as JSON."""
    manifest, keys = sweep.manifest, results.varied(sweep)
    rows = results.table(sweep)
    return {
        "metric": manifest.metric,
        "goal": manifest.goal,
        "keys": keys,
        "rows": [
            {
                "values": results.cells(row.values, keys),
                "trials": list(row.trials),
                "done": len(row.done),
                "mean": row.mean,
                "error": row.error,
            }
            for row in rows
        ],
        "plots": [_plot(sweep, rows, key) for key in keys] if _has_result(rows) else [],
    }


def _has_result(rows: Sequence[ResultRow]) -> bool:
    return any(row.mean is not None for row in rows)


def _plot(sweep: Sweep, rows: Sequence[ResultRow], key: str) -> dict[str, Any]:
    found = results.against(sweep, rows, key)
    return {
        "key": key,
        "log_x": key in sweep.manifest.logarithmic or spread([curve.x for curve in found]),
        "curves": [
            {"label": curve.label, "x": list(curve.x), "y": list(curve.y),
             "error": list(curve.error)}
            for curve in found
        ],
    }  # fmt: skip
