"""Weights of a folder by the names of a library's model, read and converted part by part."""

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
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from dtt.base.errors import DamagedError, InputError
from dtt.mesh.sharding import FullTensor

Sources = Mapping[str, Sequence[FullTensor]]
"""The tensors that one conversion takes, by the pattern of their names."""


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
