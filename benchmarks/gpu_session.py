"""Check and profile dtt on a GPU machine, in 25 minutes.

    python benchmarks/gpu_session.py [BLOCK …] [--out gpu-session] [--total 25] [--tiny]

Runs the blocks one after another, by default all of them in the order of their value until the time
is over, each in a separate process with a time limit of its own. The plan printed first says
which blocks fit by their limits: those up to `mixture-1.7b` do. A block continues after a failure
of one of its parts, and the session after a failure of a block. `OUT/BLOCK.log` holds its output,
`OUT/BLOCK.jsonl` one line per part, written as it ends, so that little is lost with the machine,
and `OUT/summary.json` all results. The exit code is 1 if anything failed. Without a GPU, or with
`--tiny`, the same code runs on small shapes on the CPU: run it this way before the machine is
available.

On a GPU machine without network, bring the missing packages as wheels. If it has Python 3.12 with
torch, transformers, typer, pyarrow and jinja2, download

    pip download -d wheels --only-binary :all: --python-version 3.12 \
        --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --no-deps \
        pydantic pydantic-core annotated-types typing-inspection gigatoken datasets dill \
        multiprocess xxhash psutil pytest pytest-timeout pluggy iniconfig peft accelerate

with pydantic-core in the version that pydantic requires (`pip download pydantic` without
`--no-deps` prints it), then run on the machine

    pip install --no-index --no-deps --find-links wheels wheels/*.whl
    export PYTHONPATH=$PWD/src:$PWD/benchmarks

pyarrow may be needed as well (50 MB); wandb is not.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import metadata
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from measurement import DTT, Table, make_tokens, parser_of
from torch import Tensor

HERE = Path(__file__).parent
UNCOMPILED = r"training continues uncompiled: .*"
PACKAGES = ("torch", "triton", "transformers", "pydantic", "gigatoken", "pyarrow", "numpy")


@dataclass
class Session:
    """Output folder, size of the shapes, and failed parts of a session."""

    out: Path
    tiny: bool
    block: str = ""
    failed: list[str] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        """CUDA, or the CPU for tiny shapes."""
        return torch.device("cpu" if self.tiny else "cuda")

    @property
    def dtype(self) -> torch.dtype:
        """Compute dtype."""
        return torch.float32 if self.tiny else torch.bfloat16

    def report(self, part: str, **figures: Any) -> None:
        """Print a result and append it to the block's file."""
        line = json.dumps({"part": part, **figures})
        print(line, flush=True)
        with (self.out / f"{self.block}.jsonl").open("a") as file:
            file.write(line + "\n")

    @contextmanager
    def part(self, name: str) -> Iterator[dict[str, Any]]:
        """Report the figures put into the dictionary, or the exception; then continue the block."""
        figures: dict[str, Any] = {}
        start = time.perf_counter()
        try:
            yield figures
        except Exception as error:  # noqa: BLE001  after any failure, the other parts must run
            traceback.print_exc()
            self.failed.append(name)
            figures["error"] = f"{type(error).__name__}: {error}"[:2000]
        self.report(name, seconds=round(time.perf_counter() - start, 2), **figures)

    def dtt(self, *arguments: object, expect: int = 0) -> str:
        """Run `dtt ARGUMENTS` in the session's folder and return its output."""
        command = [*DTT, *map(str, arguments)]
        print("$ dtt", *arguments, flush=True)
        run = subprocess.run(
            command, cwd=self.out, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            check=False,
        )  # fmt: skip
        print(run.stdout, flush=True)
        if run.returncode != expect:
            lines = run.stdout.splitlines()[-6:]
            raise RuntimeError(f"exit code {run.returncode}, not {expect}: " + " | ".join(lines))
        return run.stdout

    def tokens(self) -> Path:
        """Return the token folder that all blocks train on, created by the first call."""
        tokens = self.out / "tokens"
        if not (tokens / "manifest.json").exists():
            make_tokens(self.out)
        return tokens.resolve()


def seconds(device: torch.device, work: Callable[[], object], rounds: int) -> float:
    """Return the mean seconds of a call over `rounds`, after two warm-up calls."""
    for _ in range(2):
        work()
    _finish(device)
    start = time.perf_counter()
    for _ in range(rounds):
        work()
    _finish(device)
    return (time.perf_counter() - start) / rounds


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def max_relative_error(actual: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> float:
    """Return the largest relative error of any tensor: norm of the difference over the norm."""
    pairs = zip(actual, exact, strict=True)
    return max(float((a.double() - e.double()).norm() / e.double().norm()) for a, e in pairs)


# ---- the blocks ----------------------------------------------------------------------------------


def versions(session: Session) -> None:
    """Report the hardware and the installed packages."""
    with session.part("packages") as figures:
        for name in PACKAGES:
            try:
                figures[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                figures[name] = None
        figures["python"] = platform.python_version()
    with session.part("gpu") as figures:
        figures |= {"cuda": torch.version.cuda, "available": torch.cuda.is_available()}
        if torch.cuda.is_available():
            figures["name"] = torch.cuda.get_device_name()
            figures["capability"] = torch.cuda.get_device_capability()
            figures["memory_gb"] = torch.cuda.get_device_properties(0).total_memory / 1e9
            query = "driver_version,clocks.sm,clocks.mem,power.limit,temperature.gpu"
            command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
            figures[query] = subprocess.check_output(command, text=True).strip()
    with session.part("doctor"):
        session.dtt("doctor")


def attention(session: Session) -> None:
    """Compare each SDPA kernel with MATH in fp32: time and gradients."""
    from dtt.model.sdpa import KERNELS, sdpa

    shapes = [(64, 12, 12, 1024, 64), (2, 32, 8, 4096, 128)]
    for shape in [(2, 4, 2, 64, 16)] if session.tiny else shapes:
        batch, heads, kv_heads, length, width = shape
        torch.manual_seed(0)
        sizes = [(batch, n, length, width) for n in (heads, kv_heads, kv_heads)]
        inputs = [torch.randn(s, device=session.device, dtype=session.dtype) for s in sizes]
        for name, kernel in KERNELS.items():
            if session.tiny and name in ("cudnn", "efficient"):
                continue  # a CPU has no such kernel
            causal = partial(sdpa, allowed=(kernel,), scale=width**-0.5, is_causal=True)
            with session.part(f"{name} {shape}") as figures:
                part = slice(0, 2)  # MATH holds all scores in memory
                q_k_v = [x[part].detach().requires_grad_() for x in inputs]
                q_k_v_fp32 = [x[part].detach().float().requires_grad_() for x in inputs]
                exact = partial(causal, allowed=(KERNELS["math"],))
                difference = max_relative_error(
                    _attended(causal, q_k_v), _attended(exact, q_k_v_fp32)
                )
                figures["difference"] = difference
                if name != "math":
                    leaves = [x.detach().requires_grad_() for x in inputs]
                    work = partial(_attended, causal, leaves)
                    figures["ms"] = 1e3 * seconds(session.device, work, 1 if session.tiny else 20)
                if not difference < 0.05:
                    raise AssertionError(f"the gradients are wrong by {difference:.1%}")


def _attended(attend: Callable[..., Tensor], q_k_v: list[Tensor]) -> tuple[Tensor, ...]:
    out = attend(*q_k_v)
    weights = torch.linspace(-1, 1, out.shape[-1], device=out.device, dtype=out.dtype)
    return (out.detach(), *torch.autograd.grad((out * weights).sum(), q_k_v))


def small(session: Session) -> None:
    """Train and resume a tiny GPT-2.

    Also runs document masks and windows at several lengths, and a context-length schedule.
    """
    for name, compiled in (("eager", "false"), ("compiled", "true")):
        if session.tiny and name == "compiled":
            continue
        with session.part(f"train {name}") as figures:
            keys = small_keys(session, name, train__steps=20, train__compile=compiled)
            output = session.dtt("train", *keys)
            figures["validation"] = re.findall(r"validation loss ([\d.]+)", output)
            figures["attention"] = re.findall(r"attention: (.*)", output)
            figures["uncompiled"] = re.findall(UNCOMPILED, output)
        with session.part(f"resume {name}") as figures:
            more = ("train.steps=24", "--allow-change", "train.steps")
            output = session.dtt("train", f"jobs/{name}", *more)
            figures["resumed"] = re.findall(r"resumed from .*", output)
    lengths = (64, 128) if session.tiny else (64, 128, 256, 1024)
    for length in lengths:
        with session.part(f"documents and windows at {length}") as figures:
            keys = small_keys(
                session, f"documents-{length}", model__family="mistral", model__window=48,
                data__mask_documents="true", train__seq_len=length, train__steps=6,
                train__global_batch_tokens=8 * length,
            )  # fmt: skip
            output = session.dtt("train", *keys)
            figures["attention"] = re.findall(r"attention: (.*)", output)
            figures["uncompiled"] = re.findall(UNCOMPILED, output)
    with session.part("context_schedule") as figures:
        keys = small_keys(
            session, "schedule", train__steps=8, data__mask_documents="true",
            train__context_schedule="[[0,64],[50%,128]]",
        )  # fmt: skip
        output = session.dtt("train", *keys)
        figures["validation"] = re.findall(r"validation loss ([\d.]+)", output)


def small_keys(session: Session, name: str, **changes: object) -> list[str]:
    """Return the arguments of a run of a few seconds; keywords override keys."""
    values: dict[str, object] = {
        "name": name, "data.tokens": session.tokens(), "model.family": "gpt2", "model.dim": 64,
        "model.n_layers": 2, "model.n_heads": 4, "train.device": session.device.type,
        "train.seq_len": 128, "train.micro_batch": 4, "train.global_batch_tokens": 1024,
        "train.eval_tokens": 1000, "train.eval_every": 10, "train.sample_tokens": 8,
        "train.log_every": 5, "checkpoint.every": 10, "schedule.warmup": 2,
    }  # fmt: skip
    values |= {key.replace("__", "."): value for key, value in changes.items()}
    return [f"{key}={value}" for key, value in values.items()]


def flex(session: Session) -> None:
    """Compare FlexAttention with a dense mask, outputs and gradients, at several lengths."""
    from dtt.mesh.compilation import compiler
    from dtt.model import attention_backend

    for length in (64, 128) if session.tiny else (64, 128, 256, 1024, 8192):
        for window, documents in ((48, False), (None, True), (48, True)):
            with session.part(f"flex {length}, window {window}, documents {documents}") as figures:
                torch.manual_seed(0)
                shapes = [(2, n, length, 64) for n in (4, 2, 2)]
                inputs = [
                    torch.randn(s, device=session.device, dtype=session.dtype, requires_grad=True)
                    for s in shapes
                ]
                numbers = (torch.rand(2, length, device=session.device) < 0.03).cumsum(1)
                tokens = torch.zeros(2, length, device=session.device)
                doc_ids = numbers if documents else None
                attend = attention_backend.flex(0.125, tokens, doc_ids, window)
                exact = _attended(attend.dense, inputs)
                # Uncompiled FlexAttention has no gradients on a CPU.
                if session.tiny:
                    tiled = attention_backend.attention_within(0.125, window, tokens, doc_ids)
                    figures["difference"] = max_relative_error(_attended(tiled, inputs), exact)
                    continue
                figures["difference"] = max_relative_error(_attended(attend, inputs), exact)
                for name, hopper in (("ms", attend.hopper), ("ms, torch's options", False)):
                    other = partial(_attended, replace(attend, hopper=hopper), inputs)
                    figures[name] = 1e3 * seconds(session.device, other, 10)
                figures["uncompiled"] = compiler.failure


def chunks(session: Session) -> None:
    """Time attention of the chunks of two ranks that share a sequence, beside FlexAttention."""
    from dtt.model import attention_backend
    from dtt.model.chunked_attention import Chunked, Kernel

    length, heads, width = (256, (4, 2, 2), 16) if session.tiny else (16_384, (32, 8, 8), 128)
    kernels: tuple[Kernel, ...] = ("flash for CPUs",) if session.tiny else ("cudnn", "flash")
    tokens = torch.zeros(1, length, device=session.device)
    for rank in range(2):
        starts = rank * length // 4, (3 - rank) * length // 4
        places = [range(start, start + length // 4) for start in starts]
        flex = attention_backend.flex(width**-0.5, tokens, None, None, places)
        torch.manual_seed(0)
        shapes = zip(heads, (length // 2, length, length), strict=True)
        inputs = [
            torch.randn(1, n, size, width, device=session.device, dtype=session.dtype)
            for n, size in shapes
        ]
        inputs = [x.requires_grad_() for x in inputs]
        with session.part(f"rank {rank}, FlexAttention") as figures:
            # Uncompiled FlexAttention has no gradients on a CPU.
            attend = flex.dense if session.tiny else flex
            exact = _attended(attend, inputs)
            figures["ms"] = 1e3 * seconds(session.device, partial(_attended, attend, inputs), 10)
        for kernel in kernels:
            with session.part(f"rank {rank}, {kernel}") as figures:
                work = partial(_attended, Chunked(width**-0.5, starts, kernel), inputs)
                figures["difference"] = max_relative_error(work(), exact)
                figures["ms"] = 1e3 * seconds(session.device, work, 10)


def experts(session: Session) -> None:
    """Time a layer of experts, both passes, beside its form before 2026-11-30 and one not taken."""
    from train_gpu import CASES

    from dtt.config.model import ModelConfig
    from dtt.mesh.compilation import compiler
    from dtt.model import families
    from dtt.model.experts import MixtureMLP

    for case in ("mixture-1.7b", "olmoe-1b-7b"):
        shape = dict(CASES[case].shape)
        if session.tiny:
            shape |= {"dim": 32, "n_heads": 4, "n_kv_heads": 4, "expert_ffn_dim": 16}
            shape |= {"n_experts": 4, "experts_per_token": 2, "seq_len": 32, "batch": 1}
        keys = {name: shape[name] for name in ModelConfig.model_fields if name in shape}
        config = ModelConfig.model_validate(keys)
        arch = families.get(shape["family"]).architecture(config, 512, shape["seq_len"])
        mixture = arch.mixture_of(0)
        assert mixture is not None
        torch.manual_seed(0)
        with session.device:
            mlp = MixtureMLP(arch, mixture).to(session.dtype)
            for weight in mlp.parameters():
                torch.nn.init.normal_(weight, std=0.02)
            size = shape["batch"], shape["seq_len"], arch.dim
            x = torch.randn(size, dtype=session.dtype, requires_grad=True)
        exact: tuple[Tensor, ...] = ()
        joined = {"compute": partial(_joined, mlp.experts)}
        for name, compute, changes in (
            ("weighted after down", _weighted_after, {}),
            ("weighted before down", None, {}),
            ("gate and up joined", None, joined),
        ):
            vars(mlp.experts).update(changes)
            for compiled in (False,) if session.tiny else (False, True):
                with session.part(f"{case}, {name}, compiled {compiled}") as figures:
                    forward = partial(compute or MixtureMLP.forward, mlp, counted_BT=None)
                    run = compiler.compiled(forward) if compiled else forward
                    work = partial(_mixed_gradients, run, x, list(mlp.parameters()))
                    if session.device.type == "cuda":
                        torch.cuda.reset_peak_memory_stats()
                    found = work()
                    exact = exact or found
                    figures["difference"] = max_relative_error(found, exact)
                    figures["ms"] = 1e3 * seconds(session.device, work, 1 if session.tiny else 10)
                    if session.device.type == "cuda":
                        figures["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
                    figures["uncompiled"] = compiler.failure


def _joined(own: Any, rows_MD: Tensor, weights_M: Tensor, counts_E: Tensor) -> Tensor:
    """Compute experts with one product for gate and up."""
    from torch.nn import functional

    from dtt.model.linear import grouped_linear

    ends_E = counts_E.cumsum(0).to(torch.int32)
    stacks = torch.cat([own.gate, own.up], 1)
    gate_MF, up_MF = grouped_linear(rows_MD, stacks, ends_E).chunk(2, -1)
    hidden_MF = functional.silu(gate_MF) * up_MF * weights_M[:, None].to(up_MF.dtype)
    return grouped_linear(hidden_MF, own.down, ends_E)


def _weighted_after(mlp: Any, x_BTD: Tensor, counted_BT: None) -> Any:
    """Compute a mixture that weights the outputs of experts."""
    from torch.nn import functional

    from dtt.model.experts import Mixed, inverse, load, sorted_rows
    from dtt.model.linear import grouped_linear

    x_ND, own = x_BTD.flatten(0, 1), mlp.experts
    routing = mlp.router(x_ND)
    experts_NK = routing.experts_NK
    order_M = experts_NK.flatten().to(torch.int16).argsort(stable=True)
    place_M = inverse(order_M)
    ends_E = load(experts_NK[None], own.experts)[0].cumsum(0).to(torch.int32)
    rows_MD = sorted_rows(x_ND, order_M, place_M, experts_NK.shape[1])
    hidden_MF = functional.silu(grouped_linear(rows_MD, own.gate, ends_E))
    hidden_MF = hidden_MF * grouped_linear(rows_MD, own.up, ends_E)
    out_MD = grouped_linear(hidden_MF, own.down, ends_E)
    out_NKD = sorted_rows(out_MD, place_M, order_M, 1).view(*experts_NK.shape, -1)
    out_ND = (out_NKD * routing.weights_NK[..., None].to(out_NKD.dtype)).sum(1)
    return Mixed(out_ND.view_as(x_BTD), {}, None)


def _mixed_gradients(
    run: Callable[..., Any], x: Tensor, weights: list[Tensor]
) -> tuple[Tensor, ...]:
    out = run(x).out
    factor = torch.linspace(-1, 1, out.shape[-1], device=out.device, dtype=out.dtype)
    return (out.detach(), *torch.autograd.grad((out * factor).sum(), [x, *weights]))


def training(
    session: Session, name: str, optimizer: str, steps: int, accumulation: int | None = None,
    beside: bool = False,
) -> None:  # fmt: skip
    """Run one case of `train_gpu.py`: tokens/s, MFU, memory and, for some cases, a profile.

    With `beside`, transformers and PEFT then train the same.
    """
    from train_gpu import CASES, COLUMNS, Case, cells, peer, train

    case = CASES[name]
    if accumulation is not None:
        case = case._replace(accumulation=accumulation)
    if session.tiny:
        shape = case.shape | {
            "dim": 32, "n_layers": 2, "n_heads": 4, "ffn_dim": 64, "vocab_size": 300,
            "n_kv_heads": 4 if case.shape["family"] == "gpt2" else 2, "seq_len": 32, "batch": 1,
        }  # fmt: skip
        if "n_experts" in shape:
            shape |= {"n_experts": 4, "experts_per_token": 2}
        fp8 = "train.precision=fp8"
        keys = [key for key in case.keys if key == fp8 or not key.startswith("train.precision")]
        keys.append("train.device=cpu")
        case, steps = Case(shape, keys, 2), 8
    with session.part(f"{name}, {optimizer}") as figures:
        run = f"{name}-{optimizer}"
        figures |= train(session.out, session.tokens(), run, case, optimizer, steps, 1)
        print((session.out / f"{run}.log").read_text())
        if "error" in figures:
            raise RuntimeError(figures["error"])
        Table("", 28, COLUMNS).row(run, *cells(figures))
        for profile in sorted((session.out / "jobs" / run / "profiles").glob("*.txt"))[:1]:
            print(profile.read_text())
    if beside:
        with session.part(f"{name}, peer") as figures:
            rate, figures["memory_gb"] = peer(case, 4 if session.tiny else 20)
            figures["tokens_per_second"] = rate


def loss(session: Session) -> None:
    """Measure the loss alone, eager and compiled, for several chunk sizes and vocabularies."""
    from dtt.mesh.compilation import compiler

    tokens, width = (64, 32) if session.tiny else (65_536, 768)
    for vocab_size in (300,) if session.tiny else (50_304, 128_256):
        torch.manual_seed(0)
        tensors = (
            torch.randn(tokens, width, device=session.device, requires_grad=True),
            (0.02 * torch.randn(vocab_size, width, device=session.device)).requires_grad_(),
            torch.randint(vocab_size, (tokens,), device=session.device),
        )
        for elements in (2**13,) if session.tiny else (2**28, 2**29, 2**30):
            chunk = elements // vocab_size // 128 * 128 or elements // vocab_size
            # On a CPU the compilation takes a minute: tests/model/test_loss.py does that.
            for fused in (False,) if session.tiny else (False, True):
                name = f"{vocab_size:,} entries, chunks of {chunk:,}, fused {fused}"
                with session.part(name) as figures:
                    work = partial(_loss_gradients, *tensors, chunk, fused)
                    if session.device.type == "cuda":
                        torch.cuda.reset_peak_memory_stats()
                    figures["ms"] = 1e3 * seconds(session.device, work, 1 if session.tiny else 5)
                    if session.device.type == "cuda":
                        figures["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
                    figures["uncompiled"] = compiler.failure


def _loss_gradients(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int, fused: bool
) -> tuple[Tensor, ...]:
    from dtt.model.loss import linear_cross_entropy

    with torch.autocast(hidden.device.type, torch.bfloat16):
        total = linear_cross_entropy(hidden, weight, targets, chunk=chunk, fused=fused)
    return torch.autograd.grad(total, (hidden, weight))


def generation(session: Session) -> None:
    """Generate greedily with a Llama of 1B and with the same weights in transformers, in bf16."""
    from peers import hf_model
    from train_gpu import LLAMA_1B

    from dtt.config.model import ModelConfig
    from dtt.hf.weights import from_hf
    from dtt.model import families
    from dtt.model.decoder import Decoder
    from dtt.model.generate import make_decoding

    tiny = {"dim": 64, "n_layers": 2, "ffn_dim": 128, "vocab_size": 512} if session.tiny else {}
    shape: dict[str, Any] = {**LLAMA_1B, **tiny}
    torch.manual_seed(0)
    with session.device:
        theirs = hf_model(shape).to(session.dtype).eval()
    family = families.get("llama")
    names = "family", "dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim"
    config = ModelConfig.model_validate({name: shape[name] for name in names})
    arch = family.architecture(config, shape["vocab_size"], shape["seq_len"])
    with session.device:
        ours = Decoder(arch).to(session.dtype).eval()
    ours.load_state_dict(from_hf(theirs.state_dict(), arch))
    floor = sum(weight.nbytes for weight in ours.parameters())
    new, prompt = (8, 16) if session.tiny else (128, 512)
    state = make_decoding(ours)  # its graphs are captured in the first round, which does not count
    for rows in (1, 8, 64):
        with session.part(f"{rows} prompts of {prompt}, {new} new tokens") as figures:
            ids = torch.randint(1, shape["vocab_size"], (rows, prompt), device=session.device)
            for name, answer in (
                ("dtt", partial(_answers, state, ours, ids.tolist(), new, temperature=0.0)),
                ("dtt, sampled", partial(_answers, state, ours, ids.tolist(), new, top_p=0.9)),
                ("dtt, new state", partial(_answers, None, ours, ids.tolist(), new, top_k=50)),
                ("transformers", partial(_hf_answers, theirs, ids, new)),
            ):
                figures[f"ms/token, {name}"] = 1e3 * seconds(session.device, answer, 1) / new
            if session.device.type == "cuda":
                # Every weight is read once for each token, and so are keys and values.
                cached = rows * (prompt + new / 2) * arch.n_layers * arch.n_kv_heads
                cached *= 2 * arch.head_dim * session.dtype.itemsize
                figures["floor at 4.3 TB/s"] = 1e3 * (floor + cached) / 4.3e12
                _profile_steps(session, state, ours, ids.tolist(), rows)


def _answers(state: Any, model: Any, prompts: list[list[int]], new: int, **sampling: Any) -> int:
    from dtt.model.generate import generate_batch

    how: dict[str, Any] = {"max_new_tokens": new, "decoding": state, **sampling}
    count = len(list(generate_batch(model, prompts, generators=[None] * len(prompts), **how)))
    assert count == new * len(prompts)
    return count


def _profile_steps(
    session: Session, state: Any, model: Any, prompts: list[list[int]], rows: int
) -> None:
    """Write the kernels of 20 tokens, replayed from graphs, to `OUT/tokens-ROWS.txt`."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        _answers(state, model, prompts, 20, temperature=0.0)
    table = profiled.key_averages().table(sort_by="cuda_time_total", row_limit=25)
    (session.out / f"tokens-{rows}.txt").write_text(table)


@torch.no_grad()
def _hf_answers(model: Any, ids: Tensor, new: int) -> Tensor:
    answers: Tensor = model.generate(
        ids, attention_mask=torch.ones_like(ids), min_new_tokens=new, max_new_tokens=new,
        do_sample=False, pad_token_id=0, use_cache=True,
    )  # fmt: skip
    return answers


def memory(session: Session) -> None:
    """Check the out-of-memory message, and measure the time blocked by saves."""
    with session.part("out of memory") as figures:
        dim, layers = (983_040, 2) if session.tiny else (2**14, 64)
        huge: dict[str, object] = {"model__dim": dim, "model__n_layers": layers}
        keys = small_keys(session, "huge", model__n_heads=128, **huge)
        output = session.dtt("train", *keys, expect=78)
        figures["messages"] = [line for line in output.splitlines() if "dtt: " in line]
    with session.part("first save") as figures:
        large: dict[str, object] = {"model__family": "llama"}
        if not session.tiny:
            large |= {"model__dim": 2048, "model__n_layers": 16, "model__n_heads": 32}
        each = {"train__steps": 9, "checkpoint__every": 3, "train__log_every": 1}
        session.dtt("train", *small_keys(session, "saves", **large, **each))
        metrics = (session.out / "jobs/saves/metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in metrics]
        figures["saves"] = [record for record in records if record["kind"] == "save"]


def run_tests(session: Session, folder: str) -> None:
    """Run tests of `tests/gpu`; without a GPU, those that show that they work."""
    with session.part("pytest") as figures:
        command = [sys.executable, "-m", "pytest", "-v", "-rfE", "--maxfail=20", "--all", folder]
        command += ["-p", "no:xdist"]  # one at a time: they share the GPU
        if folder == "tests/gpu":  # without those that have a block of their own
            command += ["--ignore", "tests/gpu/nccl"]
        # Not captured: what has passed is in the log even if the block is ended.
        run = subprocess.run(command, cwd=HERE.parent, check=False)
        figures["exit code"] = run.returncode
        if run.returncode:
            raise RuntimeError(f"pytest ends with {run.returncode}: see the log")


def start(session: Session) -> None:
    """Time the initial weights of Llama 8B, which are drawn on the CPU."""
    from train_gpu import LLAMA_8B

    from dtt.config.model import ModelConfig
    from dtt.model import families
    from dtt.model.decoder import Decoder
    from dtt.model.init import initialize

    tiny = {"dim": 64, "n_layers": 2, "ffn_dim": 128} if session.tiny else {}
    shape: dict[str, Any] = {**LLAMA_8B, **tiny}
    names = "family", "dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim"
    config = ModelConfig.model_validate({name: shape[name] for name in names})
    arch = families.get("llama").architecture(config, shape["vocab_size"], shape["seq_len"])
    with session.part("initial weights of 8B") as figures:
        with session.device:
            model = Decoder(arch)
        figures["cores"] = os.cpu_count()
        begun = time.perf_counter()
        initialize(model, seed=0)
        _finish(session.device)
        figures["draw and copy, s"] = time.perf_counter() - begun


def fp8_gather(session: Session) -> None:
    """Measure what FSDP2 does around an all-gather in fp8, for the matrices of a block of 8B.

    The rank of eight packs its rows, and unpacks those of all.
    """
    from types import SimpleNamespace

    from train_gpu import LLAMA_8B

    from dtt.model.linear import Linear
    from dtt.parallel import fp8

    shape: dict[str, Any] = {"dim": 64, "ffn_dim": 128} if session.tiny else {**LLAMA_8B}
    dim, wide = shape["dim"], shape["ffn_dim"]
    policy: Any = SimpleNamespace(param_dtype=torch.bfloat16)
    for inputs, outputs in ((dim, dim), (dim, wide), (wide, dim)):
        with session.part(f"{inputs} to {outputs}") as figures, session.device:
            layer, weight = Linear(inputs, outputs // 8, bias=False), torch.empty(outputs, inputs)
            torch.nn.init.normal_(layer.weight, std=0.02)
            weight = weight.to(torch.bfloat16)
            unused: Any = None
            pack = partial(fp8._pack, unused, unused, unused, layer, policy)  # noqa: SLF001
            (values, scales), _ = pack()

            def unpack(values: Tensor, scales: Tensor, weight: Tensor) -> None:
                gathered = values.repeat(8, 1), scales.repeat(8, 1)
                fp8._unpack(gathered, None, weight.dtype, out=weight)  # noqa: SLF001

            runs = 1 if session.tiny else 20
            figures["pack, ms"] = 1e3 * seconds(session.device, pack, runs)
            work = partial(unpack, values, scales, weight)
            figures["repeat and unpack, ms"] = 1e3 * seconds(session.device, work, runs)
            figures["bytes sent"] = values.nbytes + scales.nbytes


class Block(NamedTuple):
    """What a process of the session does, and the minutes that it may take."""

    minutes: float
    works: tuple[Callable[[Session], None], ...]


def _run(
    name: str, steps: int = 6, accumulation: int = 8, optimizer: str = "adamw",
    beside: bool = False, minutes: float = 2,
) -> Block:  # fmt: skip
    how: dict[str, Any] = {"accumulation": accumulation, "beside": beside}
    return Block(minutes, (partial(training, name=name, optimizer=optimizer, steps=steps, **how),))


# By value: what was never run comes before what is only slower than it could be. The limits up to
# `mixture-1.7b` fit into the session. They are estimates: 20 s to start, 40 s of compilation (fp8
# also compiles two trial layers for each shape), the weights (8B: 48 s once), the steps.
BLOCKS: dict[str, Block] = {
    "versions": Block(0.5, (versions,)),
    "generation": Block(2, (generation,)),  # CUDA graphs
    "nccl": Block(7, (partial(run_tests, folder="tests/gpu/nccl"),)),
    "8b-third-bf16": _run("8b-third-bf16", minutes=1.5),
    "8b-third-fp8": _run("8b-third-fp8"),
    "8b-lora": _run("8b-lora"),
    "8b-lora-fp8": _run("8b-lora-fp8"),
    "1b-lora": _run("1b-lora", beside=True),
    "gpu-tests": Block(2, (partial(run_tests, folder="tests/gpu"),)),
    "memory": Block(1.5, (memory,)),
    "start": Block(1, (start,)),
    "mixture-1.7b": _run("mixture-1.7b", minutes=1.5),
    "experts": Block(1, (experts,)),
    "fp8-gather": Block(0.5, (fp8_gather,)),
    "chunks": Block(1, (chunks,)),
    # A fraction of the tokens of a real step, so that a step can be profiled.
    "8b-none": _run("8b-none"),
    # Measured once already.
    "olmoe-1b-7b": _run("olmoe-1b-7b"),
    "small": Block(4, (small,)),
    "attention": Block(2, (attention,)),
    "flex": Block(3, (flex,)),
    "124m-adamw": _run("124m", steps=30),
    "124m-muon": _run("124m", steps=30, optimizer="muon"),
    "1b-adamw": _run("1b", steps=8),
    "1b-muon": _run("1b", steps=8, optimizer="muon"),
    "8b-selective": _run("8b-selective", accumulation=16),
    "8b-full": _run("8b-full", accumulation=16),
    "loss": Block(3, (loss,)),
}


def print_plan(blocks: list[str], options: argparse.Namespace) -> None:
    """Print the time limit of each block, and which of them fit into the session together."""
    sums = list(accumulate(options.minutes or BLOCKS[block].minutes for block in blocks))
    for block, end in zip(blocks, sums, strict=True):
        late = "" if end <= options.total else "  only if blocks before it need less"
        limit = options.minutes or BLOCKS[block].minutes
        print(f"{block:13} {limit:4g} min, until {end:4g}{late}", flush=True)


def supervise(block: str, options: argparse.Namespace, minutes: float) -> dict[str, Any]:
    """Run a block in a separate process and return its entry of the summary."""
    (options.out / f"{block}.jsonl").unlink(missing_ok=True)
    command = [sys.executable, __file__, block, "--alone", "--out", str(options.out)]
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    env = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    start, status = time.perf_counter(), "ok"
    with (options.out / f"{block}.log").open("w") as log:
        process = subprocess.Popen(
            command + ["--tiny"] * options.tiny, stdout=log, stderr=log, env=env,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(timeout=60 * minutes)
            status = {0: "ok", 1: "failed"}.get(code, f"exit code {code}")
        except subprocess.TimeoutExpired:
            status = f"ended after {minutes:g} minutes"
            os.killpg(process.pid, 9)  # its own session: also kills its children
            process.wait()
    seconds = round(time.perf_counter() - start, 1)
    path = options.out / f"{block}.jsonl"  # its parts, also after a timeout
    lines = path.read_text().splitlines() if path.exists() else []
    return {"status": status, "seconds": seconds, "parts": list(map(json.loads, lines))}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("blocks", nargs="*", default=[], choices=[*BLOCKS, []])
    parser.add_argument("--out", type=Path, default=Path("gpu-session"))
    parser.add_argument("--minutes", type=float, help="for each block, instead of its own limit")
    parser.add_argument("--total", type=float, default=25.0, help="minutes of the session")
    parser.add_argument("--tiny", action="store_true", help="small shapes, on the CPU")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.tiny = options.tiny or not torch.cuda.is_available()
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.alone:
        session = Session(options.out, options.tiny, options.blocks[0])
        for work in BLOCKS[session.block].works:
            work(session)
        sys.exit(bool(session.failed))
    summary: dict[str, Any] = {}
    blocks = options.blocks or list(BLOCKS)
    print_plan(blocks, options)
    end = time.perf_counter() + 60 * options.total
    for block in blocks:
        left = (end - time.perf_counter()) / 60
        if left <= 0:
            print(f"{block:13} left out: the {options.total:g} minutes are over", flush=True)
            continue
        minutes = min(left, options.minutes or BLOCKS[block].minutes)
        summary[block] = supervise(block, options, minutes)
        (options.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
        failed = [part["part"] for part in summary[block]["parts"] if "error" in part]
        print(f"{block:13} {summary[block]['seconds']:7.1f} s  {summary[block]['status']}"
              f"{': ' + ', '.join(failed) if failed else ''}", flush=True)  # fmt: skip
    sys.exit(any(block["status"] != "ok" for block in summary.values()))


if __name__ == "__main__":
    main()
