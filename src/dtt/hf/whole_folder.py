"""Exports of multimodal models: the trained text model, back in the folder that it is from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from fnmatch import fnmatch
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dtt.artifacts.manifests import ExportManifest
from dtt.base.files import check_space
from dtt.hf.chat_format import read_config
from dtt.hf.library_folder import loaded, text_logits
from dtt.hf.model_source import find_model
from dtt.hf.publish import CARD, LOADED
from dtt.hf.read import stored_tensors, weight_files
from dtt.hf.verify import differing_logits
from dtt.hf.weights import write_shards
from dtt.mesh.sharding import FullTensor
from dtt.model.families import multimodal

NOT_KEPT = (
    *LOADED, CARD, ExportManifest.filename, ".*", "*.safetensors*", "*.bin*", "*.pt*", "*.gguf",
    "*.py", "tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt",
)  # fmt: skip
"""Files of the old folder that an export writes itself, or that are weights or code."""
OF_TEXT = ("architectures", "transformers_version")
"""Keys of the config.json of a text model that have no meaning inside of another."""
OF_WHOLE = ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype", multimodal.TIED)
"""Keys of the text model that are repeated beside `text_config`."""


@torch.inference_mode()
def put_back(staging: Path, source: str, ids_T: Tensor, max_shard_size: str) -> float:
    """Replace the text model that was exported to `staging` by the multimodal one it belongs to.

    `source` is the multimodal model, a folder or a model on the Hub: its other weights and files
    are taken over as they are. Returns the largest difference of a logit of random ids between the
    two models; raises DamagedError if it exceeds rounding.
    """
    folder = find_model(source, where="the multimodal model that the text model was taken from")
    expected = text_logits(loaded(staging, torch.float32)[0], ids_T[None])
    ours = stored_tensors(weight_files(staging))
    theirs = stored_tensors(weight_files(folder))
    whole = _together(ours, theirs)
    size = sum(prod(one.shape) * one.dtype.itemsize for one in whole.values())
    check_space(staging, size, "the multimodal model")
    new = staging / "whole"
    new.mkdir()
    write_shards(whole, new, max_shard_size)
    for path in (*weight_files(staging), staging / "model.safetensors.index.json"):
        path.unlink(missing_ok=True)
    for path in new.iterdir():
        path.rename(staging / path.name)
    new.rmdir()
    config = _config(read_config(folder / "config.json"), read_config(staging / "config.json"))
    content = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (staging / "config.json").write_text(content, encoding="utf-8")
    for path in folder.iterdir():
        if path.is_file() and not any(fnmatch(path.name, pattern) for pattern in NOT_KEPT):
            shutil.copyfile(path, staging / path.name)
    got = text_logits(loaded(staging, torch.float32)[0], ids_T[None])
    return differing_logits(staging, expected, got)


def _together(
    ours: Mapping[str, FullTensor], theirs: Mapping[str, FullTensor]
) -> dict[str, FullTensor]:
    """Return the tensors of the multimodal model `theirs` with those of the text model `ours`."""
    like = next(name for name in theirs if multimodal.TEXT.search(name))
    text = {multimodal.whole_name(name, like): one for name, one in ours.items()}
    others = {name: one for name, one in theirs.items() if multimodal.text_name(name) is None}
    if text.keys() <= theirs.keys():
        # What the library does not read, such as keys of layers that share those of others. With
        # other names, such as those of stacks of experts, the rest would be trained weights.
        others = {name: one for name, one in theirs.items() if not name.endswith("lm_head.weight")}
    return others | text


def _config(whole: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of a multimodal model with another text model."""
    # Some classes read the ids, or if the head is tied, from the one, some from the other.
    repeated = {
        key: text[key] for key in OF_WHOLE if key in text and (key in whole or key == "dtype")
    }
    inner = {key: value for key, value in text.items() if key not in OF_TEXT}
    return {**whole, **repeated, "text_config": inner}
