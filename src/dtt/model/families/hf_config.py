"""Validation of a Hugging Face config.json, key by key; unknown keys are rejected by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dtt.base.errors import InputError


@dataclass(frozen=True)
class Values:
    """The supported values of a key."""

    words: str
    accepts: Callable[[Any], bool]


def only(*allowed: object) -> Values:
    """Return a `Values` that accepts the members of `allowed`."""
    return Values(" or ".join(map(repr, allowed)), lambda value: value in allowed)


def optional(values: Values) -> Values:
    """Return a `Values` that accepts null as well as `values`."""
    return Values(f"{values.words} or None", lambda v: v is None or values.accepts(v))


# `type(…) is int`, because True is an int to isinstance.
SIZE = Values("a positive integer", lambda v: type(v) is int and v > 0)
COUNT = Values("an integer, at least 0", lambda v: type(v) is int and v >= 0)
NUMBER = Values("a positive number", lambda v: type(v) in (int, float) and 0 < v < math.inf)
SPREAD = Values("a number, at least 0", lambda v: type(v) in (int, float) and 0 <= v < math.inf)
SHARE = Values("a number from 0 to below 1", lambda v: type(v) in (int, float) and 0 <= v < 1)
FRACTION = Values("a number above 0, up to 1", lambda v: type(v) in (int, float) and 0 < v <= 1)
FLAG = Values("True or False", lambda v: type(v) is bool)
NUMBERS = Values(
    "a list of positive numbers", lambda v: isinstance(v, list) and all(map(NUMBER.accepts, v))
)
OBJECT = Values("an object", lambda v: isinstance(v, dict))
FLAGS = Values("a list of 0 and 1", lambda v: isinstance(v, list) and set(v) <= {0, 1})
KINDS = Values(
    "a list of strings", lambda v: isinstance(v, list) and all(isinstance(i, str) for i in v)
)
ANYTHING = Values("anything", lambda v: True)
UNSET: Any = object()
LOCAL, FULL = "sliding_attention", "full_attention"
"""Values of `layer_types`: layers with a sliding window, and without."""


@dataclass(frozen=True)
class Key:
    """A key of config.json."""

    values: Values
    field: str | None = None
    """Field of `Architecture` that it stands for; with `mixture.` before it, of `ExpertMixture`."""
    default: Any = UNSET
    """Value for transformers in a file without the key; None: it follows from other keys."""
    writes: Any = UNSET
    """Value that an export has, if it is the same for all models."""


def without_effect(keys: str) -> dict[str, Key]:
    """Return a table in which the keys, separated by spaces, accept any value."""
    return dict.fromkeys(keys.split(), Key(ANYTHING))


COMMON: Mapping[str, Key] = {
    "model_type": Key(ANYTHING),
    "vocab_size": Key(SIZE),
    "tie_word_embeddings": Key(FLAG),
    "initializer_range": Key(SPREAD),
    # Keys of every transformers config; other values would change the logits.
    "is_causal": Key(only(True)),  # transformers treats null as False
    "is_encoder_decoder": Key(only(False, None)),
    "add_cross_attention": Key(only(False, None)),
    "chunk_size_feed_forward": Key(only(0, None)),
    "pruned_heads": Key(only({}, None)),
    # Metadata that does not affect the logits.
    **without_effect(
        "architectures transformers_version _name_or_path name_or_path dtype torch_dtype "
        "id2label label2id num_labels problem_type finetuning_task task_specific_params "
        "bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id prefix "
        "tokenizer_class use_cache cache_implementation return_dict output_attentions "
        "output_hidden_states torchscript use_bfloat16 tf_legacy_loss is_decoder "
        "tie_encoder_decoder gradient_checkpointing _commit_hash _attn_implementation "
        "attn_implementation _attn_implementation_autoset _attn_implementation_internal "
        "_experts_implementation transformers.js_config unsloth_fixed unsloth_version"
    ),
    # Generation options, in files from before generation_config.json existed.
    **without_effect(
        "max_length min_length do_sample early_stopping num_beams num_beam_groups "
        "diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty "
        "no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences "
        "output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id "
        "remove_invalid_values exponential_decay_length_penalty suppress_tokens "
        "begin_suppress_tokens"
    ),
}
"""Keys of config.json that every family has."""


def check_values(
    config: Mapping[str, Any],
    table: Mapping[str, Key],
    defaults: Callable[[], Mapping[str, Any]],
) -> None:
    """Raise InputError unless each key is known and has a value that dtt supports.

    An unknown key is accepted if it is null, or has its value in `defaults()`.
    """
    if config.get("quantization_config") is not None:
        raise quantised(config)
    known = {**COMMON, **table}
    unknown = {k: v for k, v in config.items() if k not in known and v is not None}
    # transformers is imported for its defaults only if a key is unknown: the import takes seconds.
    if unknown:
        harmless = defaults()
        unknown = {k: v for k, v in unknown.items() if k not in harmless or v != harmless[k]}
    if unknown:
        raise unsupported(
            config,
            f"config.json has {_listed(unknown)}, unknown to dtt",
            next="remove the keys that do not change the logits from config.json, or use "
            "another model",
        )
    for key, value in config.items():
        if key in known and not known[key].values.accepts(value):
            words = known[key].values.words
            raise unsupported(config, f"config.json has {key}: {value!r}; supported: {words}")


LOADED_WHOLE = {
    "bitsandbytes": "from_pretrained(FOLDER).dequantize()",
    "compressed-tensors": "from_pretrained(FOLDER, quantization_config="
    "CompressedTensorsConfig(run_compressed=False))",
    "fp8": "from_pretrained(FOLDER, quantization_config=FineGrainedFP8Config(dequantize=True))",
    "mxfp4": "from_pretrained(FOLDER, quantization_config=Mxfp4Config(dequantize=True))",
}
"""How transformers loads quantised weights as numbers again, by method."""


def quantised(config: Mapping[str, Any]) -> InputError:
    """Return the error for quantised weights, with the way to weights that dtt reads."""
    how = config["quantization_config"]
    facts = how if isinstance(how, dict) else {}
    method = str(facts.get("quant_method") or "an unknown method")
    bits = facts.get("bits") or next((n for n in (4, 8) if facts.get(f"load_in_{n}bit")), None)
    remedy = "use the release of this model that is not quantised"
    if method in LOADED_WHOLE:
        remedy += (
            "; or in Python, where transformers has the method: "
            f"AutoModelForCausalLM.{LOADED_WHOLE[method]}.save_pretrained(NEW)"
        )
    why = f"by quantization_config, its weights are quantised: {method}"
    why += f", {bits} bits" if bits else ""
    return unsupported(config, why, next=remedy)


def _listed(values: Mapping[str, Any]) -> str:
    shown = {key: repr(value) for key, value in values.items()}
    return ", ".join(f"{k}: {v if len(v) < 80 else f'{v[:77]}...'}" for k, v in shown.items())


def unsupported(
    config: Mapping[str, Any], why: str, *, next: str = "use a model without it"
) -> InputError:
    """Return the error for a config.json that needs a feature dtt does not support."""
    return InputError(f"this {config.get('model_type')} model is not supported", why=why, next=next)
