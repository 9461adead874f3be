"""Multimodal folders: the text model is trained, and exported with all that is beside it."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.multimodal_folders import PARTS, write_multimodal
from torch import Tensor

from dtt.base.errors import DamagedError, InputError
from dtt.config.adapter import LoraConfig
from dtt.hf import peft as ours
from dtt.hf import publish, verify, write_folder
from dtt.hf.model_source import on_device
from dtt.hf.read import LoadedModel, read_hf_folder
from dtt.hf.released import Released
from dtt.model.adapted_layers import adapted_layers
from dtt.model.families import multimodal
from dtt.model.lora import attach, merged


@torch.no_grad()
def logits(model: Any, tokens: Tensor) -> Tensor:
    inner = getattr(model, "language_model", None)
    if inner is not None and inner.get_output_embeddings() is not None:
        model = inner  # Llama 4's: the class around it fails without an image
    found: Tensor = model(input_ids=tokens).logits
    return found


def trained_further(found: LoadedModel) -> LoadedModel:
    torch.manual_seed(1)
    state = {n: t + 0.01 * torch.randn_like(t) for n, t in found.tensors.items()}
    return replace(found, state=state)


LAYER = re.compile(r"language_model.*self_attn\.q_proj\.weight$")
UNREAD = {"gemma4": "k_proj.weight"}
"""A tensor that the library does not read: here of a layer that takes keys from another one."""


@pytest.mark.parametrize("kind", PARTS)
def test_the_text_model_is_trained_and_exported_with_the_others(
    kind: str, tokenizer_json: Path, tmp_path: Path
) -> None:
    theirs = write_multimodal(kind, tmp_path / "whole", tokenizer_json)
    path = tmp_path / "whole/model.safetensors"
    last = max(name for name in load_file(path) if LAYER.search(name))
    unread = last.replace("q_proj.weight", UNREAD.get(kind, "rotary_emb.inv_freq"))
    before = load_file(path) | {unread: torch.ones(8)}
    save_file(before, path, metadata={"format": "pt"})
    found, tokens = read_hf_folder(tmp_path / "whole"), torch.randint(320, (1, 20))
    assert found.arch.family == {"gemma3": "gemma3", "llava": "mistral"}.get(kind, "transformers")
    ours = on_device(found, torch.device("cpu")).eval()
    torch.testing.assert_close(ours(tokens), logits(theirs, tokens), rtol=0, atol=1e-4)
    trained = trained_further(found)
    write_folder.export(
        trained, publish.ExportSource("job", 1, "c0ffee"), tmp_path / "out", dtype="fp32",
        max_shard_size="100KB", card="", released=Released.of_folder(tmp_path / "whole"),
    )  # fmt: skip
    exported, report = transformers.AutoModelForImageTextToText.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert type(exported) is type(theirs)
    assert not report["missing_keys"]
    expected = on_device(trained, torch.device("cpu")).eval()(tokens)
    torch.testing.assert_close(logits(exported.eval(), tokens), expected, rtol=0, atol=1e-4)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 1
    after = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert after.keys() == before.keys()
    of_text = {name for name in before if multimodal.text_name(name)} - {unread}
    assert {name for name in before if not torch.equal(before[name], after[name])} == of_text
    assert (tmp_path / "out/preprocessor_config.json").is_file()
    again = read_hf_folder(tmp_path / "out")
    assert all(torch.equal(tensor, trained.state[n][()]) for n, tensor in again.tensors.items())


OF_TEXT = r".*language_model\..*\.(q_proj|down_proj)"


def targets(found: LoadedModel) -> tuple[str, str]:
    """Return the layers of OF_TEXT by the names of dtt."""
    if found.arch.family == "transformers":
        return "q_proj", "down_proj"
    return "attn.q", "mlp.down"


def randomised(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the adapters in `parameters`, with values that are not zero."""
    torch.manual_seed(5)
    found = {name: p for name, p in parameters.items() if "lora_" in name}
    with torch.no_grad():
        for parameter in found.values():
            parameter.normal_(std=0.2)
    return found


def whole_model(folder: Path) -> Any:
    return transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()


@pytest.mark.parametrize("kind", PARTS)
def test_peft_applies_an_adapter_of_the_text_model_to_the_whole_one(
    kind: str, tokenizer_json: Path, tmp_path: Path
) -> None:
    folder, out = tmp_path / "whole", tmp_path / "adapter"
    write_multimodal(kind, folder, tokenizer_json)
    found, tokens = read_hf_folder(folder), torch.randint(320, (1, 20))
    first = next(iter(adapted_layers(LoraConfig(targets=targets(found)), found.arch)))
    cfg = LoraConfig(rank=4, targets=targets(found), rank_pattern={f"^{first}": 2})
    model: Any = on_device(found, torch.device("cpu")).float().eval()
    attach(model, cfg, torch.float32)
    state = randomised(dict(model.named_parameters()))
    layers = adapted_layers(cfg, found.arch)
    out.mkdir()
    ours.write_peft(out, ours.Adapter(state, layers, str(folder), None, folder, 0.0), found.arch)
    adapted: Any = peft.PeftModel.from_pretrained(whole_model(folder), out)
    torch.testing.assert_close(
        logits(adapted.base_model.model, tokens), model(tokens), rtol=0, atol=1e-4
    )
    of_peft = [name for name, _ in adapted.named_parameters() if "lora_" in name]
    assert len(of_peft) == len(state)
    assert all("language_model" in name for name in of_peft)
    whole = {n: t[()] for n, t in merged(found.state, state, layers).items()}
    assert verify.check_adapter(out, folder, replace(found, state=whole)) < 1e-4
    back = ours.read_peft(out, found.arch, cfg)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], parameter) for name, parameter in state.items())


def renamed(folder: Path, out: Path, old: str, new: str) -> None:
    """Write the adapter in `folder` to `out` with another prefix of its layers."""
    shutil.copytree(folder, out)
    path = out / "adapter_model.safetensors"
    tensors = {name.replace(old, new): tensor for name, tensor in load_file(path).items()}
    assert all(name.startswith(f"base_model.model.{new}") for name in tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def merged_with(folder: Path, found: LoadedModel, cfg: LoraConfig) -> LoadedModel:
    """Return a model with the adapter in `folder` merged, as dtt reads it."""
    state = ours.read_peft(folder, found.arch, cfg)
    whole = merged(found.state, state, adapted_layers(cfg, found.arch))
    return replace(found, state={name: one[()] for name, one in whole.items()})


def text_class(folder: Path) -> Any:
    """Return what AutoModelForCausalLM makes of a folder of Qwen3.5 or Llama 4: the text alone."""
    whole = whole_model(folder)
    of_text = transformers.AutoModelForCausalLM.from_config(whole.config.get_text_config()).eval()
    named = {multimodal.text_name(name): one for name, one in whole.state_dict().items()}
    of_text.load_state_dict({name: one for name, one in named.items() if name is not None})
    return of_text


def write_adapter(model: Any, out: Path, modules: Any) -> Any:
    """Write an adapter of PEFT into `out`, and return the model with it."""
    settings = peft.LoraConfig(r=4, lora_alpha=6, target_modules=modules)
    theirs: Any = peft.get_peft_model(model, settings)
    randomised(dict(theirs.named_parameters()))
    theirs.save_pretrained(out)
    return theirs


@pytest.mark.parametrize("kind", PARTS)
@pytest.mark.parametrize(
    ("load", "modules"), [(whole_model, OF_TEXT), (text_class, ["q_proj", "down_proj"])]
)
def test_an_adapter_of_peft_for_the_text_model_is_read(
    kind: str, load: Any, modules: Any, tokenizer_json: Path, tmp_path: Path
) -> None:
    folder, out = tmp_path / "whole", tmp_path / "adapter"
    write_multimodal(kind, folder, tokenizer_json)
    found, tokens = read_hf_folder(folder), torch.randint(320, (1, 20))
    theirs = write_adapter(load(folder), out, modules)
    trained = merged_with(out, found, LoraConfig(rank=4, alpha=6.0, targets=targets(found)))
    expected = logits(theirs.base_model.model, tokens)
    got = on_device(trained, torch.device("cpu")).float().eval()(tokens)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)
    assert verify.check_adapter(out, folder, trained) < 1e-4


OLD, NEW = "language_model.model.", "model.language_model."
"""Prefixes of the layers of a text model in older versions of transformers, and in newer ones."""


@pytest.mark.parametrize("kind", ["mistral3", "gemma3", "llava", "qwen3_5"])
def test_a_prefix_of_older_versions_is_accepted_where_peft_renames_it(
    kind: str, tokenizer_json: Path, tmp_path: Path
) -> None:
    """Qwen3.5 never had it: PEFT drops all of these layers, and computes without the adapter."""
    folder, out, old = tmp_path / "whole", tmp_path / "adapter", tmp_path / "old"
    write_multimodal(kind, folder, tokenizer_json)
    found = read_hf_folder(folder)
    write_adapter(whole_model(folder), out, OF_TEXT)
    renamed(out, old, NEW, OLD)
    cfg = LoraConfig(rank=4, alpha=6.0, targets=targets(found))
    trained = merged_with(old, found, cfg)
    same = merged_with(out, found, cfg).tensors
    assert all(torch.equal(same[name], tensor) for name, tensor in trained.tensors.items())
    if kind == "qwen3_5":
        with pytest.raises(InputError, match=r"it drops those of mlp\.down_proj"):
            verify.check_adapter(old, folder, trained)
    else:
        assert verify.check_adapter(old, folder, trained) < 1e-4


def test_an_adapter_that_names_a_layer_under_two_prefixes_is_refused(
    tokenizer_json: Path, tmp_path: Path
) -> None:
    folder, out = tmp_path / "whole", tmp_path / "adapter"
    write_multimodal("qwen3_5", folder, tokenizer_json)
    write_adapter(whole_model(folder), out, OF_TEXT)
    path = out / "adapter_model.safetensors"
    tensors = load_file(path)
    twice = {name.replace(NEW, "model."): tensor + 1 for name, tensor in tensors.items()}
    save_file(tensors | twice, path, metadata={"format": "pt"})
    found = read_hf_folder(folder)
    with pytest.raises(DamagedError, match="names a layer twice"):
        ours.read_peft(out, found.arch, LoraConfig(rank=4, targets=targets(found)))


def test_an_adapter_of_another_part_is_refused(tokenizer_json: Path, tmp_path: Path) -> None:
    folder, out = tmp_path / "whole", tmp_path / "adapter"
    write_multimodal("llava", folder, tokenizer_json)
    write_adapter(whole_model(folder), out, ["q_proj"])
    arch = read_hf_folder(folder).arch
    with pytest.raises(InputError, match=r"vision_tower[\s\S]*the text model alone"):
        ours.read_peft(out, arch, LoraConfig(targets=("q_proj",)))
