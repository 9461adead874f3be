"""Train with other libraries one step at a time: the workers of `train_cpu.py`.

Each worker is a generator. It does its set-up before the first `yield`, then one complete optimizer
step per `next`, including clipping and a read of the loss, as in the libraries' own loops.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from measurement import peak_memory
from torch import Tensor, nn

Shape = dict[str, Any]
Steps = Iterator[float]

SHAPES: dict[str, Shape] = {
    "gpt2-124m": {
        "family": "gpt2", "dim": 768, "n_layers": 12, "n_heads": 12, "ffn_dim": 3072,
        "vocab_size": 50304, "seq_len": 512, "batch": 2,
    },
    "llama-34m": {
        "family": "llama", "dim": 512, "n_layers": 8, "n_heads": 8, "ffn_dim": 1408,
        "vocab_size": 16384, "seq_len": 512, "batch": 8,
    },
}  # fmt: skip


def step_on_request(steps: Steps) -> None:
    """Run a step for every line of standard input, and print its seconds and loss as JSON."""
    next(steps)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        if line.strip() == "end":
            break
        start = time.perf_counter()
        loss = next(steps)
        print(json.dumps({"seconds": time.perf_counter() - start, "loss": loss}), flush=True)
    print(json.dumps({"peak": peak_memory()}), flush=True)


def batches(shape: Shape) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield random tokens and their successors as targets, each [B, T]."""
    generator = torch.Generator().manual_seed(0)
    while True:
        size = shape["batch"], shape["seq_len"] + 1
        ids = torch.randint(0, shape["vocab_size"], size, generator=generator)
        yield ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def loop(
    model: nn.Module, loss_of: Callable[[Tensor, Tensor], Tensor], shape: Shape, precision: str
) -> Steps:
    """Run the common training loop: autocast, backward, clip, fused AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)
    data = batches(shape)
    yield 0.0
    while True:
        tokens, targets = next(data)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = loss_of(tokens, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def hf_model(shape: Shape) -> Any:
    """Return the model of the shape in transformers, without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    if shape["family"] == "gpt2":
        config = GPT2Config(
            n_embd=shape["dim"], n_layer=shape["n_layers"], n_head=shape["n_heads"],
            vocab_size=shape["vocab_size"], n_positions=shape["seq_len"],
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        )  # fmt: skip
        return GPT2LMHeadModel(config)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=shape["dim"],
            num_hidden_layers=shape["n_layers"],
            num_attention_heads=shape["n_heads"],
            intermediate_size=shape["ffn_dim"],
            vocab_size=shape["vocab_size"],
            max_position_embeddings=shape["seq_len"],
            tie_word_embeddings=True,
            use_cache=False,
        )
    )


def transformers_loop(shape: Shape, precision: str) -> Steps:
    """Train the model and loss of transformers in a plain loop."""
    model = hf_model(shape).train()

    def loss_of(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = model(input_ids=tokens, labels=targets, shift_labels=targets).loss
        return loss

    return loop(model, loss_of, shape, precision)


def transformers_trainer(shape: Shape, precision: str) -> Steps:
    """Train with transformers.Trainer, which waits for `next` before each step."""
    import queue
    import tempfile
    import threading

    from transformers import Trainer, TrainerCallback, TrainingArguments

    start_step: queue.Queue[None] = queue.Queue()
    step_done: queue.Queue[float] = queue.Queue()

    class Wait(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            start_step.get()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            step_done.put(0.0)

    data = batches(shape)
    rows = [row for _ in range(64) for row in next(data)[0]]
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=shape["batch"], max_steps=10**6,
        bf16=precision == "bf16", use_cpu=True, optim="adamw_torch_fused", learning_rate=3e-4,
        weight_decay=0.1, report_to=[], logging_strategy="no", save_strategy="no",
        disable_tqdm=True, max_grad_norm=1.0,
    )  # fmt: skip
    trainer = Trainer(
        model=hf_model(shape),
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        callbacks=[Wait()],
    )
    threading.Thread(target=trainer.train, daemon=True).start()
    yield 0.0
    while True:
        start_step.put(None)
        yield step_done.get()


def litgpt_loop(shape: Shape, precision: str) -> Steps:
    """Train the model and chunked loss of litgpt, set up as in its pretrain command."""
    from litgpt import GPT, Config
    from litgpt.utils import chunked_cross_entropy

    common = {
        "block_size": shape["seq_len"], "n_layer": shape["n_layers"], "n_embd": shape["dim"],
        "n_head": shape["n_heads"], "padded_vocab_size": shape["vocab_size"],
        "vocab_size": shape["vocab_size"], "intermediate_size": shape["ffn_dim"],
    }  # fmt: skip
    if shape["family"] == "gpt2":
        config = Config(**common, rotary_percentage=0.0, bias=True, norm_class_name="LayerNorm",
                        mlp_class_name="GptNeoxMLP", gelu_approximate="tanh",
                        parallel_residual=False)  # fmt: skip
    else:
        config = Config(**common, rotary_percentage=1.0, bias=False, norm_class_name="RMSNorm",
                        mlp_class_name="LLaMAMLP", parallel_residual=False)  # fmt: skip
    model = GPT(config)
    model.lm_head.weight = model.transformer.wte.weight
    initialize(model)
    return loop(
        model, lambda x, y: chunked_cross_entropy(model(x), y, chunk_size=128), shape, precision
    )


def torchtitan_loop(shape: Shape, precision: str) -> Steps:
    """Train torchtitan's Llama 3 and loss in the common loop; its own trainer requires a GPU."""
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.llama3 import Llama3Model, _build_llama3_layers

    if shape["family"] != "llama":
        raise SystemExit("torchtitan has no such model")
    dim, vocab = shape["dim"], shape["vocab_size"]
    normal = {"weight": lambda w: nn.init.normal_(w, std=0.02)}
    model = Llama3Model.Config(
        dim=dim,
        vocab_size=vocab,
        enable_weight_tying=True,
        tok_embeddings=Embedding.Config(num_embeddings=vocab, embedding_dim=dim, param_init=normal),
        norm=RMSNorm.Config(normalized_shape=dim, param_init={"weight": nn.init.ones_}),
        lm_head=Linear.Config(in_features=dim, out_features=vocab, param_init=normal),
        layers=_build_llama3_layers(
            fuse_qkv=True,
            n_layers=shape["n_layers"],
            dim=dim,
            n_heads=shape["n_heads"],
            hidden_dim=shape["ffn_dim"],
            rope=ComplexRoPE.Config(
                dim=dim // shape["n_heads"], max_seq_len=shape["seq_len"], theta=10000
            ),
            attn_backend="sdpa",
        ),
    ).build()
    initialize(model)
    batch_tokens = shape["batch"] * shape["seq_len"]
    return loop(
        model, lambda x, y: cross_entropy_loss(model(x), y) / batch_tokens, shape, precision
    )


def initialize(model: nn.Module) -> None:
    """Re-initialise weights with a standard deviation of 0.02 in place of the library's default."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.02)


PEERS: dict[str, Callable[[Shape, str], Steps]] = {
    "transformers, loop": transformers_loop,
    "transformers.Trainer": transformers_trainer,
    "litgpt, loop": litgpt_loop,
    "torchtitan, loop": torchtitan_loop,
}


if __name__ == "__main__":
    peer, shape, precision, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    torch.manual_seed(0)
    step_on_request(PEERS[peer](SHAPES[shape], precision))
