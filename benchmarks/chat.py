"""Compare the preparation of conversations for training: speed, and how full samples are.

    python benchmarks/chat.py speed ROWS.jsonl TOKENIZER [--repeats 3]
    python benchmarks/chat.py packing ROWS.jsonl TOKENIZER [--seq-len 512 2048]

ROWS.jsonl holds conversations, and TOKENIZER is a tokenizer.json with `<|im_start|>` and
`<|im_end|>`.

`speed`: conversations per second from rows on disk to training data. dtt runs download, tokenize
and packs samples of 2,048 tokens; TRL's SFTTrainer loads the same file and prepares it (template,
loss mask, tokens, packing) with its defaults. Both are separate processes on the same cores. The
ids and loss masks of both must be equal, conversation by conversation, or the script fails. Prints
each time, the median rates, and their ratio: with and without the imports, and per second of CPU
time, which a busy machine changes least.

`packing`: the share of positions that hold a token, in percent, for samples of SEQ_LEN + 1 tokens:
packed by dtt, by best-fit decreasing over all rows and in batches of 1,000 rows, in order (a new
sample when the next conversation does not fit), and one conversation per sample. Conversations that
are longer than a sample are left out of all of them.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from measurement import parser_of

SEQ_LEN = 2048
BATCH = 1000
"""Rows that are packed together by trainers that pack while they map a data set."""
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
)
"""ChatML as TRL needs it, with the answers marked."""
Found = set[tuple[tuple[int, ...], tuple[bool, ...]]]


def tokenize_rows(rows: Path, tokenizer: Path, folder: Path) -> tuple[Path, float, float]:
    """Return the token folder of the rows, and the wall and CPU time after the imports.

    The imports are here because the process of TRL must not spend time on them.
    """
    from dtt.config.chat import ChatConfig
    from dtt.config.data import DownloadConfig, GivenTokenizerConfig, TokenizeConfig
    from dtt.data.conversations.row_encoder import Conversations
    from dtt.data.corpus.download import download
    from dtt.data.tokenize.distributed import tokenize
    from dtt.mesh.comm import Serial

    start, cpu = time.perf_counter(), time.process_time()
    download(DownloadConfig(dataset=str(rows)), folder / "corpus", rows=True)
    tokenize(
        TokenizeConfig(validation_fraction=0), GivenTokenizerConfig(path=str(tokenizer)),
        folder / "corpus", folder / "tokens", Serial(), kind=Conversations(ChatConfig()),
    )  # fmt: skip
    return folder / "tokens", start, cpu


# ---- speed ---------------------------------------------------------------------------------------


def compare_speed(rows: Path, tokenizer: Path, repeats: int) -> None:
    """Time both, compare what they made, and print the rates."""
    count = rows.read_bytes().count(b"\n")
    times: dict[str, list[tuple[float, float, float]]] = {"dtt": [], "trl": []}
    made: dict[str, Found] = {}
    for _ in range(repeats):
        for name, found in times.items():
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, __file__, name, str(rows), str(tokenizer)]
                start = time.perf_counter()
                subprocess.run([*command, "--out", folder], check=True, stdout=sys.stderr)
                whole = time.perf_counter() - start
                seconds, cpu = map(float, (Path(folder) / "seconds").read_text().split())
                found.append((whole, seconds, cpu))
                made[name] = _read(Path(folder) / "made.npz")
            print(
                f"{name}: {whole:.2f} s, {seconds:.2f} s without imports, {cpu:.2f} s of CPU time"
            )
    if made["dtt"] != made["trl"]:
        sys.exit(f"ids or masks differ in {len(made['dtt'] ^ made['trl'])} conversations")
    print(f"ids and masks of all {count:,} conversations are equal")
    for title, which in (("with imports", 0), ("without imports", 1), ("CPU time", 2)):
        rate = {
            name: count / statistics.median(t[which] for t in found)
            for name, found in times.items()
        }
        ratio = rate["dtt"] / rate["trl"]
        print(f"{title}: dtt {rate['dtt']:,.0f}/s, TRL {rate['trl']:,.0f}/s, ratio {ratio:.1f}")


def prepare_dtt(rows: Path, tokenizer: Path, folder: Path) -> None:
    """Tokenize and pack with dtt."""
    from dtt.config.sources import SourceConfig
    from dtt.data.samples.token_source import open_tokens
    from dtt.data.token_file import TokenFile, mask_path

    tokens, start, cpu = tokenize_rows(rows, tokenizer, folder)
    source = open_tokens(SourceConfig(path=tokens), "train", seq_len=SEQ_LEN, seed=0)
    seconds = time.perf_counter() - start, time.process_time() - cpu
    (folder / "seconds").write_text(" ".join(map(str, seconds)))
    ids, masks, lengths = [], [], []
    for shard in source.files.shards:
        file = TokenFile(shard.path.with_suffix(""))
        ids.append(file.tokens)
        masks.append(np.fromfile(mask_path(file.stem), np.uint8))
        lengths.append(file.lengths)
    _write(folder / "made.npz", *map(np.concatenate, (ids, masks, lengths)))


def prepare_trl(rows: Path, tokenizer: Path, folder: Path) -> None:
    """Prepare the same rows with TRL's SFTTrainer and a model of a few weights."""
    from datasets import disable_progress_bars, load_dataset
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    disable_progress_bars()
    tokenizers: Any = PreTrainedTokenizerFast
    fast = tokenizers(
        tokenizer_file=str(tokenizer), eos_token="<|im_end|>", pad_token="<|im_start|>",
        chat_template=TEMPLATE,
    )  # fmt: skip
    sizes = LlamaConfig(
        vocab_size=len(fast), hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1,
    )  # fmt: skip
    model = LlamaForCausalLM(sizes)
    options = SFTConfig(
        str(folder / "trl"), packing=True, max_length=SEQ_LEN + 1, assistant_only_loss=True,
        use_cpu=True, report_to="none", bf16=False, padding_free=False,
    )  # fmt: skip
    timed: list[tuple[float, float]] = []

    class Timed(SFTTrainer):
        """A trainer that times the preparation of its data."""

        def _prepare_dataset(self, *arguments: Any, **named: Any) -> Any:
            dataset = super()._prepare_dataset(*arguments, **named)
            timed.append((time.perf_counter(), time.process_time()))
            return dataset

    start, cpu = time.perf_counter(), time.process_time()
    dataset = load_dataset(
        "json", data_files=str(rows), split="train", cache_dir=str(folder / "cache")
    )
    trainer = Timed(model, options, train_dataset=dataset, processing_class=fast)
    (folder / "seconds").write_text(f"{timed[-1][0] - start} {timed[-1][1] - cpu}")
    packed: Any = trainer.train_dataset
    ids = [i for row in packed["input_ids"] for i in row]
    mask = [i != -100 for row in packed["labels"] for i in row]
    lengths = [n for row in packed["seq_lengths"] for n in row]
    _write(folder / "made.npz", np.array(ids), np.array(mask, np.uint8), np.array(lengths))


def _write(path: Path, ids: Any, mask: Any, lengths: Any) -> None:
    np.savez(path, ids=ids, mask=mask, lengths=lengths)


def _read(path: Path) -> Found:
    """Return the conversations, each with its ids and its mask."""
    made = np.load(path)
    stops = np.cumsum(made["lengths"])
    return {
        (tuple(ids.tolist()), tuple((mask != 0).tolist()))
        for ids, mask in zip(
            np.split(made["ids"], stops[:-1]), np.split(made["mask"], stops[:-1]), strict=True
        )
    }


# ---- packing -------------------------------------------------------------------------------------


def compare_packing(rows: Path, tokenizer: Path, lengths: list[int]) -> None:
    """Print a line for each length."""
    from dtt.config.sources import SourceConfig
    from dtt.data.samples.packing import best_fit
    from dtt.data.samples.token_source import open_tokens

    print(f"{rows.name}: share of positions that hold a token, in percent")
    print(
        f"{'seq_len':>8} {'dtt':>7} {'batches':>8} {'in order':>9} {'unpacked':>9} {'left out':>9}"
    )
    with tempfile.TemporaryDirectory() as folder:
        tokens, _, _ = tokenize_rows(rows, tokenizer, Path(folder))
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


def _in_batches(lengths: npt.NDArray[np.int64], capacity: int) -> int:
    from dtt.data.samples.packing import best_fit

    batches = [lengths[i : i + BATCH] for i in range(0, len(lengths), BATCH)]
    return sum(int(best_fit(batch, capacity).max()) + 1 for batch in batches)


def _in_order(lengths: npt.NDArray[np.int64], capacity: int) -> int:
    samples, room = 0, 0
    for length in lengths.tolist():
        if length > room:
            samples, room = samples + 1, capacity
        room -= length
    return samples


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("what", choices=["speed", "packing", "dtt", "trl"])
    parser.add_argument("rows", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seq-len", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--out", type=Path, help="folder of a worker, dtt or trl")
    options = parser.parse_args()
    rows, tokenizer = options.rows.absolute(), options.tokenizer.absolute()
    match options.what:
        case "speed":
            compare_speed(rows, tokenizer, options.repeats)
        case "packing":
            compare_packing(rows, tokenizer, options.seq_len)
        case "dtt":
            prepare_dtt(rows, tokenizer, options.out)
        case "trl":
            prepare_trl(rows, tokenizer, options.out)


if __name__ == "__main__":
    main()
