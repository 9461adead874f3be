"""Write the curves of runs as one HTML page with plotly, with all of their points.

    python benchmarks/report_peers.py OUT.html METRICS.jsonl...

Needs only plotly and numpy. report_speed.py starts it with the interpreter that has plotly. When
the page is drawn, it sets `data-ready` of its root element, as a page of `dtt report` does, and
defines `changeAxis()`, which draws all curves over tokens instead of steps.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CURVES = {
    "train": ("loss", "lr", "grad_norm"),
    "perf": ("tokens_per_second", "memory_gb"),
}
READY = """
const graph = document.getElementById("{plot_id}");
window.changeAxis = () => {
    const steps = graph._fullData.map(curve => curve.x);
    return Plotly.restyle(graph, {x: steps.map(x => Float64Array.from(x, step => 524288 * step))});
};
document.documentElement.dataset.ready = "1";
"""


def curves(path: Path) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name, steps and values of each curve; numpy arrays make the smallest page."""
    import numpy as np

    columns: dict[str, list[list[float]]] = {kind: [] for kind in CURVES}
    with path.open() as file:
        for line in file:
            record = json.loads(line)
            if names := CURVES.get(record["kind"]):
                columns[record["kind"]].append([record["step"], *(record[n] for n in names)])
    for kind, names in CURVES.items():
        table = np.array(columns.pop(kind))
        for position, name in enumerate(names, 1):
            yield name, table[:, 0].astype(np.int32), table[:, position]


def main() -> None:
    from plotly.graph_objects import Scatter
    from plotly.subplots import make_subplots

    out, *metrics = map(Path, sys.argv[1:])
    rows = [name for names in CURVES.values() for name in names]
    figure = make_subplots(rows=len(rows), cols=1, subplot_titles=rows)
    for path in metrics:
        for name, steps, values in curves(path):
            curve = Scatter(x=steps, y=values, mode="lines", name=path.parent.name)
            figure.add_trace(curve, row=rows.index(name) + 1, col=1)
    figure.update_layout(height=400 * len(rows))
    figure.write_html(out, include_plotlyjs=True, post_script=READY)


if __name__ == "__main__":
    main()
