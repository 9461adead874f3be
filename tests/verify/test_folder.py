"""`dtt verify --model`: what it finds in tiny models of classes that differ in kind."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.multimodal_folders import write_multimodal
from support.tiny_job import make_tokenizer

from dtt.base.errors import ConfigError, DttError
from dtt.hf.read import read_hf_folder
from dtt.hf.verify import check_import
from dtt.model.architecture import BuiltArchitecture
from dtt.model.library.family import TransformersFamily
from dtt.train.contract_check import check_gradients
from dtt.verify import folder

SCRIPT = Path(__file__).parents[2] / "benchmarks/small_models.py"
spec = importlib.util.spec_from_file_location("small_models", SCRIPT)
assert spec is not None
assert spec.loader is not None
small_models = importlib.util.module_from_spec(spec)
spec.loader.exec_module(small_models)


def model_of(kind: str) -> Any:
    section = TransformersFamily(config=small_models.tiny(kind))
    return folder.initialized(BuiltArchitecture(section=section, vocab_size=256, max_seq_len=24))


@pytest.mark.parametrize(
    ("kind", "limits"),
    [
        ("phi", set()),  # a head with a bias
        ("opt", {"documents", "dropout"}),  # a shell around the body
        ("llama4_text", set()),  # a prefix that names no module
        ("minicpm3", set()),  # a factor before the head
        ("recurrent_gemma", {"documents"}),  # a cap under a name of its own
        ("deepseek_v32", set()),  # an indexer, which gets no gradient
        ("afmoe", set()),  # corrections that are frozen parameters; masks by type of layer
        ("apertus", set()),  # initial values that only the constructor gives
        ("gemma3n_text", set()),  # sizes that only the body knows
        ("gemma4_text", set()),  # sizes that differ from layer to layer
        ("mamba", {"documents"}),  # a mask with a value for each token
        ("lfm2_moe", {"documents"}),  # documents that see little of each other
        ("xlstm", {"documents"}),  # a cache of other sizes than its layers, in such a small model
    ],
)
def test_a_class_of_each_kind_works(kind: str, limits: set[str]) -> None:
    model = model_of(kind)
    found = {check.name: check for check in folder.checks(model, folder.of_library(model))}
    assert {name for name, one in found.items() if one.verdict == "limit"} == limits
    assert [one for one in found.values() if one.verdict == "fails"] == []
    assert "not checked" not in found["gradients"].detail


IDLE = r"1 parameters get no gradient, such as .*\.1\.idle"


@pytest.mark.parametrize(
    "kind", ["deepseek_v3", "gpt_oss", "mixtral", "phi", "longcat_flash", "opt"]
)
def test_a_parameter_that_nothing_uses_is_found_without_values(kind: str) -> None:
    """In mixtures, too. Where code asks for numbers, a made-up one accuses no parameter."""
    section = TransformersFamily(config=small_models.tiny(kind))
    arch = BuiltArchitecture(section=section, vocab_size=256, max_seq_len=24)
    assert check_gradients(arch).startswith("each of")
    idle = torch.nn.Parameter(torch.empty(3, device="meta"))
    arch.skeleton.blocks()[1].register_parameter("idle", idle)
    if kind in ("longcat_flash", "opt"):
        assert check_gradients(arch).startswith("not checked")
        return
    with pytest.raises(ConfigError, match=IDLE):
        check_gradients(arch)


def test_a_head_that_computes_something_else_is_found() -> None:
    model = model_of("phi")
    model.softcap = 0.1
    found = {check.name: check.verdict for check in folder.checks(model, model.library)}
    assert (found["logits"], found["loss"], found["export"]) == ("fails",) * 3


def test_a_model_that_sees_later_tokens_is_found() -> None:
    model = model_of("cpmant")
    found = {check.name: check for check in folder.checks(model, folder.of_library(model))}
    assert found["causal"].verdict == "fails"
    assert found["causal"].detail.startswith("tokens see later ones")


@pytest.mark.parametrize("kind", ["phi", "llama"])
def test_a_folder_without_weights_gets_initial_values(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also a type that dtt has a family for: then the weights are those of its export."""
    from transformers import AutoConfig

    AutoConfig.for_model(**small_models.tiny(kind), vocab_size=256).save_pretrained(tmp_path)
    folder.run(str(tmp_path), as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["verified"]
    names = [check["name"] for check in found["checks"] if check["verdict"] == "works"]
    assert names[:2] == ["logits", "loss"]
    assert ("export" in names) == (kind == "phi")


def test_a_folder_of_another_kind_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "phi4_multimodal"}))
    with pytest.raises(DttError, match="it has parts: audio_config, vision_config"):
        folder.run(str(tmp_path), as_json=False)


@pytest.mark.parametrize("kind", ["gemma4", "llama4", "mistral3", "qwen3_5"])
def test_the_text_model_of_a_multimodal_folder_works(kind: str, tmp_path: Path) -> None:
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    write_multimodal(kind, tmp_path / "whole", tmp_path / "tokenizer.json")
    model, theirs, origin = folder.models(tmp_path / "whole")
    assert origin == "weights of the folder"
    found = {check.name: check.verdict for check in folder.checks(model, theirs)}
    limited = {"documents"} if kind == "qwen3_5" else set()
    assert {name for name, verdict in found.items() if verdict != "works"} == limited


def test_a_head_that_the_whole_folder_alone_ties_is_tied(tmp_path: Path) -> None:
    """GOT-OCR2 says so beside `text_config`, and its part for images has eager attention alone."""
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    small_models.write_whole("got_ocr2", "qwen2", tmp_path / "whole", tmp_path)
    model, theirs, _ = folder.models(tmp_path / "whole")
    assert {check.verdict for check in folder.checks(model, theirs)} == {"works"}
    assert check_import(tmp_path / "whole", read_hf_folder(tmp_path / "whole")) < 1e-4


def test_a_parameter_without_initial_values_is_found() -> None:
    with pytest.raises(DttError, match=r"gives no initial values to transformer\.h\.0\.attn"):
        model_of("openai-gpt")


def test_the_weights_of_a_folder_are_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_of("phi")
    folder.of_library(model).save_pretrained(tmp_path)
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    folder.run(str(tmp_path), as_json=False)
    first, *rows = capsys.readouterr().out.splitlines()
    assert first.endswith("weights of the folder")
    assert {row.split()[1] for row in rows} == {"works"}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    folder.of_library(model).save_pretrained(tmp_path)
    with pytest.raises(DttError, match="checks fail: logits, loss"):
        folder.run(str(tmp_path), as_json=False)
