"""From a file of conversations to a model that converses: every command is a process."""

from __future__ import annotations

import json

from support.running import Dtt
from support.tiny_job import END_OF_DOCUMENT, IM_END, make_tokenizer

from dtt.artifacts.manifests import DataManifest

RUN = """\
name: sft
download: {dataset: conversations.jsonl}
data: {type: chat}
tokenizer: {type: file, path: tokenizer.json}
tokenize: {validation_fraction: 0.05}
model: {dim: 64, n_layers: 2, n_heads: 2}
optim: {lr: 0.01}
schedule: {warmup: 5}
train:
  steps: 60
  seq_len: 128
  micro_batch: 8
  global_batch_tokens: 1024
  sample_tokens: 0
  device: cpu
  precision: fp32
  compile: false
"""


def test_a_fine_tuned_model_answers_and_its_export_can_be_fine_tuned_again(dtt: Dtt) -> None:
    make_tokenizer("<|im_start|>", "<|im_end|>").save(str(dtt.folder / "tokenizer.json"))
    rows = (
        [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "ok"}]
        for i in range(400)
    )
    lines = "".join(json.dumps({"messages": row}) + "\n" for row in rows)
    (dtt.folder / "conversations.jsonl").write_text(lines)
    (dtt.folder / "run.yaml").write_text(RUN)
    for command in ("download", "tokenize", "train"):
        dtt(command, "-c", "run.yaml")
    chat = ("--temperature", 0, "--json", "--ids")
    answers = dtt("chat", "jobs/sft", *chat, stdin="3?\nhello\n").stdout
    assert [json.loads(line)["content"] for line in answers.splitlines()] == ["ok", "ok"]
    assert [json.loads(line)["finish_reason"] for line in answers.splitlines()] == 2 * ["stop"]
    dtt("export", "jobs/sft", "export.dtype=fp32")
    assert dtt("chat", "exports/sft", *chat, stdin="3?\nhello\n").stdout == answers
    from_export = (
        "-c", "run.yaml", "name=again", "init.from=hf:exports/sft", "tokenizer.path=exports/sft",
        "chat.template=tokenizer", "tokenize.out=again", "train.steps=1", "schedule.warmup=0",
        "optim.lr=1e-9",
    )  # fmt: skip
    for command in ("tokenize", "train"):
        dtt(command, *from_export)
    assert dtt("chat", "jobs/again", *chat, stdin="3?\nhello\n").stdout == answers
    data = DataManifest.read(dtt.folder / "jobs/again")
    assert data.chat is not None
    assert data.chat.stop_tokens == (IM_END,)
    assert data.end_of_document == END_OF_DOCUMENT
