"""Multimodal folders: the text model is trained, and exported with all that is beside it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.multimodal_folders import PARTS, write_multimodal
from torch import Tensor

from dtt.hf import publish, write_folder
from dtt.hf.model_source import on_device
from dtt.hf.read import LoadedModel, read_hf_folder
from dtt.hf.released import Released
from dtt.model.families import multimodal


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
