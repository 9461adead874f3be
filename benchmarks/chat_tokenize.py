"""Conversations per second from rows on disk to training data, of dtt and of TRL.

    python benchmarks/chat_tokenize.py ROWS.jsonl TOKENIZER [REPEATS]

ROWS.jsonl holds conversations, and TOKENIZER is a tokenizer.json with `<|im_start|>` and
`<|im_end|>`. dtt runs `dtt download`, `dtt tokenize` and packs samples of 2,048 tokens; TRL's
SFTTrainer loads the same file and prepares it (template, loss mask, tokens, packing) with its
defaults. Both are separate processes on the same cores, and their times include the imports. The
ids and loss masks of both must be equal, conversation by conversation, or the script fails.
Prints each time, the median rates, and their ratio: with and without the imports, and per second
of CPU time, which a busy machine changes least.
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

SEQ_LEN = 2048
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
)
"""ChatML as TRL needs it, with the answers marked."""
Found = set[tuple[tuple[int, ...], tuple[bool, ...]]]


def main() -> None:
    """Time both, compare what they made, and print the rates."""
    if sys.argv[1] in ("--trl", "--dtt"):
        (prepare_trl if sys.argv[1] == "--trl" else prepare_dtt)(*map(Path, sys.argv[2:]))
        return
    rows, tokenizer = (str(Path(argument).absolute()) for argument in sys.argv[1:3])
    repeats = int(sys.argv[3]) if len(sys.argv) > 3 else 3
    count = Path(rows).read_bytes().count(b"\n")
    times: dict[str, list[tuple[float, float, float]]] = {"dtt": [], "trl": []}
    made: dict[str, Found] = {}
    for _ in range(repeats):
        for name, found in times.items():
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, __file__, f"--{name}", rows, tokenizer, folder]
                start = time.perf_counter()
                subprocess.run(command, check=True, stdout=sys.stderr)
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
    from dtt.config.chat import ChatConfig
    from dtt.config.data import (
        DownloadConfig,
        GivenTokenizerConfig,
        SourceConfig,
        TokenizeConfig,
    )
    from dtt.data.conversations.row_encoder import Conversations
    from dtt.data.corpus.download import download
    from dtt.data.samples.token_source import open_tokens
    from dtt.data.token_file import TokenFile, mask_path
    from dtt.data.tokenize.distributed import tokenize
    from dtt.mesh.comm import Serial

    start, cpu = time.perf_counter(), time.process_time()
    download(DownloadConfig(dataset=str(rows)), folder / "corpus", rows=True)
    tokenize(
        TokenizeConfig(validation_fraction=0), GivenTokenizerConfig(path=str(tokenizer)),
        folder / "corpus", folder / "tokens", Serial(), kind=Conversations(ChatConfig()),
    )  # fmt: skip
    source = open_tokens(SourceConfig(path=folder / "tokens"), "train", seq_len=SEQ_LEN, seed=0)
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


if __name__ == "__main__":
    main()
