"""Checks of a class of a user's own, for its tests: `from dtt.testing import check`."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import chdir
from hashlib import sha256
from pathlib import Path
from typing import Any

from dtt import library
from dtt.base.files import sha256_file
from dtt.config.base import Section
from dtt.config.own import KINDS
from dtt.config.sources import Documents, Source

SMALL: Mapping[str, Any] = {
    "name": "check",
    "data": {"type": "synthetic", "vocab_size": 320},
    "model": {"dim": 32, "n_layers": 2, "n_heads": 2},
    "optim": {"type": "adamw", "lr": 1e-3},
    "schedule": {"type": "constant"},
    "train": {
        "steps": 4, "seq_len": 32, "global_batch_tokens": 256, "micro_batch": 2, "device": "cpu",
        "precision": "fp32", "log_every": 1, "eval_every": 0, "eval_tokens": 64, "sample_tokens": 0,
    },
    "checkpoint": {"every": 2, "keep_last": 10},
    "parallel": {"replicate": 2, "shard": 2},
}  # fmt: skip
"""A run of a second, on four ranks where `dtt verify` runs it."""
FEW = 64
"""Samples that two processes compare."""


def check(cls: type[Section], *overrides: str, **keys: Any) -> None:
    """Raise an error that says what is wrong with a class of one's own; takes half a minute.

    Its keys are checked. Documents are read twice, and must be the same; samples and rows in two
    processes. All but documents train a small model: a run that is resumed must equal one that is
    not, bit for bit, in weights, state and records; and, as `dtt verify` says, two ranks of DDP, of
    FSDP2, and four of both must compute what one process does. `keys` are those of the class;
    `overrides` are `KEY=VALUE` of the run.

    Raises AssertionError for a difference, and a DttError for everything else.
    """
    kind = next((key for key, base in KINDS.items() if issubclass(cls, base)), None)
    if kind is None:
        raise TypeError(f"{cls.__name__} is none of {sorted({b.__name__ for b in KINDS.values()})}")
    named = f"{inspect.getfile(cls)}:{cls.__name__}"
    section = {"family" if kind == "model" else "type": named, **keys}
    folder = Path(tempfile.mkdtemp(prefix="dtt-check-"))
    with chdir(folder):
        if issubclass(cls, Documents):
            _check_documents(section)
        else:
            value: Any = [section] if kind == "actions" else section
            path = folder / "check.yaml"
            path.write_text(json.dumps({**SMALL, kind: value}))  # which is YAML
            if issubclass(cls, Source):
                _check_samples(path, overrides)
            _check_resume(path, overrides)
            from dtt.verify import run

            cfg = library.load(str(path), *overrides).config
            run.run([(path.stem, cfg)], "cpu", as_json=False)
    shutil.rmtree(folder)  # not after an error: what it names is in there


def _check_documents(section: Mapping[str, Any]) -> None:
    from dtt.data.corpus import download

    contents = []
    for name in ("one", "other"):
        cfg = library.load({"download": {"documents": section, "out": name}})
        download.run(cfg.config)
        contents.append({p.name: sha256_file(p) for p in sorted(Path(name).glob("part-*"))})
    assert contents[0] == contents[1], "`rows` yields others when it is called again"


def samples_sha256(path: str, *overrides: str) -> str:
    """Return the hash of the first samples of a run, in the order in which it reads them."""
    from dtt.data.samples.dataset import open_dataset

    dataset = open_dataset(library.load(path, *overrides).config)
    rows = dataset.read(dataset.order(0, FEW))
    return sha256(rows.ids.tobytes() + rows.targets.tobytes()).hexdigest()


def _check_samples(path: Path, overrides: tuple[str, ...]) -> None:
    script = "import sys\nfrom dtt.testing import samples_sha256\n"
    script += "print(samples_sha256(*sys.argv[1:]))"
    found = set()
    # Other ranks hash texts otherwise: nothing may depend on the order of a set.
    for seed in "12":
        argv = [sys.executable, "-c", script, str(path), *overrides]
        env = os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"another process cannot read the samples: {done.stderr}"
        found.add(done.stdout)
    assert len(found) == 1, "another process reads other samples"


def _check_resume(path: Path, overrides: tuple[str, ...]) -> None:
    alone = ("parallel.replicate=1", "parallel.shard=1", *overrides)
    job = library.train(str(path), *alone)
    checkpoints, steps = job.path / "checkpoints", job.checkpoints
    whole = _records(job)
    last = checkpoints / f"step-{steps[-1]:06d}"
    kept = {file.name: sha256_file(file) for file in last.glob("*.safetensors")}
    for step in [step for step in steps if step > steps[0]]:
        shutil.rmtree(checkpoints / f"step-{step:06d}")
    library.train(str(job.path))
    found = {file.name: sha256_file(file) for file in last.glob("*.safetensors")}
    different = [name for name in kept if found.get(name) != kept[name]]
    assert not different, f"a resume after step {steps[0]} changes {', '.join(different)}"
    records = _records(job)
    wrong = next((pair for pair in zip(whole, records, strict=False) if pair[0] != pair[1]), None)
    assert wrong is None, f"a resume records other numbers: {wrong}"
    assert len(whole) == len(records), f"a resume records {len(records)}, not {len(whole)} records"


def _records(job: library.Job) -> list[dict[str, Any]]:
    """Return the records that do not differ between two runs of the same configuration."""
    return [
        {name: value for name, value in row.items() if name != "time" and value is not None}
        for row in job.metrics.to_pylist()
        if row["kind"] not in ("start", "perf", "save")
    ]
