"""How full samples of packed conversations are, beside other ways to make samples of them.

    python benchmarks/chat_packing.py ROWS.jsonl TOKENIZER [SEQ_LEN …]

ROWS.jsonl holds conversations, and TOKENIZER is a tokenizer.json with `<|im_start|>` and
`<|im_end|>`. Prints the share of positions that hold a token, in percent, for samples of
SEQ_LEN + 1 tokens: packed by dtt, by best-fit decreasing over all rows and in batches of 1,000
rows, in order (a new sample when the next conversation does not fit), and one conversation per
sample. Conversations that are longer than a sample are left out of all of them.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dtt.config.data import SourceConfig
from dtt.data.samples.packing import best_fit
from dtt.data.samples.token_source import open_tokens

BATCH = 1000
"""Rows that are packed together by trainers that pack while they map a data set."""


def main() -> None:
    """Tokenize the rows, and print a line for each length."""
    rows, tokenizer = Path(sys.argv[1]).absolute(), Path(sys.argv[2]).absolute()
    lengths = list(map(int, sys.argv[3:])) or [512, 2048]
    print(f"{rows.name}: share of positions that hold a token, in percent")
    print(
        f"{'seq_len':>8} {'dtt':>7} {'batches':>8} {'in order':>9} {'unpacked':>9} {'left out':>9}"
    )
    with tempfile.TemporaryDirectory() as folder:
        tokens = _tokenize(rows, tokenizer, Path(folder))
        for seq_len in lengths:
            source = open_tokens(SourceConfig(path=tokens), "train", seq_len=seq_len, seed=0)
            assert source.packing_counts is not None
            conversations = np.concatenate(
                [np.diff(shard.documents().bounds()) for shard in source.files.shards]
            )
            fitting = conversations[conversations <= seq_len + 1]
            assert fitting.sum() == source.tokens
            capacity = seq_len + 1
            samples = [
                len(source), int(best_fit(fitting, capacity).max()) + 1,
                _in_batches(fitting, capacity), _in_order(fitting, capacity), len(fitting),
            ]  # fmt: skip
            full = [f"{100 * source.tokens / (count * capacity):>9.2f}" for count in samples]
            print(f"{seq_len:>9} {' '.join(full)} {source.packing_counts.too_long:>9}")


def _tokenize(rows: Path, tokenizer: Path, folder: Path) -> Path:
    keys = [
        "data.type=chat", f"download.out={folder / 'corpus'}", f"tokenize.out={folder / 'tokens'}",
        "tokenizer.type=file", f"tokenizer.path={tokenizer}", "tokenize.validation_fraction=0",
    ]  # fmt: skip
    for command in (["download", "-d", str(rows)], ["tokenize"]):
        subprocess.run([sys.executable, "-m", "dtt.main", *command, *keys], check=True)
    return folder / "tokens"


def _in_batches(lengths: npt.NDArray[np.int64], capacity: int) -> int:
    batches = [lengths[i : i + BATCH] for i in range(0, len(lengths), BATCH)]
    return sum(int(best_fit(batch, capacity).max()) + 1 for batch in batches)


def _in_order(lengths: npt.NDArray[np.int64], capacity: int) -> int:
    samples, room = 0, 0
    for length in lengths.tolist():
        if length > room:
            samples, room = samples + 1, capacity
        room -= length
    return samples


if __name__ == "__main__":
    main()
