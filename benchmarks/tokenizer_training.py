"""Measure the time to train a tokenizer: dtt and its peers on the same text, one core each.

    python benchmarks/tokenizer_training.py [MEGABYTES] [VOCABULARY] [ROUNDS]

The text is the beginning of the novels in `$DTT_SHARED/data` (`../shared` by default); the
pre-tokenizer is GPT-2's. Each tool runs in a separate process (`dtt, 2 ranks` in two, on two
cores), in interleaved rounds. Figures are medians of the training from text in memory, and of the
complete process, which also imports and reads. Merges are compared with those of Hugging Face's
`tokenizers`. Peers that are not installed beside dtt are left out.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from jobs import SHARED_DATA
from measurement import Table, column_medians, in_turns
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|endoftext|>"
ONE_CORE = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
GPT2 = (
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"  # rustbpe's
)
TOOLS = {
    "dtt": None, "dtt, 2 ranks": None, "tokenizers": "tokenizers",
    "gigatoken": "gigatoken", "rustbpe": "rustbpe",
}  # fmt: skip


# ---- the tools, each in a separate process -------------------------------------------------------


def dtt(folder: Path, vocab_size: int) -> tuple[float, list[list[str]] | None]:
    """Train as `dtt tokenize` does; return the seconds and, on rank 0, the merges."""
    from dtt.base.ranks import Ranks
    from dtt.config.data import TrainedTokenizerConfig
    from dtt.data.corpus.document_sampling import tokenizer_sample
    from dtt.data.corpus.units import Corpus
    from dtt.data.text.pretokens import count_pre_tokens, sum_over_ranks
    from dtt.data.text.tokenizer import train_tokenizer
    from dtt.mesh.comm import open_comm

    comm = open_comm(Ranks.detect(), folder / "rendezvous")
    cfg = TrainedTokenizerConfig(vocab_size=vocab_size, train_bytes=10**12)
    corpus = Corpus(folder / "corpus")
    units = corpus.units(corpus.unit_bytes())
    batches = list(tokenizer_sample(corpus, units, 10**12, 0.0, comm, lambda amount: None))
    comm.barrier()
    start = time.perf_counter()
    counts = count_pre_tokens("gpt2", batches)
    counts = sum_over_ranks(counts, comm, folder)
    content = train_tokenizer(cfg, counts) if comm.rank == 0 else None
    seconds = time.perf_counter() - start
    comm.close()
    return seconds, json.loads(content)["model"]["merges"] if content else None


def texts_of(folder: Path) -> list[str]:
    """Return the documents in memory."""
    texts: list[str] = pq.read_table(folder / "texts.parquet").column("text").to_pylist()
    return texts


def by_tokenizers(folder: Path, vocab_size: int) -> tuple[float, list[list[str]]]:
    """Train with Hugging Face's `tokenizers`."""
    texts = texts_of(folder)
    start = time.perf_counter()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    content = tokenizer.to_str()
    seconds = time.perf_counter() - start
    return seconds, json.loads(content)["model"]["merges"]


def by_gigatoken(folder: Path, vocab_size: int) -> tuple[float, list[list[str]]]:
    """Train with gigatoken."""
    import gigatoken

    texts = texts_of(folder)
    start = time.perf_counter()
    path = folder / "gigatoken.txt"  # gigatoken trains from files
    path.write_text(END.join(texts))
    source = gigatoken.TextFileSource([str(path)], separator=END)
    _, merges = gigatoken.train_bpe(source, vocab_size, [END])
    seconds = time.perf_counter() - start
    return seconds, [[as_text(left), as_text(right)] for left, right in merges]


def by_rustbpe(folder: Path, vocab_size: int) -> tuple[float, list[list[str]]]:
    """Train with rustbpe, which exposes only the merged tokens: each merge is `['', token]`."""
    rustbpe = importlib.import_module("rustbpe")
    texts = texts_of(folder)
    start = time.perf_counter()
    tokenizer = rustbpe.Tokenizer()
    tokenizer.train_from_iterator(iter(texts), vocab_size - 1, pattern=GPT2)
    seconds = time.perf_counter() - start
    tokens = (token for token, _ in tokenizer.get_mergeable_ranks()[256:])
    return seconds, [["", as_text(token)] for token in tokens]


VISIBLE = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
REMAINING = [byte for byte in range(256) if byte not in VISIBLE]
ALPHABET = {b: chr(b) for b in VISIBLE} | {b: chr(256 + i) for i, b in enumerate(REMAINING)}


def as_text(token: bytes) -> str:
    """Return bytes in the alphabet of `ByteLevel`."""
    return "".join(ALPHABET[byte] for byte in token)


# ---- the comparison ------------------------------------------------------------------------------


def command(tool: str, folder: Path, vocab_size: int) -> list[str]:
    """Return the command that trains with a tool."""
    ranks = 2 if "2 ranks" in tool else 1
    mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    launcher = [str(mpirun), "-n", str(ranks)] if ranks > 1 else []
    return [*launcher, sys.executable, __file__, "--tool", tool, str(folder), str(vocab_size)]


def train(tool: str, folder: Path, vocab_size: int) -> None:
    """Train with a tool in this process and write the seconds and the merges to a file."""
    peers = {"tokenizers": by_tokenizers, "gigatoken": by_gigatoken, "rustbpe": by_rustbpe}
    seconds, merges = peers.get(tool, dtt)(folder, vocab_size)
    if merges is not None:
        (folder / "result.json").write_text(json.dumps([seconds, merges]))


def prepare(folder: Path, size: int) -> int:
    """Write the first `size` bytes of the novels as Parquet and as a dtt corpus.

    Documents are not cut; return the actual size in bytes.
    """
    from dtt.config.data import DownloadConfig
    from dtt.data.corpus.download import download

    texts: list[str] = []
    for path in sorted((SHARED_DATA / "novels").glob("train-*.parquet")):
        for text in pq.read_table(path).column("text").to_pylist():
            if size > 0:
                texts.append(text)
                size -= len(text.encode())
    table = pa.table({"text": texts})
    pq.write_table(table, folder / "texts.parquet", row_group_size=len(texts) // 16 + 1)
    download(DownloadConfig(dataset=str(folder / "texts.parquet")), folder / "corpus")
    return sum(len(text.encode()) for text in texts)


def bytes_per_token(tokenizer: Tokenizer) -> float:
    """Return the bytes per token of a tokenizer on the held-out novels."""
    paths = (SHARED_DATA / "novels").glob("val-*.parquet")
    texts = [text for path in paths for text in pq.read_table(path).column("text").to_pylist()]
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return sum(len(t.encode()) for t in texts) / sum(len(encoding.ids) for encoding in encodings)


def tokenizer_of(merges: list[list[str]]) -> Tokenizer:
    """Return a byte-level BPE tokenizer with these merges."""
    vocabulary = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for left, right in merges:
        vocabulary.setdefault(left + right, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocabulary, [(left, right) for left, right in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def agreement(merges: list[list[str]], reference: list[list[str]]) -> str:
    """Return `equal`, or how many of the first merges are; rustbpe's are compared as tokens."""
    tokens, expected = (["".join(pair) for pair in pairs] for pairs in (merges, reference))
    if merges == reference or (not merges[0][0] and tokens == expected):
        return "equal"
    pairs = enumerate(zip(tokens, expected, strict=False))
    return f"first {next((i for i, (a, b) in pairs if a != b), len(merges)):,} equal"


def timed(tool: str, folder: Path, vocab_size: int) -> tuple[float, float, list[list[str]]]:
    """Run a tool; return the seconds of training and of the process, and the merges."""
    argv = command(tool, folder, vocab_size)
    start = time.perf_counter()
    subprocess.run(argv, check=True, capture_output=True, env=os.environ | ONE_CORE)
    process = time.perf_counter() - start
    training, merges = json.loads((folder / "result.json").read_text())
    return training, process, merges


def main() -> None:
    megabytes = float(sys.argv[1]) if len(sys.argv) > 1 else 14.6
    vocab_size = int(sys.argv[2]) if len(sys.argv) > 2 else 16384
    rounds = int(sys.argv[3]) if len(sys.argv) > 3 else 5
    tools = [tool for tool, module in TOOLS.items() if not module or find_spec(module)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = prepare(folder, int(megabytes * 1e6))
        runs = {tool: partial(timed, tool, folder, vocab_size) for tool in tools}
        results = in_turns(runs, rounds, warm_up=0)
    merges = {tool: result[-1][2] for tool, result in results.items()}
    medians = {
        tool: column_medians((training, process) for training, process, _ in result)
        for tool, result in results.items()
    }
    print(f"{size / 1e6:.1f} MB of novels, vocabulary of {vocab_size}, {rounds} rounds, seconds")
    columns = {"training": 9, "ratio": 8, "process": 9, "ratio ": 8, "  merges": 8}
    table = Table("", 16, columns)
    for tool, (training, process) in medians.items():
        ratios = training / medians["dtt"][0], process / medians["dtt"][1]
        cells = f"{training:.2f}", f"{ratios[0]:.2f}", f"{process:.2f}", f"{ratios[1]:.2f}"
        table.row(tool, *cells, note=agreement(merges[tool], merges["tokenizers"]))
    print("bytes per token on held-out novels:", end="")
    print(f" dtt {bytes_per_token(tokenizer_of(merges['dtt'])):.3f},", end="")
    gpt2 = Tokenizer.from_file(str(SHARED_DATA / "tokenizers/gpt2/tokenizer.json"))
    print(f" GPT-2 (vocabulary of {gpt2.get_vocab_size()}) {bytes_per_token(gpt2):.3f}")


if __name__ == "__main__":
    if "--tool" in sys.argv:
        train(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
    else:
        main()
