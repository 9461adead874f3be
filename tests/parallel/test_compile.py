"""Blocks are compiled once for each shape, and training goes on where they cannot be."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.own_classes import NOTHING
from support.running import Dtt
from support.tiny_architectures import decoder, make, tiny_architecture
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch._dynamo.utils import counters

from dtt.config.model import ModelConfig
from dtt.config.schedule import RunFacts
from dtt.config.train import TrainConfig
from dtt.evaluate.validation import Sampler
from dtt.model.contract import Model
from dtt.model.decoder import Decoder, params_of
from dtt.optim import built, groups
from dtt.optim.adamw import AdamWConfig
from dtt.parallel.apply import compile_each_block, rematerialize


def make_model() -> Decoder:
    return decoder(ModelConfig(dim=16, n_layers=2, n_heads=2), 64, 16)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[list[object]]:
    """The inputs of each graph that is compiled."""
    found: list[list[object]] = []

    def record(graph: torch.fx.GraphModule, inputs: list[object]) -> object:
        found.append(inputs)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=record))
    torch.compiler.reset()
    return found


def test_every_size_of_a_growing_batch_is_compiled(graphs: list[list[object]]) -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    model = Model()
    model.layers = nn.ModuleList([Twice()])
    compile_each_block(model)
    sizes = [(1, 4), *((rows, 8) for rows in range(1, 10))]  # torch's own limit is 8
    for rows, seq_len in sizes:
        model.layers[0](torch.zeros(rows, seq_len, 4))
    assert len(graphs) == len(sizes)


@pytest.mark.slow
def test_evaluation_and_samples_leave_the_training_graph_static(
    graphs: list[list[object]], tokens: Path
) -> None:
    model = make_model()
    compile_each_block(model)
    ids = torch.randint(0, model.arch.vocab_size, (8, 9))
    with torch.no_grad():
        for rows in (8, 3):
            model(ids[:rows, :-1], ids[:rows, 1:])
    tokenizer = Tokenizer.from_file(str(tokens / "tokenizer.json"))
    train = TrainConfig(sample_tokens=6)
    Sampler(train, tokenizer, [1], "one", (0,), seed=0).record(model, 0)
    before = len(graphs)
    for _ in range(2):
        model(ids[:, :-1], ids[:, 1:]).loss.backward()
    assert len(graphs) == before + 1
    assert not any(isinstance(i, torch.SymInt) for inputs in graphs for i in inputs)


@pytest.mark.parametrize(
    ("how", "graphs_of_a_shape"), [({"in_parts": True}, 1), ({"apart": True}, 2)]
)
def test_parts_of_blocks_are_compiled_once_and_change_no_gradient(
    graphs: list[list[object]], how: dict[str, bool], graphs_of_a_shape: int
) -> None:
    """Before the MLP; beside experts of other ranks also the router, and once all their rows."""
    arch = tiny_architecture("olmoe" if "apart" in how else "llama")
    ids = torch.randint(0, arch.vocab_size, (2, 9))
    gradients = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = make(arch)[0]
        rematerialize(model, "full", apart="apart" in how)
        if compiled:
            compile_each_block(model, **how)
        for rows in (1, 2):
            model(ids[:rows, :-1], ids[:rows, 1:]).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*gradients)
    assert len(graphs) == 2 * graphs_of_a_shape + ("apart" in how)


def test_another_learning_rate_compiles_nothing(graphs: list[list[object]]) -> None:
    model = make_model()
    compile_each_block(model)
    optimizers = built.build(AdamWConfig(), params_of(model), RunFacts(1))
    ids = torch.randint(0, model.arch.vocab_size, (4, 9))
    counters.clear()
    for multiplier in (0.1, 0.5, 1.0, 0.9):
        groups.set_learning_rate(optimizers, multiplier)
        model(ids[:, :-1], ids[:, 1:]).loss.backward()
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
    assert len(graphs) == counters["stats"]["unique_graphs"] == 1


NO_COMPILER = """
import os
import torch._inductor.config
torch._inductor.config.cpp.cxx = (None, "/bin/false")
os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.abspath("kernels")
"""


@pytest.mark.slow
def test_without_a_compiler_training_continues_and_logs_the_reason_once(
    dtt: Dtt, tiny: Any
) -> None:
    (dtt.folder / "mine.py").write_text(NO_COMPILER + NOTHING)
    keys = {"train__remat": "selective", "actions": "[{type: mine.py:Nothing}]"}
    run = dtt("train", *tiny(train__compile="true", train__steps=2, **keys))
    reported = [line for line in run.stderr.splitlines() if "training continues uncompiled" in line]
    assert len(reported) == 1
    assert "No working C++ compiler" in reported[0]
    assert "/bin/false" in reported[0]
    assert "Traceback" not in run.stderr
    assert "step 2/2" in run.stderr
