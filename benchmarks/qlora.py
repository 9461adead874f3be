"""Learning of LoRA on weights in 4 bits beside LoRA on unquantised ones, with dtt and with TRL.

    python benchmarks/qlora.py ROWS.jsonl [--seeds 5] [--steps 50] [--dim 128]

Both adapt the same model, which was trained on the texts of the rows, with the same rank, scale,
batch, learning rate and AdamW, in fp32 on one core of a CPU. TRL's base in 4 bits is that of
bitsandbytes, nf4 with double quantisation. A row holds one conversation. For each seed, which
determines the order of the rows and the initial adapter, it prints the mean loss of the last ten
steps; then the differences of the two bases, of each seed by itself.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from adapter import ALPHA, RANK, TEMPLATE, prepare, settings

from dtt.track import jsonl
from dtt.train import run
from dtt.verify import forked_ranks

SEQ_LEN, ROWS, LR, BETAS = 384, 4, 1e-3, (0.9, 0.999)
BASE = (
    "train.steps=200", "model.n_layers=4", "tokenizer.vocab_size=2048", f"train.seq_len={SEQ_LEN}",
    f"train.global_batch_tokens={ROWS * SEQ_LEN}", f"train.micro_batch={ROWS}",
    "train.eval_every=0",
)  # fmt: skip
LAST = 10
"""Steps at the end whose losses are averaged."""


def train(*keys: str) -> None:
    """Train as `dtt train` does."""
    run.run(None, keys, (), None)


def ours(folder: Path, seed: int, steps: int, *, nf4: bool) -> list[float]:
    """Train an adapter with dtt; return the loss of each step."""
    name = f"{'nf4' if nf4 else 'lora'}-{seed}"
    keys = [key for key in settings(steps) if not key.startswith("name=")]
    own = [
        f"name={name}", f"seed={seed}", f"adapter.base={'nf4' if nf4 else 'unquantized'}",
        f"train.seq_len={SEQ_LEN}", f"train.global_batch_tokens={ROWS * SEQ_LEN}",
        f"train.micro_batch={ROWS}", "data.packing=none", "track=[]",
        f"optim={{type: adamw, lr: {LR}, betas: {list(BETAS)}, weight_decay: 0.0}}",
        "schedule={type: constant, warmup: 0}",
    ]  # fmt: skip
    # Forked: most of a run of this size would be the import of torch.
    ended = forked_ranks.run(folder, 1, train, *keys, *own, log=name)
    if ended.code != 0:
        sys.exit(ended.text)
    records = jsonl.read(folder / "jobs" / name / "metrics.jsonl")
    return [record["loss"] for record in records if record["kind"] == "train"]


def theirs(folder: Path, seed: int, steps: int, *, nf4: bool) -> list[float]:
    """Train an adapter with TRL, PEFT and bitsandbytes; return the loss of each step."""
    import torch
    from datasets import load_dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    torch.set_num_threads(1)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "exports/base")
    tokenizer.chat_template, tokenizer.pad_token = TEMPLATE, "<|im_start|>"
    quantization = BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )  # fmt: skip
    load: Any = AutoModelForCausalLM.from_pretrained
    model = load(
        folder / "exports/base", dtype=torch.float32,
        **({"quantization_config": quantization} if nf4 else {}),
    )  # fmt: skip
    rows = load_dataset(
        "json", data_files=str(folder / "rows.jsonl"), split="train", cache_dir=str(folder / "c")
    )
    options = SFTConfig(
        str(folder / "trl"), max_length=SEQ_LEN, assistant_only_loss=True, use_cpu=True,
        report_to="none", bf16=False, max_steps=steps, per_device_train_batch_size=ROWS,
        learning_rate=LR, lr_scheduler_type="constant", save_strategy="no", disable_tqdm=True,
        logging_steps=1, gradient_checkpointing=False, seed=seed, adam_beta1=BETAS[0],
        adam_beta2=BETAS[1], weight_decay=0.0, max_grad_norm=1.0,
    )  # fmt: skip
    lora = LoraConfig(
        r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules="all-linear",
        task_type="CAUSAL_LM",
    )  # fmt: skip
    trainer = SFTTrainer(
        model, options, train_dataset=rows, processing_class=tokenizer, peft_config=lora
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    """Prepare, train, and print a line for each seed and one for each program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--dim", type=int, default=128)
    given = parser.parse_args()
    found: dict[str, list[float]] = {"dtt": [], "TRL": []}
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name), given.rows, given.dim, *BASE)
        for seed in range(given.seeds):
            for program, trained in (("dtt", ours), ("TRL", theirs)):
                losses = [trained(Path(name), seed, given.steps, nf4=nf4) for nf4 in (False, True)]
                lora, nf4 = (statistics.mean(one[-LAST:]) for one in losses)
                found[program].append(nf4 - lora)
                print(
                    f"seed {seed}, {program}: first {losses[0][0]:.4f}, LoRA {lora:.4f}, "
                    f"QLoRA {nf4:.4f} ({nf4 - lora:+.4f})",
                    flush=True,
                )
    for program, differences in found.items():
        mean, deviation = statistics.mean(differences), statistics.stdev(differences)
        print(f"{program}: QLoRA - LoRA {mean:+.5f}, standard deviation {deviation:.5f}")


if __name__ == "__main__":
    main()
