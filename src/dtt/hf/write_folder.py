"""Export to a Hugging Face folder: written to a temporary folder, verified, then renamed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer

from dtt.artifacts.manifest import FileRecord
from dtt.artifacts.manifests import CHAT_TEMPLATE, ExportManifest
from dtt.base.files import sha256_file
from dtt.base.reading import read_whole
from dtt.data.text.tokenizer import add_in_front, open_tokenizer
from dtt.hf import library_export, verify, whole_folder
from dtt.hf.chat_format import ChatFormat, read_config
from dtt.hf.fold_scaling import fold
from dtt.hf.model_source import on_device
from dtt.hf.peft import Adapter, write_peft
from dtt.hf.publish import CARD, ExportSource, published
from dtt.hf.read import LoadedModel
from dtt.hf.released import FROM_SCRATCH, SENTENCEPIECE, Released
from dtt.hf.weights import to_hf, write_shards
from dtt.model import count, families
from dtt.model.architecture import (
    AnyArchitecture,
    BuiltArchitecture,
    decoder_architecture,
)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Dtype = Literal["fp32", "bf16", "fp16"]


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
    if isinstance(trained.arch, BuiltArchitecture):
        how: dict[str, Any] = {"dtype": dtype, "max_shard_size": max_shard_size, "card": card}
        return _export_built(trained, origin, out, **how, chat=chat, released=released)
    n_parameters = count.parameters(trained.decoder)
    with published(out, n_parameters * DTYPES[dtype].itemsize) as staging:
        folded = fold(trained)
        exact = verify.kept_in_fp32(folded.decoder)
        rounded = {
            name: tensor.to(torch.float32 if name in exact else DTYPES[dtype])
            for name, tensor in folded.tensors.items()
        }
        write_shards(to_hf(rounded, folded.decoder), staging, max_shard_size)
        expected, rounding = verify.random_logits(trained.tensors, trained.decoder), None
        if folded.decoder != trained.decoder:
            verify.check_folded(folded, expected)
        if any(rounded[name].dtype != tensor.dtype for name, tensor in folded.state.items()):
            rounding = verify.rounding_difference(expected, rounded, folded.decoder, dtype)
        config = families.get(folded.decoder.family).to_hf_config(
            folded.decoder, folded.end_of_document
        )
        _write_config(config, folded, staging, dtype, chat, released)
        _write_tokenizer(trained, staging, chat, released)
        (staging / CARD).write_text(card, encoding="utf-8")
        difference = verify.check(staging, rounded, folded.decoder, trained.open_tokenizer())
        if chat is not None:
            verify.check_prompts(staging, chat)
        if released.multimodal is not None:
            ids_T = verify.random_ids(trained.arch)
            moved = whole_folder.put_back(staging, released.multimodal, ids_T, max_shard_size)
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


def check_exportable(arch: AnyArchitecture) -> None:
    """Raise ConfigError for a model that no class of transformers computes."""
    if isinstance(arch, BuiltArchitecture) and not hasattr(arch.skeleton, "library"):
        decoder_architecture(arch, "dtt export")


def _export_built(
    trained: LoadedModel,
    origin: ExportSource,
    out: Path,
    *,
    dtype: Dtype,
    max_shard_size: str,
    card: str,
    chat: ChatFormat | None,
    released: Released,
) -> ExportManifest:
    """Do what `export` does for a model of the library, which writes its own format."""
    n_parameters, ids_T = count.parameters(trained.arch), verify.random_ids(trained.arch)
    model: Any = on_device(trained, torch.device("cpu")).eval()
    with published(out, n_parameters * DTYPES[dtype].itemsize) as staging, torch.inference_mode():
        expected = model.float()(ids_T[None])
        library_export.write(model, staging, DTYPES[dtype], max_shard_size)
        _write_config(read_config(staging / "config.json"), trained, staging, dtype, chat, released)
        _write_tokenizer(trained, staging, chat, released)
        (staging / CARD).write_text(card, encoding="utf-8")
        difference = library_export.check(model, staging, ids_T)
        if chat is not None:
            verify.check_prompts(staging, chat)
        if released.multimodal is not None:
            put_back = whole_folder.put_back(staging, released.multimodal, ids_T, max_shard_size)
            difference = max(difference, put_back)
        verify.check_token_ids(staging, trained.open_tokenizer())
        moved = float((model(ids_T[None]) - expected).abs().max())
        return _write_manifest(
            staging,
            trained,
            origin,
            chat,
            dtype=dtype,
            parameters=n_parameters,
            max_rounding_difference=moved if dtype != "fp32" else None,
            max_logit_difference=difference,
        )


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
        files=_records(folder),
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
    if released.names_tokens:
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
        special, template = _chat_special_tokens(chat, special, tokenizer), chat.template
        if begin is None:
            settings["add_bos_token"] = False  # the template writes it, if it has one
    if template is not None:
        (folder / CHAT_TEMPLATE).write_text(template, encoding="utf-8", newline="")
    if released.sentencepiece is not None:  # for programs that do not read tokenizer.json
        shutil.copyfile(released.sentencepiece, folder / SENTENCEPIECE)
    _write_json(folder / "special_tokens_map.json", special)
    _write_json(folder / "tokenizer_config.json", settings | special)


def _chat_special_tokens(
    chat: ChatFormat, usual: Mapping[str, str], tokenizer: Tokenizer
) -> dict[str, str]:
    """Return the special tokens of a chat model; `usual` are those of a model of text.

    `eos_token` ends a turn, and `pad_token` is a different one: training code that masks padding
    must not mask the end of answers. A variable that the template reads has the value that it had
    in training.
    """
    stop = str(tokenizer.id_to_token(chat.facts.stop_tokens[0]))
    unread = {n: t for n, t in {**usual, "eos_token": stop}.items() if n not in chat.template}
    return {**chat.facts.special_tokens, **unread}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _records(folder: Path) -> tuple[FileRecord, ...]:
    return tuple(
        FileRecord(path=path.name, bytes=path.stat().st_size, sha256=sha256_file(path))
        for path in sorted(folder.iterdir())
    )
