"""Export to a Hugging Face folder: written to a temporary folder, verified, then renamed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from fnmatch import fnmatch
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import Tensor

from dtt.artifacts.manifest import FileRecord
from dtt.artifacts.manifests import CHAT_TEMPLATE, ExportManifest
from dtt.base.errors import DamagedError
from dtt.base.files import check_space, sha256_file
from dtt.base.reading import read_whole
from dtt.data.text.tokenizer import add_in_front, open_tokenizer
from dtt.hf import verify
from dtt.hf.chat_format import ChatFormat, read_config
from dtt.hf.fold_scaling import fold
from dtt.hf.library_folder import loaded, text_logits
from dtt.hf.model_source import find_model, on_device
from dtt.hf.peft import Adapter, write_peft
from dtt.hf.publish import CARD, LOADED, ExportSource, published
from dtt.hf.read import LoadedModel, stored_tensors, weight_files
from dtt.hf.released import FROM_SCRATCH, SENTENCEPIECE, Released
from dtt.hf.weights import to_hf, write_shards
from dtt.mesh.sharding import FullTensor
from dtt.model import count, families
from dtt.model.architecture import (
    AnyArchitecture,
    BuiltArchitecture,
    decoder_architecture,
)
from dtt.model.families import multimodal

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Dtype = Literal["fp32", "bf16", "fp16"]
Check = Callable[[], tuple[float, float | None]]
"""Function that returns the largest difference of a logit, and by how much rounding moves one."""
NOT_KEPT = (
    *LOADED, CARD, ExportManifest.filename, ".*", "*.safetensors*", "*.bin*", "*.pt*", "*.gguf",
    "*.py", "tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt",
)  # fmt: skip
"""Files of the old folder that an export writes itself, or that are weights or code."""
OF_TEXT = ("architectures", "transformers_version")
"""Keys of the config.json of a text model that have no meaning inside of another."""
OF_WHOLE = ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype", multimodal.TIED)
"""Keys of the text model that are repeated beside `text_config`."""


def export(
    trained: LoadedModel,
    origin: ExportSource,
    out: Path,
    *,
    dtype: Dtype,
    max_shard_size: str,
    card: str,
    chat: ChatFormat | None = None,
    released: Released = FROM_SCRATCH,
) -> ExportManifest:
    """Write the export to `out`, replacing an existing folder, and return its manifest.

    The folder appears only after `transformers` has computed the same logits from it, and for a
    model that was trained on conversations the same ids of prompts; otherwise raises DamagedError.
    `card` is the text of README.md, `chat` the conversation format, and `released` what the weights
    that training started from brought with them.
    """
    n_parameters = count.parameters(trained.arch)
    write = _write_library if isinstance(trained.arch, BuiltArchitecture) else _write_decoder
    with published(out, n_parameters * DTYPES[dtype].itemsize) as staging:
        config, check = write(trained, staging, dtype, max_shard_size)
        _write_config(config, trained, staging, dtype, chat, released)
        _write_tokenizer(trained, staging, chat, released)
        (staging / CARD).write_text(card, encoding="utf-8")
        difference, rounding = check()
        if chat is not None:
            verify.check_prompts(staging, chat)
        if released.multimodal is not None:
            ids_T = verify.random_ids(trained.arch)
            moved = put_back(staging, released.multimodal, ids_T, max_shard_size)
            difference = max(difference, moved)
        # After parts for images: the type in config.json, theirs then, decides on the class.
        verify.check_token_ids(staging, trained.open_tokenizer())
        return _write_manifest(
            staging,
            trained,
            origin,
            chat,
            dtype=dtype,
            parameters=n_parameters,
            max_rounding_difference=rounding,
            max_logit_difference=difference,
        )


def _write_decoder(
    trained: LoadedModel, staging: Path, dtype: Dtype, max_shard_size: str
) -> tuple[dict[str, Any], Check]:
    """Write the weights of a model of dtt's own; return its config.json, and its check."""
    folded = fold(trained)
    exact = verify.kept_in_fp32(folded.decoder)
    rounded = {
        name: tensor.to(torch.float32 if name in exact else DTYPES[dtype])
        for name, tensor in folded.tensors.items()
    }
    write_shards(to_hf(rounded, folded.decoder), staging, max_shard_size)
    expected, rounding = verify.random_logits(trained.tensors, trained.decoder), None
    if folded.decoder != trained.decoder:
        got = verify.random_logits(folded.tensors, folded.decoder)
        verify.differing_logits(None, expected, got, "the folded weights")
    logits = verify.random_logits(rounded, folded.decoder)
    if any(rounded[name].dtype != tensor.dtype for name, tensor in folded.state.items()):
        rounding = verify.rounding_difference(expected, logits, dtype)

    def check() -> tuple[float, float | None]:
        return verify.check(staging, logits, folded.decoder), rounding

    family = families.get(folded.decoder.family)
    return family.to_hf_config(folded.decoder, folded.end_of_document), check


def _write_library(
    trained: LoadedModel, staging: Path, dtype: Dtype, max_shard_size: str
) -> tuple[dict[str, Any], Check]:
    """Do the same for a model of the library, which writes its own format."""
    model: Any = on_device(trained, torch.device("cpu")).eval()
    ids_T = verify.random_ids(trained.arch)
    with torch.inference_mode():
        expected = model.float()(ids_T[None])
    write_library(model, staging, DTYPES[dtype], max_shard_size)

    @torch.inference_mode()
    def check() -> tuple[float, float | None]:
        difference = check_library(model, staging, ids_T)
        moved = float((model(ids_T[None]) - expected).abs().max())
        return difference, moved if dtype != "fp32" else None

    return read_config(staging / "config.json"), check


def check_exportable(arch: AnyArchitecture) -> None:
    """Raise ConfigError for a model that no class of transformers computes."""
    if isinstance(arch, BuiltArchitecture) and not hasattr(arch.skeleton, "library"):
        decoder_architecture(arch, "dtt export")


def export_adapter(
    trained: LoadedModel,
    adapter: Adapter,
    origin: ExportSource,
    out: Path,
    *,
    card: str,
    chat: ChatFormat | None = None,
    released: Released = FROM_SCRATCH,
) -> ExportManifest:
    """Write the adapter alone to `out`, in the format of PEFT, and return the manifest.

    `trained` is the model with the adapter merged. The folder appears only after PEFT has computed
    the same logits with it on the model that it is for; otherwise as `export`.
    """
    size = sum(tensor.numel() for tensor in adapter.state.values())
    with published(out, 4 * size) as staging:
        write_peft(staging, adapter, trained.arch)
        _write_tokenizer(trained, staging, chat, released)
        (staging / CARD).write_text(card, encoding="utf-8")
        difference = verify.check_adapter(staging, adapter.folder, trained)
        return _write_manifest(
            staging,
            trained,
            origin,
            chat,
            dtype="fp32",
            parameters=size,
            max_logit_difference=difference,
        )


def _write_manifest(
    folder: Path, trained: LoadedModel, origin: ExportSource, chat: ChatFormat | None, **facts: Any
) -> ExportManifest:
    manifest = ExportManifest(
        **asdict(origin),
        **facts,
        chat=None if chat is None else chat.facts,
        end_of_document=trained.end_of_document,
        files=tuple(
            FileRecord(path=path.name, bytes=path.stat().st_size, sha256=sha256_file(path))
            for path in sorted(folder.iterdir())
        ),
    )
    (folder / manifest.filename).write_text(manifest.dump(), encoding="utf-8")
    return manifest


def _write_config(
    config: dict[str, Any],
    trained: LoadedModel,
    folder: Path,
    dtype: Dtype,
    chat: ChatFormat | None,
    released: Released,
) -> None:
    """Write config.json and generation_config.json; the latter has what `released` says, too."""
    end = trained.end_of_document
    # The end of a document remains a stop token: it ended the documents of pretraining.
    turns = () if chat is None else chat.facts.stop_tokens
    ends = [*dict.fromkeys((*turns, *released.stops, end))]
    # From scratch, the end of a document also starts a generation, if nothing else does.
    config |= {
        key: i for key, i in released.ids.items() if i is None or i < trained.arch.vocab_size
    }
    if trained.begin_of_document is not None:
        config["bos_token_id"] = trained.begin_of_document
    config["eos_token_id"] = ends[0]  # one id: some readers of config.json take no list
    name = str(DTYPES[dtype]).removeprefix("torch.")
    # transformers before 4.56 and other readers expect the old name, `torch_dtype`.
    _write_json(folder / "config.json", config | {"dtype": name, "torch_dtype": name})
    pad = released.ids.get("pad_token_id")
    generation = {
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": ends if len(ends) > 1 else end,
        "pad_token_id": end if pad is None else pad,
    }
    _write_json(folder / "generation_config.json", released.generation | generation)


def _write_tokenizer(
    trained: LoadedModel, folder: Path, chat: ChatFormat | None, released: Released
) -> None:
    """Write tokenizer.json, which yields the ids of the token files, and AutoTokenizer's files."""
    assert trained.end_of_document is not None, "the data manifest of a job has one"
    tokenizer = open_tokenizer(trained.tokenizer)
    end = str(tokenizer.id_to_token(trained.end_of_document))
    content = json.loads(read_whole(trained.tokenizer))
    content |= {"truncation": None, "padding": None}
    processor, begin = content.get("post_processor"), trained.begin_of_document
    if processor is not None and processor["type"] != "ByteLevel":  # ByteLevel adds no tokens
        content["post_processor"] = None
    if begin is not None:  # so that others put the same token before a text as training did
        added = add_in_front(open_tokenizer(trained.tokenizer), begin)
        content["post_processor"] = json.loads(added.to_str())["post_processor"]
    _write_json(folder / "tokenizer.json", content)
    special = {"bos_token": end, "eos_token": end, "pad_token": end}
    if released.ids:  # the tokens of the release are those of the job
        special = {"eos_token": end, "pad_token": end} | released.special
    if begin is not None:
        special["bos_token"] = str(tokenizer.id_to_token(begin))
    context = trained.arch.max_seq_len
    settings: dict[str, Any] = {
        # The only class that uses tokenizer.json unchanged in every version of transformers.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    } | released.tokenizer
    if released.context != context:
        settings["model_max_length"] = context
    template = released.template
    if chat is not None:
        # `eos_token` ends a turn, and `pad_token` is a different one: training code that masks
        # padding must not mask the end of answers. A variable that the template reads has the value
        # that it had in training.
        special["eos_token"] = str(tokenizer.id_to_token(chat.facts.stop_tokens[0]))
        unread = {name: token for name, token in special.items() if name not in chat.template}
        special, template = {**chat.facts.special_tokens, **unread}, chat.template
        if begin is None:
            settings["add_bos_token"] = False  # the template writes it, if it has one
    if template is not None:
        (folder / CHAT_TEMPLATE).write_text(template, encoding="utf-8", newline="")
    if released.sentencepiece is not None:  # for programs that do not read tokenizer.json
        shutil.copyfile(released.sentencepiece, folder / SENTENCEPIECE)
    _write_json(folder / "special_tokens_map.json", special)
    _write_json(folder / "tokenizer_config.json", settings | special)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@torch.inference_mode()
def write_library(model: Any, folder: Path, dtype: torch.dtype, max_shard_size: str) -> None:
    """Write weights and config.json of a `LibraryModel` as the library does."""
    for name, parameter in model.named_parameters():
        # Rounded, a correction of the choice of experts sends most tokens to other experts.
        if name not in model.kept_buffers:
            parameter.data = parameter.data.to(dtype)
    settings: Any = transformers.utils.logging
    settings.disable_progress_bar()
    library = model.library
    if model.tied:
        library.tie_weights()
    library.config.dtype = dtype
    library.save_pretrained(folder, max_shard_size=max_shard_size)


@torch.inference_mode()
def check_library(model: Any, folder: Path, ids_T: Tensor) -> float:
    """Return the largest difference of a logit, in fp32, between a model and its export.

    Raises DamagedError if it exceeds rounding, or if a weight is missing.
    """
    model.float()
    library, report = loaded(folder, torch.float32)
    if any(report.values()):
        raise DamagedError(f"the export in {folder} is not complete", why=str(report))
    return verify.differing_logits(
        folder, model(ids_T[None]), library(ids_T[None], use_cache=False).logits
    )


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
    config = _whole_config(
        read_config(folder / "config.json"), read_config(staging / "config.json")
    )
    content = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (staging / "config.json").write_text(content, encoding="utf-8")
    for path in folder.iterdir():
        if path.is_file() and not any(fnmatch(path.name, pattern) for pattern in NOT_KEPT):
            shutil.copyfile(path, staging / path.name)
    got = text_logits(loaded(staging, torch.float32)[0], ids_T[None])
    return verify.differing_logits(staging, expected, got)


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


def _whole_config(whole: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of a multimodal model with another text model."""
    # Some classes read the ids, or if the head is tied, from the one, some from the other.
    repeated = {
        key: text[key] for key in OF_WHOLE if key in text and (key in whole or key == "dtype")
    }
    inner = {key: value for key, value in text.items() if key not in OF_TEXT}
    return {**whole, **repeated, "text_config": inner}
