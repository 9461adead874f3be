"""Fine-tuning with LoRA on a CPU: dtt beside TRL's SFTTrainer with PEFT, on the same rows.

    python benchmarks/adapter.py ROWS.jsonl [--steps 12] [--dim 256]

Both train the same model from the same Hugging Face folder with the same rank, scale, targets,
batch and packing length, in fp32 on all cores. Prints trained tokens per second (without padding,
from the third step on) and the peak memory of the process.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SEQ_LEN, ROWS, RANK, ALPHA = 512, 4, 16, 32
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}\n"
    "{% else %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def dtt(folder: Path, *arguments: object) -> None:
    """Run a command of dtt in `folder`."""
    command = [sys.executable, "-m", "dtt.main", *map(str, arguments), "--quiet"]
    subprocess.run(command, cwd=folder, check=True, stdout=sys.stderr)


def prepare(folder: Path, rows: Path, dim: int, *keys: str) -> None:
    """Write token files of the rows, and a model in `exports/base`: untrained without `keys`."""
    lines = [line for line in rows.read_text().split("\n") if line][:3000]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    texts = (" ".join(m["content"] for m in json.loads(line)["messages"]) for line in lines)
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    (folder / "template.jinja").write_text(TEMPLATE)
    dtt(
        folder, "pipeline", "name=base", "download.dataset=text.jsonl", "tokenizer.vocab_size=4096",
        "tokenizer.chat_tokens=true", f"model.dim={dim}", f"model.n_heads={dim // 64}",
        "model.n_layers=6", f"train.seq_len={SEQ_LEN}", "train.steps=2", "export.dtype=fp32",
        f"train.global_batch_tokens={SEQ_LEN}", "train.micro_batch=1", "train.sample_tokens=0",
        "schedule.warmup=0", "train.precision=fp32", *keys,
    )  # fmt: skip
    for step in ("download", "tokenize"):
        dtt(folder, step, *settings(0))


def settings(steps: int) -> list[str]:
    """Return the configuration of dtt."""
    return [
        "name=ours", "download.dataset=rows.jsonl", "data.type=chat", "tokenizer.type=file",
        "tokenizer.path=exports/base/tokenizer.json", "chat.template=template.jinja",
        "tokenize.validation_fraction=0", "init.from=hf:exports/base", "adapter.type=lora",
        f"adapter.rank={RANK}", f"adapter.alpha={ALPHA}", "optim.type=adamw", "optim.lr=2e-4",
        "schedule.warmup=0", f"train.steps={max(1, steps)}", f"train.seq_len={SEQ_LEN}",
        f"train.global_batch_tokens={2 * ROWS * SEQ_LEN}", f"train.micro_batch={ROWS}",
        "train.precision=fp32", "train.log_every=1", "train.eval_every=0", "train.sample_tokens=0",
        "checkpoint.every=1000",
    ]  # fmt: skip


def ours(folder: Path, steps: int) -> list[float]:
    """Train with dtt; return the trained tokens per second of each step."""
    from dtt.track import jsonl

    dtt(folder, "train", *settings(steps))
    records = jsonl.read(folder / "jobs/ours/metrics.jsonl")
    return [r["tokens_per_second"] for r in records if r["kind"] == "perf"]


def theirs(folder: Path, steps: int) -> list[float]:
    """Train with TRL and PEFT in this process; return the same as `ours`."""
    from datasets import load_dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "exports/base")
    tokenizer.chat_template, tokenizer.pad_token = TEMPLATE, "<|im_start|>"
    model = AutoModelForCausalLM.from_pretrained(folder / "exports/base")
    rows = load_dataset(
        "json", data_files=str(folder / "rows.jsonl"), split="train", cache_dir=str(folder / "c")
    )
    options = SFTConfig(
        str(folder / "trl"), packing=True, max_length=SEQ_LEN, assistant_only_loss=True,
        use_cpu=True, report_to="none", bf16=False, padding_free=False, max_steps=steps,
        per_device_train_batch_size=ROWS, gradient_accumulation_steps=2, learning_rate=2e-4,
        lr_scheduler_type="constant", save_strategy="no", disable_tqdm=True, logging_steps=1000,
        gradient_checkpointing=False,
    )  # fmt: skip
    lora = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
    tokens, ends = [0], [0.0]

    class Timed(SFTTrainer):
        def compute_loss(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
            tokens[-1] += int((inputs["input_ids"] != tokenizer.pad_token_id).sum())
            return super().compute_loss(model, inputs, *rest, **named)  # type: ignore[no-untyped-call]

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            tokens.append(0)
            ends.append(time.perf_counter())

    trainer = Timed(
        model, options, train_dataset=rows, processing_class=tokenizer, peft_config=lora,
        callbacks=[Clock()],
    )  # fmt: skip
    trainer.train()
    return [n / (b - a) for n, a, b in zip(tokens[1:], ends[1:], ends[2:], strict=False)]


def main() -> None:
    """Prepare, run both, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--only", choices=("dtt", "trl"))
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    if given.only:
        rates = {"dtt": ours, "trl": theirs}[given.only](given.folder, given.steps)
        who = resource.RUSAGE_CHILDREN if given.only == "dtt" else resource.RUSAGE_SELF
        peak = resource.getrusage(who).ru_maxrss / 2**20
        print(json.dumps([statistics.median(rates[2:]), peak]))
        return
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name), given.rows, given.dim)
        found = {}
        for which in ("dtt", "trl"):
            command = [sys.executable, __file__, str(given.rows), "--only", which]
            command += ["--folder", name, "--steps", str(given.steps)]
            said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            found[which] = json.loads(said.splitlines()[-1])
            rate, peak = found[which]
            print(f"{which}: {rate:,.0f} trained tokens/s, peak memory {peak:.2f} GiB")
    print(f"ratio of speeds {found['dtt'][0] / found['trl'][0]:.2f}")


if __name__ == "__main__":
    main()
