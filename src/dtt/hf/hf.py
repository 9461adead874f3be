"""Export to a Hugging Face folder: written to a temporary folder, verified, then renamed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from dtt.artifacts.manifest import FileRecord
from dtt.artifacts.manifests import CHAT_TEMPLATE, ExportManifest
from dtt.base.errors import ConfigError, DamagedError
from dtt.base.files import check_space, fsync_file, fsync_folder, sha256_file
from dtt.data.text.tokenizer import add_in_front, open_tokenizer
from dtt.hf import verify
from dtt.hf.chat_format import ChatFormat
from dtt.hf.fold import fold
from dtt.hf.peft import Adapter, write_peft
from dtt.hf.read import Trained
from dtt.hf.weights import to_hf
from dtt.model import count, families
from dtt.model.architecture import Architecture

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Dtype = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True)
class Origin:
    """The checkpoint that an export is made from."""

    job: str
    step: int
    checkpoint_sha256: str
    """sha256 of the checkpoint's manifest."""
    ema: bool = False
    """True if the export contains the moving average of the weights."""
    base: str | None = None
    """Model that the exported adapter is for; None: the export is a complete model."""


def already_done(out: Path, origin: Origin, dtype: Dtype) -> ExportManifest | None:
    """Return the manifest of the same export if it exists at `out`.

    Returns None if `out` is empty, does not exist, or contains another export of the same job,
    which may be replaced. Raises ConfigError if `out` contains anything else, DamagedError if a
    file of the export is missing or has a different size.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    if not ExportManifest.exists(out):
        raise ConfigError(
            f"{out} is not an export", next="specify another folder with --out, or move it away"
        )
    found = ExportManifest.read(out)
    same = (found.checkpoint_sha256, found.ema, found.base, found.dtype)
    if same != (origin.checkpoint_sha256, origin.ema, origin.base, dtype):
        if found.job == origin.job:
            return None
        raise ConfigError(
            f"{out} holds the export of another job: {found.job}, step {found.step}, {found.dtype}",
            next="specify another folder with --out, or remove it",
        )
    for file in found.files:
        path = out / file.path
        if not path.is_file() or path.stat().st_size != file.bytes:
            raise DamagedError(
                "the export is incomplete",
                where=path,
                next=f"rm -r {out}, then export again",
            )
    return found


def export(
    trained: Trained,
    origin: Origin,
    out: Path,
    *,
    dtype: Dtype,
    max_shard_size: str,
    card: str,
    chat: ChatFormat | None = None,
) -> ExportManifest:
    """Write the export to `out`, replacing an existing folder, and return its manifest.

    The folder appears only after `transformers` has computed the same logits from it, and for a
    model that was trained on conversations the same ids of prompts; otherwise raises DamagedError.
    `card` is the text of README.md, `chat` the conversation format.
    """
    n_parameters = count.parameters(trained.arch)
    with _published(out, n_parameters * DTYPES[dtype].itemsize) as staging:
        folded = fold(trained)
        verify.check_folded(folded, trained)
        rounded = {name: tensor.to(DTYPES[dtype]) for name, tensor in folded.state.items()}
        _write_weights(rounded, folded.arch, staging, max_shard_size)
        _write_config(folded, staging, dtype, chat)
        _write_tokenizer(trained, staging, chat)
        (staging / "README.md").write_text(card, encoding="utf-8")
        difference = verify.check(staging, rounded, folded.arch, trained.open_tokenizer())
        if chat is not None:
            verify.check_prompts(staging, chat)
        return _write_manifest(
            staging, origin, chat, dtype=dtype, parameters=n_parameters, difference=difference
        )


def export_adapter(
    trained: Trained,
    adapter: Adapter,
    origin: Origin,
    out: Path,
    *,
    card: str,
    chat: ChatFormat | None = None,
) -> ExportManifest:
    """Write the adapter alone to `out`, in the format of PEFT, and return the manifest.

    `trained` is the model with the adapter merged. The folder appears only after PEFT has computed
    the same logits with it on the model that it is for; otherwise as `export`.
    """
    size = sum(tensor.numel() for tensor in adapter.state.values())
    with _published(out, 4 * size) as staging:
        write_peft(staging, adapter, trained.arch)
        _write_tokenizer(trained, staging, chat)
        (staging / "README.md").write_text(card, encoding="utf-8")
        difference = verify.check_adapter(staging, adapter.folder, trained.state, trained.arch)
        return _write_manifest(
            staging, origin, chat, dtype="fp32", parameters=size, difference=difference
        )


@contextmanager
def _published(out: Path, size: int) -> Iterator[Path]:
    """Yield a temporary folder, which replaces `out` at the end of the block unless it raises.

    `size` is about the number of bytes that are written into it.
    """
    out = out.resolve()  # the target of a symbolic link, and a name instead of `.`
    check_space(out.parent, size + 2**24, "the export")
    staging = out.with_name(f".{out.name}.tmp")
    if staging.exists():
        shutil.rmtree(staging)
    staging.mkdir(parents=True)
    try:
        yield staging
        _publish(staging, out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _write_manifest(
    folder: Path,
    origin: Origin,
    chat: ChatFormat | None,
    *,
    dtype: Dtype,
    parameters: int,
    difference: float,
) -> ExportManifest:
    manifest = ExportManifest(
        job=origin.job,
        step=origin.step,
        checkpoint_sha256=origin.checkpoint_sha256,
        ema=origin.ema,
        base=origin.base,
        dtype=dtype,
        parameters=parameters,
        max_logit_difference=difference,
        chat=None if chat is None else chat.facts,
        files=_records(folder),
    )
    (folder / manifest.filename).write_text(manifest.dump(), encoding="utf-8")
    return manifest


def _write_weights(
    state: Mapping[str, Tensor], arch: Architecture, folder: Path, max_shard_size: str
) -> None:
    """Write safetensors files of at most `max_shard_size` each, converting one at a time."""
    on_meta = to_hf({name: tensor.to("meta") for name, tensor in state.items()}, arch)
    shards = split_torch_state_dict_into_shards(dict(on_meta), max_shard_size=max_shard_size)
    tensors = to_hf(state, arch)
    for name, keys in shards.filename_to_tensors.items():
        path = folder / name
        path.touch()
        mode = path.stat().st_mode  # as set by the umask; safetensors creates files with mode 0600
        save_file({key: tensors[key] for key in keys}, path, metadata={"format": "pt"})
        path.chmod(mode)
    if shards.is_sharded:
        index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
        _write_json(folder / "model.safetensors.index.json", index)


def _write_config(trained: Trained, folder: Path, dtype: Dtype, chat: ChatFormat | None) -> None:
    family = families.get(trained.arch.family)
    end = trained.end_of_document
    config = family.to_hf_config(trained.arch, end)
    ends: Any = end
    if chat is not None:
        # The end of a document remains a stop token: it ended the documents of pretraining.
        ends = [*dict.fromkeys((*chat.facts.stop_tokens, end))]
        config["eos_token_id"] = ends[0]  # one id: some readers of config.json take no list
    name = str(DTYPES[dtype]).removeprefix("torch.")
    # transformers before 4.56 and other readers expect the old name, `torch_dtype`.
    _write_json(folder / "config.json", config | {"dtype": name, "torch_dtype": name})
    generation = {"bos_token_id": end, "eos_token_id": ends, "pad_token_id": end}
    _write_json(folder / "generation_config.json", generation)


def _write_tokenizer(trained: Trained, folder: Path, chat: ChatFormat | None) -> None:
    """Write tokenizer.json, which yields the ids of the token files, and AutoTokenizer's files."""
    assert trained.end_of_document is not None, "the data manifest of a job has one"
    tokenizer = open_tokenizer(trained.tokenizer)
    end = tokenizer.id_to_token(trained.end_of_document)
    content = json.loads(trained.tokenizer.read_bytes())
    content |= {"truncation": None, "padding": None}
    processor, begin = content.get("post_processor"), trained.begin_of_document
    if processor is not None and processor["type"] != "ByteLevel":  # ByteLevel adds no tokens
        content["post_processor"] = None
    if begin is not None:  # so that others put the same token before a text as training did
        added = add_in_front(open_tokenizer(trained.tokenizer), begin)
        content["post_processor"] = json.loads(added.to_str())["post_processor"]
    _write_json(folder / "tokenizer.json", content)
    first = end if begin is None else tokenizer.id_to_token(begin)
    special = {"bos_token": first, "eos_token": end, "pad_token": end}
    settings: dict[str, Any] = {
        # The only class that uses tokenizer.json unchanged in every version of transformers.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": trained.arch.max_seq_len,
        "clean_up_tokenization_spaces": False,
    }
    if chat is not None:
        special = _chat_special_tokens(chat, end, tokenizer)
        settings["add_bos_token"] = False  # the template writes it, if it has one
        (folder / CHAT_TEMPLATE).write_text(chat.template, encoding="utf-8", newline="")
    _write_json(folder / "special_tokens_map.json", special)
    _write_json(folder / "tokenizer_config.json", settings | special)


def _chat_special_tokens(
    chat: ChatFormat, end: str | None, tokenizer: Tokenizer
) -> dict[str, str | None]:
    """Return the special tokens of a chat model; `end` is its end-of-document token.

    `eos_token` ends a turn, and `pad_token` is a different one: training code that masks padding
    must not mask the end of answers. A variable that the template reads has the value that it had
    in training.
    """
    trained = chat.facts.special_tokens
    usual = {
        "bos_token": end,
        "eos_token": tokenizer.id_to_token(chat.facts.stop_tokens[0]),
        "pad_token": end,
    }
    unread = {name: token for name, token in usual.items() if name not in chat.template}
    return {**trained, **unread}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _records(folder: Path) -> tuple[FileRecord, ...]:
    return tuple(
        FileRecord(path=path.name, bytes=path.stat().st_size, sha256=sha256_file(path))
        for path in sorted(folder.iterdir())
    )


def _publish(staging: Path, out: Path) -> None:
    """Rename `staging` to `out` once all bytes are on the disk, then delete the old `out`."""
    for path in staging.iterdir():
        fsync_file(path)
    fsync_folder(staging)
    old = out.with_name(f".{out.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        out.rename(old)
    staging.rename(out)
    fsync_folder(out.parent)
    shutil.rmtree(old, ignore_errors=True)
