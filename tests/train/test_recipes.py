"""The recipes for fine-tuning resolve, and train, on a stand-in for the released model."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from support.conversation_files import conversation, jsonl
from support.library_releases import RELEASES
from support.running import Dtt
from support.stand_in import write_stand_in

from dtt.artifacts.jobdir import JobDir
from dtt.checkpoint import store
from dtt.config.load import resolve
from dtt.config.shipped import shipped_configs
from dtt.estimate import gpus
from dtt.estimate.estimates import make_estimate
from dtt.hf.model_source import read_architecture
from dtt.track import jsonl as records
from dtt.train.find_job import model_of

RECIPES = sorted(p for s in ("sft", "dpo") for p in (shipped_configs() / s).glob("*-*.yaml"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the stand-in `model`, conversations and preferences."""
    folder = tmp_path_factory.mktemp("recipes")
    write_stand_in(folder / "model")
    (folder / "sft.jsonl").write_bytes(jsonl([conversation(i) for i in range(60)]))
    pairs: list[dict[str, Any]] = [
        {"prompt": f"{i} plus one?", "chosen": f"{i + 1}", "rejected": f"{i + 7}"}
        for i in range(60)
    ]
    (folder / "dpo.jsonl").write_bytes(jsonl(pairs))
    return folder


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_every_recipe_resolves_for_a_model_of_any_size(path: Path, folder: Path) -> None:
    model, _, method = path.stem.rpartition("-")
    published = resolve(path, env={}).config
    assert published.name == f"{model}-{path.parent.name}-{method}"
    assert published.init.source == f"hf:{published.tokenizer.path}"  # type: ignore[union-attr]
    other = [f"init.from=hf:{folder / 'model'}", f"tokenizer.path={folder / 'model'}"]
    cfg = resolve(path, other, env={}, model_of=model_of).config
    assert cfg.model.dim == 8, "the sizes are those of the folder"
    assert cfg.adapter.type == ("none" if method == "full" else "lora")
    assert (getattr(cfg.adapter, "base", None) == "nf4") == (method == "qlora")
    assert (cfg.optim.type, cfg.chat.template) == ("adamw", "tokenizer")
    assert (cfg.data.type == "preference") == (path.parent.name == "dpo")
    assert cfg.launch.gpus == cfg.parallel.shard
    # One step is a whole number of micro-batches on the GPUs that the recipe is for.
    step = cfg.train.global_batch_tokens // cfg.train.seq_len
    assert step % (cfg.train.micro_batch * cfg.launch.gpus) == 0


DEPTHS: dict[str, tuple[int, list[str]]] = {
    "ministral3-8b": (34, []),
    "gpt-oss-20b": (24, []),
    "granite4-h-micro-full": (40, (["mamba"] * 9 + ["attention"]) * 4),
}
"""Layers of a release, and their types if there are several, by the beginning of a recipe's name.
For the others, which take 4 to 11 s each at their depth, two layers are planned: their models are
small, or as large as one of these."""
OF_TRANSFORMERS = [p for p in RECIPES if p.parent.name == "sft" and p.stem.startswith((*RELEASES,))]


@pytest.mark.slow
@pytest.mark.parametrize("path", OF_TRANSFORMERS, ids=lambda p: p.stem)
def test_a_recipe_for_a_model_of_transformers_is_planned(path: Path, tmp_path: Path) -> None:
    name = path.stem.rpartition("-")[0]
    config = deepcopy(RELEASES[name])
    for depth, kinds in (found for start, found in DEPTHS.items() if path.stem.startswith(start)):
        sizes = config.get("text_config", config)
        sizes |= {"num_hidden_layers": depth} | ({"layer_types": kinds} if kinds else {})
    (tmp_path / "config.json").write_text(json.dumps(config))
    here = [f"init.from=hf:{tmp_path}", f"tokenizer.path={tmp_path}", "train.steps=9"]
    cfg = resolve(path, here, env={}, model_of=model_of).config
    assert cfg.model.family == "transformers"
    rows = read_architecture(f"hf:{tmp_path}").vocab_size
    assert make_estimate(cfg, gpus.find("A100-80", 1), None, rows).fits


def test_each_release_has_recipes() -> None:
    """QLoRA for those of about 8B parameters."""
    methods = {
        name: {p.stem.rpartition("-")[2] for p in RECIPES if p.stem.startswith(name)}
        for name in RELEASES
    }
    assert {name for name, found in methods.items() if found >= {"full", "lora"}} == {*RELEASES}
    with_4_bits = {"qwen3.5-9b", "gemma4-e4b", "ministral3-8b"}
    assert {name for name, found in methods.items() if "qlora" in found} == with_4_bits


@pytest.mark.parametrize("recipe", ["sft/llama3.2-1b-lora", "dpo/qwen3-0.6b-lora"])
def test_a_recipe_trains(recipe: str, folder: Path) -> None:
    dtt, stage = Dtt(folder), recipe[:3]
    here = [
        "-c", recipe, "init.from=hf:model", "tokenizer.path=model", f"name={stage}",
        f"download.dataset={stage}.jsonl", "train.seq_len=512", "train.global_batch_tokens=1024",
        "train.steps=2", "train.micro_batch=1", "train.log_every=1", "train.precision=bf16",
        "train.sample_tokens=2", "train.eval_answers=2", "train.eval_answer_tokens=2",
    ]  # fmt: skip
    for command in ("download", "tokenize", "train"):
        dtt(command, *here)
    job = JobDir(folder / "jobs" / stage)
    assert [r["step"] for r in records.read(job.metrics, "train")] == [1, 2]
    checkpoint = store.newest(job.checkpoints)
    assert checkpoint is not None
    assert checkpoint.manifest.base is not None
    assert all(".lora_" in name for name in checkpoint.tensors(store.MODEL))
