"""Learning of LoRA on weights in 4 bits beside LoRA on unquantised ones, with dtt and with TRL.

    python benchmarks/qlora.py ROWS.jsonl [--seeds 5] [--steps 50] [--dim 128]

Both adapt the same model, which was trained on the texts of the rows, with the same rank, scale,
batch, learning rate and AdamW, in fp32 on one core of a CPU. TRL's base in 4 bits is that of
bitsandbytes, nf4 with double quantisation. A row holds one conversation; a tenth is held out. For
each seed, which determines the order of the rows and the initial adapter, it prints dtt's loss of
the held-out rows before and after, and TRL's mean loss of the first and last ten steps: after an
evaluation, its adapters on 4 bits learnt nothing on a CPU. Then come the differences of
the two bases, of each seed by itself.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from adapter import ALPHA, RANK, TEMPLATE, dtt, prepare, settings

from dtt.track import jsonl
from dtt.train import run
from dtt.verify import forked_ranks

SEQ_LEN, ROWS, LR, BETAS = 384, 4, 3e-3, (0.9, 0.999)
BASE = (
    "train.steps=60", "model.n_layers=4", "tokenizer.vocab_size=2048", f"train.seq_len={SEQ_LEN}",
    f"train.global_batch_tokens={ROWS * SEQ_LEN}", f"train.micro_batch={ROWS}",
    "train.eval_every=0",
)  # fmt: skip
HELD_OUT = 0.1


def chat_keys(steps: int) -> list[str]:
    """Return the settings of dtt, with rows that are held out."""
    keys = [k for k in settings(steps) if not k.startswith(("name=", "tokenize.val", "train.eval"))]
    return [*keys, f"tokenize.validation_fraction={HELD_OUT}"]


def train(*keys: str) -> None:
    """Train as `dtt train` does."""
    run.run(None, keys, (), None)


def ours(folder: Path, seed: int, steps: int, *, nf4: bool) -> list[float]:
    """Train an adapter with dtt; return the loss of held-out rows before and after."""
    name = f"{'nf4' if nf4 else 'lora'}-{seed}"
    own = [
        f"name={name}", f"seed={seed}", f"adapter.base={'nf4' if nf4 else 'unquantized'}",
        f"train.seq_len={SEQ_LEN}", f"train.global_batch_tokens={ROWS * SEQ_LEN}",
        f"train.micro_batch={ROWS}", "data.packing=none", "track=[]",
        f"optim={{type: adamw, lr: {LR}, betas: {list(BETAS)}, weight_decay: 0.0}}",
        "schedule={type: constant, warmup: 0}", f"train.eval_every={steps}",
        "train.eval_tokens=1000000",
    ]  # fmt: skip
    # Forked: most of a run of this size would be the import of torch.
    ended = forked_ranks.run(folder, 1, train, *chat_keys(steps), *own, log=name)
    if ended.code != 0:
        sys.exit(ended.text)
    records = jsonl.read(folder / "jobs" / name / "metrics.jsonl")
    return [record["loss"] for record in records if record["kind"] == "eval"]


def theirs(folder: Path, seed: int, steps: int, *, nf4: bool) -> list[float]:
    """Train an adapter with TRL, PEFT and bitsandbytes; return the means of both ends."""
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
    files = {"data_files": str(folder / "rows.jsonl"), "cache_dir": str(folder / "c")}
    rows = load_dataset("json", split="train", **files).train_test_split(HELD_OUT, seed=0)
    options = SFTConfig(
        str(folder / "trl"), max_length=SEQ_LEN, assistant_only_loss=True, use_cpu=True,
        report_to="none", bf16=False, max_steps=steps, per_device_train_batch_size=ROWS,
        learning_rate=LR, lr_scheduler_type="constant", save_strategy="no", disable_tqdm=True,
        logging_steps=10, gradient_checkpointing=False, seed=seed, adam_beta1=BETAS[0],
        adam_beta2=BETAS[1], weight_decay=0.0, max_grad_norm=1.0,
    )  # fmt: skip
    lora = LoraConfig(
        r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules="all-linear",
        task_type="CAUSAL_LM",
    )  # fmt: skip
    trainer = SFTTrainer(
        model, options, train_dataset=rows["train"],
        processing_class=tokenizer, peft_config=lora,
    )  # fmt: skip
    trainer.train()
    first, *_, last = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return [first, last]


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
        dtt(Path(name), "tokenize", "--overwrite", *chat_keys(0))
        for seed in range(given.seeds):
            for program, trained in (("dtt", ours), ("TRL", theirs)):
                losses = [trained(Path(name), seed, given.steps, nf4=nf4) for nf4 in (False, True)]
                (_, lora), (_, nf4) = losses
                found[program].append(nf4 - lora)
                shown = (f"{before:.4f} to {after:.4f}" for before, after in losses)
                print(f"seed {seed}, {program}: LoRA {', QLoRA '.join(shown)}", flush=True)
    for program, differences in found.items():
        mean, deviation = statistics.mean(differences), statistics.stdev(differences)
        print(f"{program}: QLoRA - LoRA {mean:+.5f}, standard deviation {deviation:.5f}")


if __name__ == "__main__":
    main()
