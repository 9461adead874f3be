"""Plot the losses of a killed and resumed run over those of an uninterrupted one: docs/resumed.png.

    python docs/resumed.py [FILE.png]

Both runs train the model of configs/quickstart.yaml, two layers of it. One gets SIGKILL twice, and
the same command resumes it. The script fails if any loss differs.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image

from dtt.track.plot import save

STEPS, SAVED_EVERY = 300, 50
KILLED_AFTER = (130, 240)
"""Steps after which the process is killed: 30 and 40 steps after its newest checkpoint."""
RUN = (
    "-c", "quickstart", f"train.steps={STEPS}", f"checkpoint.every={SAVED_EVERY}",
    "model.n_layers=2", "train.log_every=10", "train.eval_every=0",
)  # fmt: skip


def losses(folder: Path, name: str) -> list[float]:
    """Return the training losses that the metrics of a job have, one per step."""
    path = folder / "jobs" / name / "metrics.jsonl"
    if not path.exists():
        return []
    complete = [line for line in path.read_text().splitlines(keepends=True) if line[-1] == "\n"]
    records = [json.loads(line) for line in complete]
    return [record["loss"] for record in records if record["kind"] == "train"]


def train(folder: Path, name: str, killed_after: int | None = None) -> int:
    """Train, or resume; kill the process after a step, and return the last step it logged."""
    command = [sys.executable, "-m", "dtt.main", "train", *RUN, f"name={name}"]
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.DEVNULL)
    while process.poll() is None:
        if killed_after is not None and len(losses(folder, name)) >= killed_after:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        time.sleep(0.02)
    assert killed_after is not None or process.returncode == 0
    return len(losses(folder, name))


def main() -> None:
    """Train both runs, compare them and save the picture."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for step in ("download", "tokenize"):
            subprocess.run([sys.executable, "-m", "dtt.main", step, *RUN], cwd=folder, check=True)
        train(folder, "uninterrupted")
        kills = [train(folder, "interrupted", after) for after in KILLED_AFTER]
        train(folder, "interrupted")
        plain, resumed = losses(folder, "uninterrupted"), losses(folder, "interrupted")
    assert len(plain) == STEPS
    assert plain == resumed, "the runs differ"
    drawing = Figure(figsize=(7.2, 3.2), dpi=100, layout="constrained")
    axes = drawing.subplots()
    axes.plot(range(1, STEPS + 1), plain, color="#f4a261", linewidth=5, label="uninterrupted")
    axes.plot(
        range(1, STEPS + 1), resumed, color="#1d3557", linewidth=1.1, label="killed and resumed"
    )
    for index, killed in enumerate(kills):
        label = "SIGKILL" if index == 0 else None
        axes.axvline(killed, color="#c1121f", linestyle="--", linewidth=1, label=label)
    axes.set(xlabel="step", ylabel="training loss (nats)", xlim=(0, STEPS))
    axes.set_title(f"{STEPS} losses, {STEPS} equal to the last bit", fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    default = Path(__file__).with_name("resumed.png")
    path = save(drawing, Path(sys.argv[1]) if len(sys.argv) > 1 else default)
    Image.open(path).quantize(64).save(path, optimize=True)
    print(f"killed after steps {kills}; all losses are equal; {path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
