"""Verification of exports and imports: `transformers` and dtt must compute the same logits.

Shapes: T tokens, V vocabulary.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from torch import Tensor

from dtt.base.errors import DamagedError, Diverged, EnvironmentUnfit, InputError
from dtt.base.log import log
from dtt.config.value_types import InitialStd
from dtt.data.conversations.rows import Conversation, RefusedRow
from dtt.data.conversations.sandbox import memory_limit
from dtt.hf import library_folder
from dtt.hf.chat_format import ChatFormat, read_config
from dtt.hf.model_source import on_device
from dtt.hf.peft import TENSORS, of_text_class, text_layer
from dtt.hf.read import LoadedModel, load_tensors, transformers_defaults
from dtt.hf.weights import NOT_WEIGHTS
from dtt.mesh.environment import install
from dtt.model import families
from dtt.model.adapted_layers import inner
from dtt.model.architecture import AnyArchitecture, Architecture, BuiltArchitecture
from dtt.model.decoder import Decoder
from dtt.model.families import multimodal

TOLERANCE = 1e-4
"""Maximum difference of fp32 logits due to rounding, relative to the largest logit."""
MUCH_ROUNDING = 0.25
"""Difference of a logit, relative to the largest, from which rounded weights are another model."""
TEXT = """def mean(numbers: list[float]) -> float:
\treturn sum(numbers) / len(numbers)   # 3.14e-10, "naïve" café

It's 12,345 words — Übergröße, Привет, 你好世界, नमस्ते, 🙂👩‍🚀.
"""
DECOMPOSED = unicodedata.normalize("NFD", TEXT)
"""The text with accents as characters of their own, as some PDF readers give it."""

CONVERSATIONS = tuple(
    Conversation(tuple({"role": role, "content": text} for role, text in turns))
    for turns in (
        [("user", TEXT)],
        [("system", "Be brief.\n"), ("user", " 1 + 1? ")],
        [("user", "Hi"), ("assistant", "Hello! 🙂"), ("user", TEXT)],
    )
)
"""Prompts whose ids must be those of training."""


@torch.inference_mode()
def check(folder: Path, expected: Tensor, arch: Architecture) -> float:
    """Load `folder` with the Auto classes, and compare it with the `random_logits` of the weights.

    Class, configuration, tensor names, weight tying and logits must agree; DamagedError names the
    first mismatch. Returns the largest absolute difference of a logit. Runs on the CPU.
    """
    with _export_errors(folder):
        theirs = _load(folder, arch)(random_ids(arch)[None]).logits
        return _difference(expected, theirs, "random ids")


@torch.inference_mode()
def check_import(folder: Path, trained: LoadedModel) -> float:
    """Compare a model that dtt read from a Hugging Face folder with that of transformers.

    Class, configuration, tensor names, weight tying and fp32 logits of random ids must agree;
    InputError names the first mismatch. Raises DamagedError if the logits are not finite. Returns
    the largest absolute difference of a logit. Runs on the CPU and holds one fp32 model at a time.
    """
    try:
        # Reduced to logits before the other model is loaded: one fp32 model in memory at a time.
        ours = random_logits(trained.tensors, trained.decoder)
        if not ours.isfinite().all():
            raise DamagedError(
                f"the weights in {folder} give logits that are not finite",
                next="fetch the folder again, or use another model",
            )
        theirs = _load(folder, trained.decoder)(random_ids(trained.decoder)[None]).logits
        return _difference(ours, theirs, "random ids")
    except _Mismatch as found:
        raise InputError(
            f"dtt and transformers compute different logits from {folder}",
            why=str(found),
            next="this is a fault of dtt, of this version of transformers "
            f"({transformers.__version__}) or of the folder: please report it",
        ) from None


@torch.inference_mode()
def random_logits(state: Mapping[str, Tensor], arch: Architecture) -> Tensor:
    """Return the fp32 logits of random ids, [1, T, V]; they are the same ids in every call."""
    # On the meta device, then assigned: no memory for values that are replaced.
    with torch.device("meta"):
        model = Decoder(arch)
    model.load_state_dict({name: tensor.float() for name, tensor in state.items()}, assign=True)
    logits: Tensor = model.eval()(random_ids(arch)[None])
    return logits


def rounding_difference(expected: Tensor, rounded: Tensor, dtype: str) -> float:
    """Return how far rounding moves a logit at most; warn if that is a different model.

    `expected` are the logits of the weights as they were trained, `rounded` those after rounding.
    """
    difference = (rounded - expected).abs().max().item()
    largest = expected.abs().max().item()
    if difference > MUCH_ROUNDING * max(1.0, largest):
        log.warning(
            "rounding the weights to %s changes logits by up to %.2g, and the largest is %.2g: "
            "export.dtype=fp32 keeps the model that was trained",
            dtype,
            difference,
            largest,
        )
    return difference


def kept_in_fp32(arch: Architecture) -> set[str]:
    """Return the parameters that `transformers` keeps in fp32 whatever dtype a model is loaded in.

    Rounded, a correction of the choice of experts sends most tokens to other experts.
    """
    family = families.get(arch.family)
    cls: Any = getattr(transformers, family.hf_class)
    modules = {*(cls._keep_in_fp32_modules or ()), *(cls._keep_in_fp32_modules_strict or ())}
    # The rule of transformers: complete parts of a name.
    kept = re.compile("|".join(rf"(?:(?:^|\.){module}(?:$|\.))" for module in modules) or r"(?!)")
    rules = family.weight_rules(arch)
    return {name for rule in rules if kept.search(rule.hf_name) for name in rule.dtt_names}


@torch.inference_mode()
def check_adapter(folder: Path, base: Path, trained: LoadedModel) -> float:
    """Apply the adapter in `folder` to the model in `base` with PEFT; return as `check`.

    `trained` has the merged weights. Raises DamagedError if the fp32 logits differ, InputError if
    PEFT refuses the adapter, and EnvironmentUnfit if PEFT is not installed.
    """
    peft = import_peft()
    arch, ids_1T = trained.arch, random_ids(trained.arch)[None]
    with _export_errors(folder):
        ours = on_device(trained, torch.device("cpu")).float().eval()(ids_1T)
        if isinstance(arch, BuiltArchitecture):
            theirs, _ = library_folder.loaded(base, torch.float32)
        else:
            theirs = _load(base, arch)
        if of_text_class(folder) and multimodal.is_multimodal(read_config(base / "config.json")):
            theirs = library_folder.text_model(theirs)
        try:
            adapted: Any = peft.PeftModel.from_pretrained(theirs, folder).eval()
        except (ValueError, TypeError, NotImplementedError) as error:  # such as layers of Mamba
            raise _not_of_peft(folder, str(error)) from error
        # In mixtures whose experts were modules once, it takes names such as down_proj for those of
        # the experts, in dense layers and shared experts, too.
        if taken := getattr(adapted.peft_config["default"], "target_parameters", None):
            why = f"in this type of model, it takes them for experts: {', '.join(sorted(taken))}"
            raise _not_of_peft(folder, why)
        if lost := _lost_layers(folder, adapted):
            why = f"it drops those of {', '.join(lost)}, which it looks for under other names"
            raise _not_of_peft(folder, why)
        # PEFT replaces the layers of `theirs`.
        got = library_folder.text_logits(theirs, ids_1T)
        return _difference(ours, got, "random ids")


def _lost_layers(folder: Path, adapted: Any) -> list[str]:
    """Return the layers, by their names in a block, whose adapters PEFT has not loaded.

    PEFT renames the tensors of an adapter by the rules that transformers has for old checkpoints.
    That of Laguna for `mlp.shared_expert.` is a regular expression that also matches the new name.
    PEFT then warns that keys are missing, and computes with B = 0.
    """
    # A prefix of older versions, `language_model.model.`, is renamed without loss.
    named = ((name.replace(".default.", "."), p) for name, p in adapted.named_parameters())
    loaded = {text_layer(name): parameter for name, parameter in named}
    file = {text_layer(name): t for name, t in load_tensors(folder / TENSORS).items()}
    lost = [n for n, t in file.items() if n not in loaded or not torch.equal(loaded[n].float(), t)]
    return sorted({inner(name.rpartition(".lora_")[0]) for name in lost})


def _not_of_peft(folder: Path, why: str) -> InputError:
    return InputError(
        "PEFT cannot load an adapter of these layers",
        where=folder,
        why=why,
        next="export the merged model (omit --adapter); a run with adapter.targets of other "
        "layers has an adapter that PEFT loads",
    )


def import_peft() -> Any:
    """Return the module `peft`; EnvironmentUnfit if it is not installed."""
    try:
        import peft
    except ImportError as error:
        raise EnvironmentUnfit(
            "adapters are verified with PEFT, which is not installed",
            why=str(error),
            next=install("peft"),
        ) from None
    return peft


def check_prompts(folder: Path, chat: ChatFormat) -> None:
    """Raise DamagedError unless AutoTokenizer encodes prompts of conversations as in training."""
    encoder = chat.encoder()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    tokenizer.model_max_length = 2**20  # avoids a warning about a shorter context
    for conversation in CONVERSATIONS:
        try:
            expected = encoder.prompt_ids(conversation)
        except RefusedRow:  # such as a system prompt that the template does not support
            continue
        with memory_limit:
            got = tokenizer.apply_chat_template(
                list(conversation.messages),
                add_generation_prompt=True,
                return_dict=False,
                **chat.facts.kwargs,
            )
        if got != expected:
            why = f"apply_chat_template returns different ids for a prompt: {got[:8]}…"
            raise _export_error(folder, f"{why}, {expected[:8]}… in training")


def check_token_ids(folder: Path, tokenizer: Tokenizer) -> None:
    """Raise DamagedError unless AutoTokenizer encodes a text as in training.

    For some types of model, such as Qwen2 and Qwen3.5, it takes a class of its own whatever class
    the folder names, and that class splits texts by its own expression, not by tokenizer.json's.
    """
    expected: list[int] = tokenizer.encode(TEXT, add_special_tokens=True).ids
    loaded = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    loaded.model_max_length = 2**20  # avoids a warning about a shorter context
    got = loaded(TEXT)["input_ids"]
    for i, (theirs, ours) in enumerate(zip_longest(got, expected)):
        if theirs != ours:
            raise _export_error(
                folder,
                f"AutoTokenizer ({type(loaded).__name__}) returns different ids from token {i} on: "
                f"{got[i : i + 8]}, {expected[i : i + 8]} in training",
            )
    expected = tokenizer.encode(DECOMPOSED, add_special_tokens=True).ids
    if loaded(DECOMPOSED)["input_ids"] != expected:
        # Not refused: older versions of dtt trained such tokenizers, and few texts are concerned.
        log.warning(
            "%s composes characters (NFC), as training did not: a text that has a letter and its "
            "accent as two characters gets other ids",
            type(loaded).__name__,
        )


def differing_logits(
    folder: Path | None, expected: Tensor, got: Tensor, what: str = "random ids"
) -> float:
    """Return the largest difference of a logit; DamagedError if it exceeds rounding."""
    with _export_errors(folder):
        return _difference(expected, got, what)


class _Mismatch(Exception):
    """Difference between two versions of one model; the message describes it."""


@contextmanager
def _export_errors(folder: Path | None) -> Iterator[None]:
    """Raise a mismatch inside as the DamagedError of an export."""
    try:
        yield
    except _Mismatch as found:
        raise _export_error(folder, str(found)) from None


def random_ids(arch: AnyArchitecture) -> Tensor:
    """Return ids [T] that are the same in every call."""
    # A fixed seed: a failed check must fail again.
    generator = torch.Generator().manual_seed(0)
    return torch.randint(arch.vocab_size, (min(128, arch.max_seq_len),), generator=generator)


def _difference(expected: Tensor, got: Tensor, what: str) -> float:
    """Return the largest absolute difference of a logit.

    Raises _Mismatch if it exceeds rounding, Diverged if `expected` contains non-finite values.
    """
    if not expected.isfinite().all():
        raise Diverged(
            "the logits of the model are not finite; nothing was published",
            why="training has diverged, or the weights are too large for export.dtype",
            next="JOB@STEP for an earlier checkpoint, or export.dtype=fp32",
        )
    difference = (expected - got).abs().max().item()
    # `not <=` also catches NaN of the other model.
    if not difference <= TOLERANCE * max(1.0, expected.abs().max().item()):
        raise _Mismatch(f"logits of {what} differ by up to {difference:.3g}")
    return difference


def _load(folder: Path, arch: Architecture) -> Any:
    """Load the model with transformers in fp32; _Mismatch if it differs from `arch`."""
    whole = multimodal.is_multimodal(read_config(folder / "config.json"))
    # Set the attention implementation: config.json may name a kernel that is not installed. Parts
    # for images, such as that of GOT-OCR2, may have no other than this.
    attention = "eager" if whole else "sdpa"
    try:
        model, report = library_folder.loaded(folder, torch.float32, attn_implementation=attention)
    except InputError as error:
        raise _Mismatch(f"transformers cannot load it: {error.__cause__}") from None
    # Ignore buffers that older versions saved with the weights.
    unread = [n for n in report.pop("unexpected_keys", ()) if not n.endswith(NOT_WEIGHTS)]
    wrong = {kind: names for kind, names in (report | {"unexpected_keys": unread}).items() if names}
    if wrong:
        raise _Mismatch(f"transformers reports {wrong}")
    family = families.get(arch.family)
    config = model.config.to_dict()
    if not whole and type(model).__name__ != family.hf_class:
        raise _Mismatch(f"transformers builds a {type(model).__name__}, not a {family.hf_class}")
    # The logits of 128 tokens do not reveal a wrong attention window of 4096 or a wrong range of
    # the rotary embedding, so compare the architectures, too.
    theirs = family.from_hf_config(
        multimodal.text_config(config), partial(transformers_defaults, family)
    )
    # config.json has one standard deviation of initial weights, and no dropout in most families.
    ours = replace(arch, init_std=InitialStd.uniform(arch.init_std.matrix))
    if replace(theirs, dropout=arch.dropout) != ours:
        raise _Mismatch("transformers reads a different architecture from config.json")
    # Equal values do not prove tying: fine-tuning in transformers would then train two matrices.
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    if tied != arch.tie_embeddings:
        raise _Mismatch(f"the head is {'tied' if tied else 'not tied'} to the embedding")
    return model.eval()


def _export_error(folder: Path | None, why: str) -> DamagedError:
    return DamagedError(
        "the export differs from the trained model; nothing was published",
        where=folder,
        why=why,
        next="this is a fault of dtt or of this version of transformers "
        f"({transformers.__version__}): please report it",
    )
