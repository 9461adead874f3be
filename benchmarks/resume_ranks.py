"""Measure what one of many ranks does to verify the checkpoint that a job resumes from.

    python benchmarks/resume_ranks.py [--ranks 1024] [--tensors 300]

Real files of as many writers as ranks, each with its part of every tensor and of two optimizer
states; the parts are tiny, so that headers dominate, as the hashing of large files is divided by
the number of ranks in any case. Ranks are simulated: one process does the work of one rank after
another, and what they exchange is pickled as `torch.distributed.all_gather_object` does.
"""

from __future__ import annotations

import json
import pickle
import resource
import tempfile
import time
from pathlib import Path

import torch
from measurement import parser_of

from dtt.checkpoint import header, store, tensors
from dtt.checkpoint.tensors import TensorShard

STATES = ("exp_avg", "exp_avg_sq")


def save(folder: Path, ranks: int, names: list[str]) -> store.Checkpoint:
    """Save a checkpoint in which each of `ranks` has a row of every tensor."""
    staging = folder / store.staging_name(10, 1)
    staging.mkdir(parents=True)
    written = [tensors.write_bytes(staging / store.POSITION, [json.dumps({"step": 10}).encode()])]
    row = torch.ones(1, 4)
    for rank in range(ranks):
        own = [TensorShard(name, row, (rank, 0), (ranks, 4)) for name in names]
        states = [
            TensorShard(f"{name}.{state}", row, (rank, 0), (ranks, 4))
            for name in names
            for state in STATES
        ]
        written.append(tensors.write(staging / store.rank_file(store.MODEL, rank), own))
        written.append(tensors.write(staging / store.rank_file(store.STATE, rank), states))
    facts = {"dtt": "1.0.0", "torch": torch.__version__}
    return store.commit(
        staging, written, step=10, attempt=1, world_size=ranks, config_sha256="c" * 64,
        data_key="d" * 64, versions=facts,
    )  # fmt: skip


def main() -> None:
    """Print the seconds and the memory of one rank, alone and together."""
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--tensors", type=int, default=300)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        names = [f"layers.{index}.weight" for index in range(args.tensors)]
        saved = save(Path(folder), args.ranks, names)
        files = sorted(saved.manifest.files, key=lambda file: (-file.bytes, file.path))

        start = time.perf_counter()
        for kind in (store.MODEL, store.STATE):
            paths = saved.files(kind)
            header.check({path: header.entries(path, header.opened(path, "np")) for path in paths})
        alone = time.perf_counter() - start

        start = time.perf_counter()
        parts = [
            pickle.dumps(store.verify_files(saved.path, files[rank :: args.ranks]))
            for rank in range(args.ranks)
        ]
        own = (time.perf_counter() - start) / args.ranks
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.perf_counter()
        headers: store.Headers = {}
        for part in parts:
            headers |= pickle.loads(part)
        received = time.perf_counter() - start
        start = time.perf_counter()
        store.check_headers(saved.path, headers, 0, args.ranks)
        checked = time.perf_counter() - start
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    entries = sum(len(one) for one in headers.values())
    print(f"{args.ranks} ranks, {len(files)} files, {entries:,} entries of headers")
    print(f"every rank reads all headers: {alone:.1f} s a rank, {len(files)} files opened by each")
    print(
        f"each rank reads its files: {own:.3f} s, receives {sum(map(len, parts)) / 1e6:.0f} MB "
        f"({received:.1f} s), checks its names in {checked:.1f} s; "
        f"memory at most {grown / 1024:.0f} MiB more"
    )


if __name__ == "__main__":
    main()
