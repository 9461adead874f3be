"""Folders of models that dtt has no family of its own for: the library reads and writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.initialization import no_init_weights

from dtt.base.errors import InputError
from dtt.base.log import log
from dtt.config.variants import variant
from dtt.hf.chat_format import read_config
from dtt.model.architecture import BuiltArchitecture
from dtt.model.families import multimodal
from dtt.model.families.hf_config import quantised
from dtt.model.library.model import IGNORED, made, unknown_keys

OF_TOKENIZER = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
"""Keys of config.json that dtt keeps elsewhere."""


def knows(config: Mapping[str, Any]) -> bool:
    """Return True if transformers has a causal model of the type in a config.json."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return config.get("model_type") in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def architecture(config: Mapping[str, Any], folder: Path) -> BuiltArchitecture:
    """Return the architecture in a config.json; raise InputError for what cannot be trained."""
    if config.get("quantization_config") is not None:
        raise quantised(config)
    unread = set(unknown_keys(config)) - {"auto_map"}
    if unread:
        log.warning(
            "transformers does not read these keys of %s/config.json, nor does dtt: %s",
            folder,
            ", ".join(sorted(unread)),
        )
    left_out = {*IGNORED, *OF_TOKENIZER, *unread} - {"model_type"}
    keys = {key: value for key, value in config.items() if key not in left_out}
    known = made({key: value for key, value in config.items() if key not in unread})
    try:
        context = known.max_position_embeddings
    except (AttributeError, NotImplementedError):  # those of a state space, and of xlnet
        context = 2**20
    family: Any = variant("model", "transformers")
    section = family(config=keys, vocab_size=known.vocab_size, max_seq_len=context)
    if problems := list(section.problems()):
        raise InputError(f"the model in {folder} cannot be used", why=problems[0][1])
    return BuiltArchitecture(
        section=section, vocab_size=section.vocab_size, max_seq_len=section.max_seq_len
    )


def section_of(arch: BuiltArchitecture) -> dict[str, Any]:
    """Return the `model` section that describes the architecture of a folder."""
    return arch.section.model_dump(mode="json")


def loaded(folder: Path, dtype: Any) -> tuple[Any, dict[str, Any]]:
    """Return the library's model of a folder, and its report of missing and extra weights.

    That of a multimodal folder is the whole model; `text_logits` computes with its text model.
    """
    settings: Any = transformers.utils.logging
    settings.disable_progress_bar()
    auto: Any = transformers.AutoModelForCausalLM
    if multimodal.is_multimodal(read_config(folder / "config.json")):
        auto = transformers.AutoModelForImageTextToText
    try:
        library, report = auto.from_pretrained(
            folder,
            dtype=dtype,
            output_loading_info=True,
            trust_remote_code=False,
            local_files_only=True,
            experts_implementation="eager",
        )
    except Exception as error:
        raise InputError(
            f"transformers cannot load {folder}", why=f"{type(error).__name__}: {error}"
        ) from error
    return library.eval(), report


def text_logits(library: Any, ids_BT: Tensor) -> Tensor:
    """Return the logits [B, T, V] of text; a multimodal model gets no images."""
    inner = getattr(library, "language_model", None)
    if inner is not None and inner.get_output_embeddings() is not None:
        library = inner  # Llama 4's: the class around it fails without an image
    logits: Tensor = library(input_ids=ids_BT, use_cache=False).logits
    return logits


def text_model(library: Any) -> Any:
    """Return the text model of a multimodal one as the class for text alone; it shares weights."""
    auto: Any = transformers.AutoModelForCausalLM
    with no_init_weights():
        text = auto.from_config(
            library.config.get_text_config(),
            dtype=torch.float32,
            experts_implementation="eager",
            trust_remote_code=False,
        )
    named = ((multimodal.text_name(name), one) for name, one in library.state_dict().items())
    text.load_state_dict({name: one for name, one in named if name is not None}, assign=True)
    text.tie_weights()
    return text.eval()


def text_parameter(folder: Path) -> str | None:
    """Return the name of a parameter of the text model in a multimodal model; else None.

    The names are those of the library's modules, which differ from those in some files.
    """
    if not multimodal.is_multimodal(read_config(folder / "config.json")):
        return None
    auto: Any = transformers.AutoModelForImageTextToText
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    with torch.device("meta"):
        whole = auto.from_config(config, trust_remote_code=False)
    names: list[str] = [name for name, _ in whole.named_parameters()]
    return next(name for name in names if multimodal.TEXT.search(name))
