"""The data that a report shows of a sweep: its table of results, and the metric over each key."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from dtt.jobs import sweep_results as results
from dtt.jobs.sweep_trials import Sweep
from dtt.track.plot import spread


def of_sweep(sweep: Sweep) -> dict[str, Any]:
    """Return the table, best row first, and a plot for each key that varies, as JSON."""
    manifest, keys = sweep.manifest, results.varied(sweep)
    rows = results.table(sweep)
    plots = []
    for key in keys if any(row.mean is not None for row in rows) else ():
        curves = results.against(sweep, rows, key)
        log_x = key in manifest.logarithmic or spread([curve.x for curve in curves])
        plots.append({"key": key, "log_x": log_x, "curves": [asdict(curve) for curve in curves]})
    return {
        "metric": manifest.metric,
        "goal": manifest.goal,
        "keys": keys,
        "rows": [
            asdict(row) | {"values": results.cells(row.values, keys), "done": len(row.done)}
            for row in rows
        ],
        "plots": plots,
    }
