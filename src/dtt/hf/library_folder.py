"""Folders of models that dtt has no family of its own for: the library reads and writes them.

Weights are read and converted part by part, and have the names of the library's model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.initialization import no_init_weights

from dtt.base.errors import DamagedError, InputError
from dtt.base.log import log
from dtt.config.variants import variant
from dtt.hf.chat_format import read_config
from dtt.mesh.sharding import FullTensor
from dtt.model.architecture import BuiltArchitecture
from dtt.model.families import multimodal
from dtt.model.families.hf_config import quantised
from dtt.model.library.model import IGNORED, made, unknown_keys

OF_TOKENIZER = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
"""Keys of config.json that dtt keeps elsewhere."""
Sources = Mapping[str, Sequence[FullTensor]]
"""The tensors that one conversion takes, by the pattern of their names."""


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


def loaded(folder: Path, dtype: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Return the library's model of a folder, and its report of missing and extra weights.

    That of a multimodal folder is the whole model; `text_logits` computes with its text model.
    `options` are passed to `from_pretrained`.
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
            **options,
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


@dataclass
class Converted:
    """A parameter that the library makes of other tensors; `converted[2:4]` reads a part of it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    rule: WeightConverter
    first: str
    """The first of the parameters that the rule makes, by which the library names all."""
    sources: Sources
    library: Any

    def __getitem__(self, index: tuple[slice, ...], /) -> Tensor:
        """Read a part, from no more than the files of its experts if it is a stack of experts."""
        if not _by_expert(self.rule):
            return _convert(self.rule, self.first, self.sources, self.library)[self.name][index]
        first, *others = index or (slice(None),)
        experts = range(self.shape[0])[first]
        of_one = torch.empty(self.shape[1:], device="meta")[tuple(others)].shape
        part = torch.empty(len(experts), *of_one, dtype=self.dtype)
        # One at a time: the library would hold all of them as they are read, and once more joined.
        for place, expert in enumerate(experts):
            mine = {pattern: [one[expert]] for pattern, one in self.sources.items()}
            found = _convert(self.rule, self.first, mine, self.library)[self.name]
            part[place] = found[0][tuple(others)]
        return part


def _by_expert(rule: WeightConverter) -> bool:
    """Return True if a rule joins a tensor for each expert, and then treats each by itself."""
    first, *then = rule.operations
    dims = [v for op in then for k, v in vars(op).items() if k.startswith("dim")]
    return isinstance(first, MergeModulelist) and first.dim == 0 and all(dim > 0 for dim in dims)


def _convert(rule: WeightConverter, name: str, sources: Sources, library: Any) -> dict[str, Tensor]:
    """Return what the library makes of `sources`, by name; `name` is the first of these."""
    rule = deepcopy(rule)  # which forgets what it has converted
    for pattern, tensors in sources.items():
        for tensor in tensors:
            rule.add_tensor(name, name, pattern, tensor[()])  # type: ignore[arg-type]
    found = rule.convert(name, model=library, config=library.config)
    found = found[0] if isinstance(found, tuple) else found  # transformers 5.0 adds its errors
    return {key: one[0] if isinstance(one, list) else one for key, one in found.items()}


@dataclass
class _Target:
    """The result for tensors of a folder: a renamed one, or several that a rule converts."""

    rule: WeightConverter | None
    sources: dict[str, list[FullTensor]] = field(default_factory=lambda: defaultdict(list))

    def parameters(self, name: str, library: Any) -> Iterator[tuple[str, FullTensor]]:
        """Yield the parameters by name; reads nothing."""
        if self.rule is None:
            [[tensor]] = self.sources.values()
            yield name, tensor
            return
        # Without values: shapes alone.
        meta = {
            pattern: [torch.empty(one.shape, dtype=one.dtype, device="meta") for one in tensors]
            for pattern, tensors in self.sources.items()
        }
        for key, one in _convert(self.rule, name, meta, library).items():
            shape = tuple(one.shape)
            yield key, Converted(key, shape, one.dtype, self.rule, name, self.sources, library)


def named_by_library(
    stored: Mapping[str, FullTensor], model: Any, folder: Path
) -> dict[str, FullTensor]:
    """Return the tensors in `folder` by the names of a `LibraryModel`; reads no weights.

    Raises InputError if one is missing, has another shape, or is none of the model. Tables of
    integers, which are no weights, are left out: InputError if they are not those that the
    configuration alone makes.
    """
    library = model.library
    expected: dict[str, Tensor] = library.state_dict()
    targets, extra = _targets(stored, library, expected)
    state: dict[str, FullTensor] = {}
    for name, target in targets.items():
        state |= target.parameters(name, library)
    _tie(state, model, folder)
    report = SimpleNamespace(
        missing_keys=expected.keys() - state.keys() - _heads(model),
        unexpected_keys=extra | (state.keys() - expected.keys()),
    )
    # The rules of its classes: tables that older versions saved, layers that only others use.
    adjust = library._adjust_missing_and_unexpected_keys  # noqa: SLF001
    if "loading_info" in signature(adjust).parameters:
        adjust(report)
    else:  # transformers 5.0
        report.missing_keys, report.unexpected_keys = adjust(**vars(report))
    wrong = {"missing": report.missing_keys, "unknown": report.unexpected_keys}
    shapes = {
        f"{name} is {list(tensor.shape)}, not {list(expected[name].shape)}"
        for name, tensor in state.items()
        if name in expected and tuple(tensor.shape) != tuple(expected[name].shape)
    }
    listed = [
        f"{len(names)} {kind}: {', '.join(sorted(names)[:3])}"
        for kind, names in (wrong | {"of another shape": shapes}).items()
        if names
    ]
    if listed:
        raise InputError(
            f"the weights in {folder} are not those of its config.json", why="; ".join(listed)
        )
    tables = dict(library.named_buffers())
    for name in sorted(tables.keys() & state.keys()):
        # DeepSeek-V4 chooses the experts of its first layers by such a table, of zeros at first.
        # Training would go on with zeros, and nothing but its loss would show it.
        if not torch.equal(tables[name], state[name][()]):
            raise InputError(
                f"dtt cannot train the model in {folder}",
                where=name,
                why="its values are no weights, and do not follow from config.json: checkpoints of "
                "dtt would not have them",
            )
    known = expected.keys() - tables.keys()
    return {name: tensor for name, tensor in state.items() if name in known}


def _targets(
    stored: Mapping[str, FullTensor], library: Any, expected: Mapping[str, Tensor]
) -> tuple[dict[str, _Target], set[str]]:
    """Return what becomes of the stored tensors, by the name of the first, and names of others."""
    rules = get_model_conversion_mapping(library)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    of_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    prefix, known = library.base_model_prefix, dict(expected)
    targets: dict[str, _Target] = {}
    extra: set[str] = set()
    # The order in which the library joins experts.
    for stored_name in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(stored_name, renamings, converters, prefix, known)
        if name not in known and stored_name in known:  # it has its final name already
            name, pattern = rename_source_key(stored_name, [], [], prefix, known)
        if name not in known or (pattern is None and name in targets):
            extra.add(stored_name)
            continue
        target = targets.setdefault(name, _Target(of_pattern[pattern] if pattern else None))
        target.sources[pattern or stored_name].append(stored[stored_name])
    return targets, extra


def _heads(model: Any) -> set[str]:
    """Return the name of a head that is tied to the embedding, which is none of the model."""
    library = model.library
    head = library.get_output_embeddings()
    named = library.named_modules()
    return {f"{name}.weight" for name, module in named if module is head} if model.tied else set()


def _tie(state: dict[str, FullTensor], model: Any, folder: Path) -> None:
    """Take the head of a tied model out of `state`; raise DamagedError if it is another matrix."""
    embedding = model.library.get_input_embeddings()
    named = model.library.named_modules()
    [of_embedding] = [f"{name}.weight" for name, module in named if module is embedding]
    for name in _heads(model) & state.keys():
        head = state.pop(name)
        embed = state.setdefault(of_embedding, head)
        rows = [(slice(first, first + 4096),) for first in range(0, head.shape[0], 4096)]
        if not all(torch.equal(head[some], embed[some]) for some in rows):
            raise DamagedError(
                f"the weights in {folder} are not those that its configuration describes",
                why=f"the head is tied, but {name} is another matrix",
                next='write "tie_word_embeddings": false into config.json',
            )
