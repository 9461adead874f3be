"""Time, memory and noise of `dtt verify` for the shipped configurations.

    python benchmarks/verify.py [NAME…] [--keys parallel.shard=2 …]

Released models are not read: their `model` section is that of configs/models.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import yaml

from dtt.config.load import resolve, stage_names
from dtt.config.shipped import shipped_configs
from dtt.verify import run

FOLDERS = "", "pretrain", "sft", "dpo"
PARTS = "full", "lora"
"""Common parts of the recipes, which name no model."""


def shipped() -> Iterator[str]:
    """Yield the names of the configurations that a run can start from."""
    for folder in FOLDERS:
        for path in sorted((shipped_configs() / folder).glob("*.yaml")):
            if path.stem not in PARTS:
                yield str(path.relative_to(shipped_configs()))


def model_of(name: str, _source: str) -> Mapping[str, Any]:
    """Return the model section of a recipe: its name is MODEL-full or MODEL-lora."""
    stem = Path(name).stem.rpartition("-")[0]
    section: Mapping[str, Any] = yaml.safe_load(
        (shipped_configs() / f"models/{stem}.yaml").read_text()
    )["model"]
    return section


@contextmanager
def peak_memory() -> Iterator[list[float]]:
    """Yield a list whose last element is the peak memory in GB of this process and its children.

    Pages that forked processes share count once.
    """
    peak, ended = [0.0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.3):
            total = 0
            for process in (me, *me.children(recursive=True)):
                try:
                    total += process.memory_full_info().pss
                except psutil.Error:  # it has ended meanwhile
                    continue
            peak[0] = max(peak[0], total / 1e9)

    me = psutil.Process()
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()


def main() -> None:
    """Verify the configurations and print a line for each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--keys", nargs="*", default=[])
    given = parser.parse_args()
    print(f"{'configuration':<30} layouts  seconds      GB        G        U        X", flush=True)
    inputs: dict[str, Path] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in given.names or shipped():
            for stage in stage_names(name) or (None,):
                resolved = resolve(
                    name, given.keys, env={}, model_of=partial(model_of, name), stage=stage
                )
                case = Path(folder, f"{name}-{stage}".replace("/", "-"))
                with peak_memory() as peak:
                    found = run.verify(
                        name, resolved.config, case, partial(run.layout_runs, inputs)
                    )
                noise = {
                    letter: max(one.noise.get(letter, 0.0) for one in found.found.values())
                    for letter in "GUX"
                }
                ended = "" if found.failed is None else f"  {found.failed.name} DIFFERS"
                print(
                    f"{name + (f' {stage}' if stage else ''):<30} {len(found.found):>7} "
                    f"{found.seconds:>8.0f} {peak[0]:>7.1f}"
                    + "".join(f" {size:>8.0e}" for size in noise.values())
                    + ended,
                    flush=True,
                )


if __name__ == "__main__":
    main()
