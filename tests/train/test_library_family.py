"""Runs with models of transformers: resumes, exports, training from a folder, adapters."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import resumed
from support.multimodal_folders import write_multimodal
from support.running import Dtt

from dtt.base.errors import DttError, ExitCode
from dtt.hf.read import read_hf_folder
from dtt.model.architecture import BuiltArchitecture

LFM2 = {
    "model_type": "lfm2", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
GLM4_MOE = {
    **LFM2, "model_type": "glm4_moe", "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "n_routed_experts": 8, "head_dim": 16, "attention_dropout": 0.1,
}  # fmt: skip
MAMBA2 = {
    "model_type": "mamba2", "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4,
    "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 16,
}  # fmt: skip


def configured(dtt: Dtt, config: dict[str, Any], **more: Any) -> tuple[str, ...]:
    sections = {"model": {"family": "transformers", "config": config}, **more}
    (dtt.folder / "run.yaml").write_text(yaml.safe_dump(sections))
    return ("-c", "run.yaml")


def on(tokens: Path) -> list[str]:
    keys = [key for key in resumed.WITHOUT_MODEL if not key.startswith(("data.", "train.eval"))]
    return [*keys, f"data.tokens={tokens}", "train.eval_tokens=240", "schedule.warmup=0"]


@pytest.mark.parametrize(
    ("config", "layout"),
    [
        (LFM2, "replicate=1"),
        (GLM4_MOE, "shard=2"),
    ],
    ids=["lfm2", "glm4_moe"],
)
def test_it_trains_and_a_resume_changes_no_bit(
    dtt: Dtt, config: dict[str, Any], layout: str
) -> None:
    started = configured(dtt, config)
    assert resumed.differing(dtt, layout, *started, settings=resumed.WITHOUT_MODEL) == []


def evaluated(job: Path) -> list[float]:
    records = map(json.loads, (job / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if record["kind"] == "eval"]


def test_an_export_is_read_again_as_what_was_trained(dtt: Dtt, tokens: Path) -> None:
    keys = [*on(tokens), "train.ema_decay=null", "train.eval_every=4"]
    dtt("train", *configured(dtt, GLM4_MOE), *keys)
    # Exported in bf16 with fp32 corrections, and compared with what the library computes.
    dtt("export", "jobs/t", "export.dtype=fp32")
    assert "generation_config.json" in {path.name for path in (dtt.folder / "exports/t").iterdir()}
    first = ("init.from=hf:exports/t", "train.steps=1", "name=again")
    dtt("train", *[key for key in keys if not key.startswith("name=")], *first)
    [_, *_, trained] = evaluated(dtt.folder / "jobs/t")
    [before, *_] = evaluated(dtt.folder / "jobs/again")
    assert before == pytest.approx(trained, abs=1e-5)
    saved = yaml.safe_load((dtt.folder / "jobs/again/config.yaml").read_text())
    assert saved["model"]["config"]["model_type"] == "glm4_moe"
    greedy = ("-p", "the", "--temperature", "0", "--max-new-tokens", "8")
    shown = [dtt("generate", name, *greedy).stdout for name in ("jobs/t", "exports/t")]
    assert shown[0] == shown[1]


def test_an_adapter_is_trained_and_merged_into_an_export(
    dtt: Dtt, tokens: Path, exported: Path
) -> None:
    keys = [*on(tokens), "train.ema_decay=null", "train.eval_every=2"]
    adapter = (
        f"init.from=hf:{exported}",
        "adapter.type=lora",
        "adapter.rank=4",
        "optim.type=adamw",
    )
    others = [key for key in keys if not key.startswith("name=")]
    dtt("train", *others, *adapter, "name=lora", "optim.lr=1e-2")
    losses = evaluated(dtt.folder / "jobs/lora")
    assert losses[-1] < losses[0]
    dtt("export", "jobs/lora", "export.dtype=fp32")
    # As PEFT reads it, which the export checks, and as a start reads it again.
    dtt("export", "jobs/lora", "--adapter")
    again = ("name=again", "init.adapter=exports/lora-adapter", "train.steps=1")
    done = dtt("train", *others, *adapter, *again)
    assert "differ from those of PEFT by" in done.stderr
    assert evaluated(dtt.folder / "jobs/again")[0] == pytest.approx(losses[-1], abs=1e-5)


@pytest.mark.slow
def test_the_text_model_of_a_multimodal_folder_is_trained_and_exported_with_the_others(
    dtt: Dtt, tokens: Path
) -> None:
    write_multimodal("gemma4", dtt.folder / "whole", tokens / "tokenizer.json")
    start = ("init.from=hf:whole", "train.ema_decay=null", "train.eval_every=4")
    dtt("train", *on(tokens), *start)
    dtt("export", "jobs/t", "export.dtype=fp32")
    config = json.loads((dtt.folder / "exports/t/config.json").read_text())
    assert (config["model_type"], config["architectures"]) == (
        "gemma4",
        ["Gemma4ForConditionalGeneration"],
    )
    shutil.rmtree(dtt.folder / "whole")
    done = dtt("export", "jobs/t", "--out", "again", expect=ExitCode.INPUT_MISSING)
    assert "the multimodal model that the text model was taken from" in done.stderr


def test_documents_that_no_mask_separates_are_never_joined_silently(dtt: Dtt, tokens: Path) -> None:
    masked = ("data.packing=best-fit", "data.mask_documents=true")
    done = dtt("train", *configured(dtt, MAMBA2), *on(tokens), *masked, expect=ExitCode.USAGE)
    assert "documents in one row see each other" in done.stderr
    alone = ("data.packing=none", "data.mask_documents=true", "train.steps=2")
    dtt("train", *configured(dtt, MAMBA2), *on(tokens), *alone)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"quantization_config": {"bits": 4}}, "are quantised: an unknown method, 4 bits"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            "the release of this model that is not quantised",
        ),
        ({"quantization_config": {"quant_method": "awq"}}, "are quantised: awq"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
            "from_pretrained(FOLDER).dequantize()",
        ),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "quantization_config=FineGrainedFP8Config(dequantize=True)",
        ),
        (
            {"quantization_config": {"quant_method": "mxfp4"}},
            "quantization_config=Mxfp4Config(dequantize=True)",
        ),
        ({"auto_map": {"AutoModelForCausalLM": "mine.Model"}}, "names code of the folder"),
        ({"model_type": "t5"}, "which is no causal model of transformers"),
        ({"block_auto_adjust_ff_dim": False}, "of another shape: model.layers.0"),
        ({"tie_word_embeddings": False}, "1 missing: lm_head.weight"),
        ({"model_type": "lfm9"}, "which is no causal model of transformers"),
    ],
)
def test_a_folder_that_cannot_be_used_as_it_is_meant_is_refused(
    exported: Path, tmp_path: Path, change: dict[str, Any], expected: str
) -> None:
    folder = changed(exported, tmp_path, change)
    with pytest.raises(DttError) as refused:
        read_hf_folder(folder)
    assert expected in f"{refused.value}"


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("model.safetensors", None, "model.safetensors is missing"),
        ("model.safetensors", b"cut", "is damaged"),
        (
            "model.safetensors.index.json",
            b'{"weight_map": {"a": "model-00001-of-00002.safetensors"}}',
            "model-00001-of-00002.safetensors is missing",
        ),
    ],
)
def test_a_folder_without_all_its_weights_is_refused_by_the_file(
    exported: Path, tmp_path: Path, name: str, content: bytes | None, expected: str
) -> None:
    folder = changed(exported, tmp_path, {})
    (folder / "model.safetensors").unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    with pytest.raises(DttError, match=expected):
        read_hf_folder(folder)


def test_keys_that_the_library_does_not_read_are_named(
    exported: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", logger="dtt"):
        read = read_hf_folder(changed(exported, tmp_path, {"topk_method": "noaux"}))
    assert "nor does dtt: topk_method" in caplog.text
    assert isinstance(read.arch, BuiltArchitecture)
    assert "topk_method" not in read.arch.section.model_dump()["config"]


def changed(exported: Path, folder: Path, change: dict[str, Any]) -> Path:
    for path in exported.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, tokens: Path) -> Path:
    dtt = Dtt(tmp_path_factory.mktemp("exported"))
    dtt("train", *configured(dtt, LFM2), *on(tokens), "train.steps=1")
    dtt("export", "jobs/t")
    return dtt.folder / "exports/t"
