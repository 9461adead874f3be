"""Ranks that divide the weights generate the tokens of one process, and rank 0 prints them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import forked_runs, warm_python
from support.forked import CONTEXT
from support.library_types import TYPES, built, initialized
from support.ranks import on_ranks
from support.running import Dtt
from support.tiny_architectures import make, tiny_architecture
from support.tiny_job import make_tokenizer, write_checkpoint, write_data, write_job

from dtt.config.parallel import Sizes
from dtt.hf import export
from dtt.hf.model_source import load_model, on_device, weight_bytes
from dtt.hf.read import LoadedModel
from dtt.mesh.dist import World
from dtt.mesh.sharding import local
from dtt.model.generate import generate_batch
from dtt.parallel.sharded_model import layout_of_weights, load_sharded

PROMPTS = ["def f", "x", "a longer prompt"]
GREEDY = ["--temperature", 0]
SAMPLED = ["--temperature", 1.5, "--top-k", 100, "--seed", 3]


@pytest.fixture
def job(dtt: Dtt) -> Path:
    """A job whose vocabulary two ranks can divide."""
    job = write_job(dtt.folder)
    write_data(job, make_tokenizer("<|more|>"))
    write_checkpoint(job, 20)
    return job


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_two_ranks_print_the_texts_of_one_process_once(
    dtt: Dtt, job: Path, options: list[Any]
) -> None:
    (dtt.folder / "prompts.txt").write_text("\n".join(PROMPTS[1:]) + "\n")
    asked = ["generate", job, "-p", PROMPTS[0], "--prompts-file", "prompts.txt"]
    asked += ["--max-new-tokens", 20, "--batch-size", 2, *options]
    alone = dtt(*asked).stdout
    assert len({line.partition(" ")[2] for line in alone.splitlines()}) >= 3
    assert forked_runs.run(dtt, *asked, ranks=2).stdout == alone
    streamed = ["generate", job, "-p", PROMPTS[0], "--max-new-tokens", 20, *options]
    assert forked_runs.run(dtt, *streamed, ranks=2).stdout == dtt(*streamed).stdout


def test_three_ranks_cannot_divide_the_heads_of_an_export(dtt: Dtt) -> None:
    job = write_job(dtt.folder)
    out = dtt.folder / "out"
    export.run(str(job), ["export.dtype=fp32"], out=out, upload=None, private=False)
    asked = ["generate", out, "-p", "x", "--max-new-tokens", 20, "--seed", 1, "--json"]
    alone, sharded = dtt(*asked), forked_runs.run(dtt, *asked, ranks=3)
    assert json.loads(sharded.stdout) == json.loads(alone.stdout)
    assert "divided over 3 ranks: tensor 1, shard 3" in sharded.stderr


def test_torchrun_hands_standard_input_to_rank_0_alone(dtt: Dtt, job: Path) -> None:
    asked = ["generate", job, "-p", "-", "--max-new-tokens", 20, *GREEDY]
    argv = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2, "-m", "dtt.main"]
    done = subprocess.run(
        [sys.executable, *map(str, [*argv, *asked])],
        cwd=dtt.folder, executable=warm_python.start(CONTEXT),
        input="typed é", capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.startswith("typed é")
    assert done.stdout == dtt(*asked, stdin="typed é").stdout


def test_an_error_is_reported_once(dtt: Dtt, job: Path) -> None:
    long = forked_runs.start(dtt, "generate", job, "-p", "x" * 100, ranks=2).wait()
    assert long.returncode == 2
    assert long.stderr.count("the prompt is too long") == 1


def loaded(name: str, dtype: torch.dtype) -> LoadedModel:
    """A model with weights in which nothing is the identity."""
    if name in TYPES:
        arch: Any = built(name)
        model = initialized(arch)
    else:
        arch = tiny_architecture(name)
        model, _ = make(arch)
    generator = torch.Generator().manual_seed(2)
    state = {
        name: (weight + 0.1 * torch.randn(weight.shape, generator=generator)).to(dtype)
        for name, weight in model.state_dict().items()
    }
    return LoadedModel(arch, state, Path(), None, ())


def tokens(model: Any, decoding: Any = None) -> list[tuple[int, int]]:
    """The tokens after three prompts: greedy, and sampled."""
    prompts, found = [[1, 2, 3, 4, 5], [7], [9, 8]], []
    for temperature in (0, 1.3):
        own = [torch.Generator().manual_seed(seed) for seed in range(3)]
        how = {"temperature": temperature, "max_new_tokens": 9, "decoding": decoding}
        found += [*generate_batch(model, prompts, generators=own, **how)]
    return found


def answers(world: World, name: str, dtype: torch.dtype) -> tuple[list[tuple[int, int]], float]:
    """What all ranks generate together, and the share of the weights that this one holds."""
    torch.set_num_threads(1)
    trained = loaded(name, dtype)
    model, decoding = load_sharded(trained, world)
    weights = dict(model.named_parameters())
    assert {weight.dtype for weight in weights.values()} == {dtype}
    held = sum(local(weight).numel() for weight in weights.values())
    every = sum(weight.numel() for weight in weights.values())
    return tokens(model, decoding), held / every


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama-grouped-tied", torch.float32),
        ("gpt2", torch.float64),
        ("mixtral", torch.float32),
        ("gemma3", torch.float32),
        ("lfm2", torch.float32),  # whose inside dtt does not know
    ],
)
def test_each_kind_of_model(name: str, dtype: torch.dtype) -> None:
    trained = loaded(name, dtype)
    expected = tokens(on_device(trained, torch.device("cpu")))
    assert len(set(expected)) > 20
    for found, share in on_ranks(2, answers, name, dtype):
        assert found == expected
        assert share < 0.6


@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [(2, Sizes(tensor=2)), (3, Sizes(shard=3)), (4, Sizes(tensor=2, shard=2))],
)
def test_two_heads_of_keys_and_values_are_divided_over_two_ranks(ranks: int, sizes: Sizes) -> None:
    assert layout_of_weights(tiny_architecture("llama-grouped-tied"), ranks) == sizes


def test_the_size_of_the_weights_is_known_before_they_are_read(dtt: Dtt, job: Path) -> None:
    trained = load_model(str(job), ema=False)
    size = sum(tensor.nbytes for tensor in trained.tensors.values())
    assert weight_bytes(str(job)) == weight_bytes(f"{job}@20") == size
    out = dtt.folder / "out"
    export.run(str(job), ["export.dtype=fp32"], out=out, upload=None, private=False)
    assert size <= weight_bytes(str(out)) < size + 10_000  # with the header
