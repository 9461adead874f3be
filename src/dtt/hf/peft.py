"""Adapters in the format of PEFT: adapter_config.json and adapter_model.safetensors, both ways.

PEFT names adapted layers as transformers does. Where that is one layer for several of dtt (q, k and
v of GPT-2 and Phi-3), a file has one A of all their ranks, and a B with a block for each of them.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import regex
import torch
import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)
from safetensors.torch import save_file
from torch import Tensor

from dtt.base.errors import ConfigError, DamagedError, InputError
from dtt.base.patterns import SlowPattern, match_name
from dtt.config.adapter import ALL_LINEAR, LoraConfig
from dtt.hf.chat_format import read_config
from dtt.hf.read import load_tensors
from dtt.model import families
from dtt.model.adapted_layers import Adapted, adaptable, adapted_layers, inner
from dtt.model.architecture import AnyArchitecture, BuiltArchitecture
from dtt.model.families import multimodal
from dtt.model.families.base import WeightRule
from dtt.model.lora import LORA_A, LORA_B

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""What PEFT puts before the name of a module of transformers."""
DESCRIPTIONS = {
    "lora_dropout", "inference_mode", "auto_mapping", "peft_version", "base_model_name_or_path",
    "revision", "qalora_group_size", "megatron_core", "runtime_config",
}  # fmt: skip
"""Fields that say nothing about the weights: of training only, parameters of a method that another
field turns on, and descriptions."""


def _pattern(text: str) -> str:
    """Return a regular expression; raise ValueError for other text."""
    try:
        match_name(text, "")
    except (re.error, regex.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{text!r} is not a regular expression: {error}") from None
    return text


Pattern = Annotated[str, AfterValidator(_pattern)]
Names = Pattern | list[str]
"""Modules: a regular expression for complete names, or a list of ends of names."""


class PeftConfig(BaseModel):
    """The fields of adapter_config.json that dtt computes with; any other that is set is refused.

    PEFT gains fields in each release, and an unknown one may change what the adapter computes. Off,
    they change nothing, so that a file of a later release is read as long as it uses none of them.
    """

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())

    peft_type: Literal["LORA"]
    task_type: Literal["CAUSAL_LM"] | None = None
    r: PositiveInt = 8
    lora_alpha: PositiveFloat = 8.0
    use_rslora: bool = False
    rank_pattern: dict[Pattern, PositiveInt] = Field(default_factory=dict)
    alpha_pattern: dict[Pattern, PositiveFloat] = Field(default_factory=dict)
    target_modules: Names | None = None
    exclude_modules: Names | None = None
    layers_to_transform: int | list[int] | None = None
    layers_pattern: Pattern | list[Pattern] | None = None
    fan_in_fan_out: bool = False
    init_lora_weights: Literal[True, False, "gaussian", "eva", "orthogonal"] = True
    """Initial values that leave the frozen weights alone. Others, such as pissa, subtract the
    initial adapter from them, so that the file belongs to other weights."""

    bias: Literal["none"] = "none"

    @model_validator(mode="after")
    def _no_other_method(self) -> Self:
        """Refuse every other field that is set, by name."""
        for name, value in (self.model_extra or {}).items():
            # None, False, [] or {} is what PEFT writes for the methods that an adapter leaves out.
            if value and name not in DESCRIPTIONS:
                raise ValueError(f"{name}: it belongs to a method that dtt does not have")
        return self

    def of_layer(self, name: str) -> Adapted:
        """Return the adapter of the layer `name`."""

        def first(patterns: Mapping[str, Any], general: Any) -> Any:
            # The rule of PEFT: the end of a name from a dot on, or all of it.
            matching = (p for p in patterns if match_name(rf"(.*\.)?({p})", name))
            found = next(matching, None)
            return general if found is None else patterns[found]

        rank = first(self.rank_pattern, self.r)
        return Adapted(rank, first(self.alpha_pattern, self.lora_alpha), self.use_rslora)

    def targets(self, name: str) -> bool:
        """Return True if PEFT adapts the layer `name`."""
        if self.exclude_modules and _named(self.exclude_modules, name):
            return False
        if self.target_modules == ALL_LINEAR:
            return True
        if not self.target_modules or not _named(self.target_modules, name):
            return False
        if self.layers_to_transform is None:
            return True
        layers, given = self.layers_to_transform, self.layers_pattern or r"[^.]*"
        numbers = [layers] if isinstance(layers, int) else layers
        patterns = [given] if isinstance(given, str) else given
        ends = (rf".*\.{pattern}\.(\d+)\." for pattern in patterns)
        found = (match_name(end, name, whole=False) for end in ends)
        return any(match is not None and int(match[1]) in numbers for match in found)


def _named(wanted: str | Sequence[str], name: str) -> bool:
    if isinstance(wanted, str):
        return match_name(wanted, name) is not None
    return any(name == one or name.endswith(f".{one}") for one in wanted)


def read_peft(folder: Path, arch: AnyArchitecture, cfg: LoraConfig) -> dict[str, Tensor]:
    """Return the parameters of the adapter in `folder`, by dtt's names.

    Raises InputError for what dtt does not support, DamagedError for a folder that contradicts
    itself, and ConfigError, with the section to use, if it differs from `cfg`.
    """
    try:
        return _read_peft(folder, arch, cfg)
    except SlowPattern as slow:
        raise InputError(
            "the adapter has a pattern that is not matched in time",
            where=folder / CONFIG,
            why=str(slow),
            next="write the names of the layers that it means into adapter_config.json",
        ) from None


def _read_peft(folder: Path, arch: AnyArchitecture, cfg: LoraConfig) -> dict[str, Tensor]:
    where = folder / CONFIG
    if not where.is_file():
        raise InputError(f"no adapter in {folder}", where="init.adapter", why=f"it has no {CONFIG}")
    config = _config(where)
    rules = {rule.hf_name.removesuffix(".weight"): rule for rule in linear_rules(arch)}
    if config.fan_in_fan_out and not all(rule.transpose for rule in rules.values()):
        raise _refused(where, "fan_in_fan_out", "the layers of this model are not transposed")
    if not (folder / TENSORS).is_file():
        remedy = "adapters in pickle files are not read"
        raise DamagedError(f"{folder / TENSORS} is missing", next=remedy)
    found, like = _layers(load_tensors(folder / TENSORS), folder / TENSORS)
    names = {name: _named_like(name, like) for name in rules}
    _check_targets(config, names, found.keys(), where)
    state: dict[str, Tensor] = {}
    layers: dict[str, Adapted] = {}
    for name, (a, b) in found.items():
        # The same for every part of a fused layer: each has all of A.
        own = config.of_layer(names[name])
        if a.shape[0] != own.rank or b.shape[1] != own.rank:
            raise DamagedError(
                f"the rank of {name} is {a.shape[0]} in {TENSORS}, {own.rank} in {CONFIG}",
                where=folder,
            )
        parts = _parts(rules[name], arch)
        outputs = sum(shape[0] for _, shape in parts)
        if b.shape[0] != outputs:
            why = f"B of {name} has {b.shape[0]} outputs, not {outputs}"
            raise InputError("the adapter is for another model", where=folder, why=why)
        split = b.split_with_sizes([shape[0] for _, shape in parts])
        for (part, shape), rows in zip(parts, split, strict=True):
            if a.shape[1] != shape[1]:
                raise DamagedError(
                    f"A of {name} has {a.shape[1]} inputs, not {shape[1]}", where=folder
                )
            state |= {f"{part}.{LORA_A}": a, f"{part}.{LORA_B}": rows.contiguous()}
            layers[part] = own
    _compare(layers, adapted_layers(cfg, arch), arch.n_layers, folder)
    return state


def _config(path: Path) -> PeftConfig:
    """Read adapter_config.json; InputError names the first field that dtt does not support."""
    try:
        return PeftConfig.model_validate(read_config(path))
    except ValidationError as error:
        first = error.errors()[0]
        name, _, why = first["msg"].removeprefix("Value error, ").rpartition(": ")
        raise _refused(path, ".".join(map(str, first["loc"])) or name, why) from None


def _refused(where: Path, name: str, why: str) -> InputError:
    return InputError(
        f"dtt does not support {name} as this adapter sets it",
        where=where,
        why=why,
        next="merge this adapter with PEFT (merge_and_unload), and start from the result",
    )


def linear_rules(arch: AnyArchitecture) -> Iterator[WeightRule]:
    """Yield the rules of the linear layers that an adapter may have."""
    if isinstance(arch, BuiltArchitecture):  # its names are those of transformers
        yield from (WeightRule(name, (name,)) for name in adaptable(arch))
        return
    rules, shapes = families.get(arch.family).weight_rules(arch), adaptable(arch)
    yield from (rule for rule in rules if shapes.keys() >= set(rule.dtt_names))


def _parts(rule: WeightRule, arch: AnyArchitecture) -> list[tuple[str, tuple[int, ...]]]:
    """Return name and shape [out, in] of each of dtt's layers in one of transformers."""
    shapes = adaptable(arch)
    return [(name.removesuffix(".weight"), shapes[name]) for name in rule.dtt_names]


def _named_like(name: str, like: str | None) -> str:
    """Return the name of a layer in the multimodal model with a tensor `like`; None: in no such."""
    return name if like is None else multimodal.whole_name(name, like)


def text_layer(name: str) -> str:
    """Return the name that a tensor of an adapter has if it is for the text model alone."""
    module = name.removeprefix(PREFIX)
    return multimodal.text_name(module) or module


def of_text_class(folder: Path) -> bool:
    """Return True if an adapter names layers as the class of a text model does.

    AutoModelForCausalLM makes one of a folder of Qwen3.5 or Llama 4.
    """
    return all(n.removeprefix(PREFIX) == text_layer(n) for n in load_tensors(folder / TENSORS))


def _layers(
    tensors: Mapping[str, Tensor], where: Path
) -> tuple[dict[str, tuple[Tensor, Tensor]], str | None]:
    """Return A and B of each adapted layer, by the name that transformers has for it.

    Adapters of multimodal models name the layers of their text model; also returns one such name.
    """
    found: dict[str, dict[str, Tensor]] = {}
    like = None
    for name, tensor in tensors.items():
        module, dot, part = name.removeprefix(PREFIX).rpartition(".lora_")
        if not name.startswith(PREFIX) or not dot or part not in ("A.weight", "B.weight"):
            raise InputError(f"dtt does not support the tensor {name} of an adapter", where=where)
        if tensor.ndim != 2 or not tensor.is_floating_point():
            raise DamagedError(f"{name} is {tensor.dtype} {list(tensor.shape)}", where=where)
        layer = found.setdefault(text_layer(name).rpartition(".lora_")[0], {})
        if part in layer:
            why = f"{name} is one of two tensors for it"
            raise DamagedError("the adapter names a layer twice", where=where, why=why)
        layer[part] = tensor
        like = like if multimodal.text_name(module) is None else module
    incomplete = [name for name, parts in found.items() if len(parts) != 2]
    if incomplete or not found:
        raise DamagedError("the adapter is incomplete", where=where, why=f"{incomplete[:1]}")
    layers = {name: (parts["A.weight"], parts["B.weight"]) for name, parts in found.items()}
    return layers, like


def _check_targets(
    config: PeftConfig, names: Mapping[str, str], found: Iterable[str], where: Path
) -> None:
    """Raise unless the layers with tensors are those that the configuration names.

    `names` are all layers, each with its name in the model that the adapter is for.
    """
    targeted = {name for name, whole in names.items() if config.targets(whole)}
    odd = sorted(targeted.symmetric_difference(found))
    if not odd:
        return
    if not set(found) <= set(names):
        unknown = min(set(found) - set(names))
        if any(name != whole for name, whole in names.items()):
            raise _refused(where, unknown, "training computes the text model alone")
        raise InputError(
            f"the adapter is for another model: it has no layer {unknown}", where=where
        )
    raise DamagedError(
        f"{CONFIG} and {TENSORS} name different layers", where=where, why=f"{odd[0]} is in one only"
    )


def _compare(
    theirs: Mapping[str, Adapted], ours: Mapping[str, Adapted], n_layers: int, folder: Path
) -> None:
    """Raise ConfigError unless both adapt the same layers with equal ranks and scales."""
    for name in sorted(theirs.keys() | ours.keys()):
        here, there = ours.get(name), theirs.get(name)
        if (here and (here.rank, here.scale)) != (there and (there.rank, there.scale)):
            section = yaml.safe_dump(
                {"adapter": adapter_section(theirs, n_layers)}, sort_keys=False
            )
            raise ConfigError(
                f"the adapter of this run differs from the one in {folder}",
                where="init.adapter",
                why=f"{name}: {_described(here)} here, {_described(there)} there",
                next=f"use its settings:\n\n{section}",
            )


def _described(adapted: Adapted | None) -> str:
    return "none" if adapted is None else f"rank {adapted.rank}, scale {adapted.scale:g}"


def adapter_section(layers: Mapping[str, Adapted], n_layers: int) -> dict[str, Any]:
    """Return an `adapter` section with these adapters of a model with `n_layers` layers."""
    (rank, alpha), _ = Counter((one.rank, one.alpha) for one in layers.values()).most_common(1)[0]
    ends = Counter(map(inner, layers))  # without `layers.N.`
    return {
        "type": "lora",
        "rank": rank,
        "alpha": alpha,
        "rslora": next(iter(layers.values())).rslora,
        # Of the model, not of the adapter: short names would also adapt the layers that it leaves
        # out.
        "targets": sorted(ends if set(ends.values()) == {n_layers} else layers),
        "rank_pattern": {
            f"^{re.escape(name)}": own.rank for name, own in layers.items() if own.rank != rank
        },
        "alpha_pattern": {
            f"^{re.escape(n)}": o.alpha for n, o in layers.items() if o.alpha != alpha
        },
    }


@dataclass(frozen=True)
class Adapter:
    """A trained adapter, and the model that it is for."""

    state: Mapping[str, Tensor]
    """A and B of each layer, by dtt's names."""
    layers: Mapping[str, Adapted]
    base: str
    """The model: ORG/NAME, or a folder."""
    revision: str | None
    folder: Path
    """Where the model is on this machine."""
    dropout: float


def write_peft(folder: Path, adapter: Adapter, arch: AnyArchitecture) -> None:
    """Write the two files of an adapter into `folder`."""
    from dtt.hf.library_folder import text_parameter  # imports transformers

    state, layers, like = adapter.state, adapter.layers, text_parameter(adapter.folder)
    tensors: dict[str, Tensor] = {}
    found: dict[str, Adapted] = {}
    transposed = False
    for rule in linear_rules(arch):
        parts = _parts(rule, arch)
        if any(part in layers for part, _ in parts):
            name = _named_like(rule.hf_name.removesuffix(".weight"), like)
            a, b, found[name] = _joined(parts, state, layers)
            tensors |= {f"{PREFIX}{name}.lora_A.weight": a, f"{PREFIX}{name}.lora_B.weight": b}
            transposed = transposed or rule.transpose
    section = adapter_section(found, arch.n_layers)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapter.base,
        "revision": adapter.revision,
        "r": section["rank"],
        "lora_alpha": section["alpha"],
        "use_rslora": section["rslora"],
        # Other parts of a multimodal model have layers of the same names.
        "target_modules": _targets_of_peft(found, arch) if like is None else sorted(found),
        "rank_pattern": section["rank_pattern"],
        "alpha_pattern": section["alpha_pattern"],
        "lora_dropout": adapter.dropout,
        "fan_in_fan_out": transposed,
        "bias": "none",
        "inference_mode": True,
    }
    save_file(tensors, folder / TENSORS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _targets_of_peft(found: Iterable[str], arch: AnyArchitecture) -> list[str]:
    """Return the last parts of the names if they name exactly these layers, else complete names."""
    found = set(found)
    ends = sorted({name.rpartition(".")[2] for name in found})
    names = [rule.hf_name.removesuffix(".weight") for rule in linear_rules(arch)]
    # GPT-2 has two layers of one name in each block, c_proj.
    return ends if {n for n in names if _named(ends, n)} == found else sorted(found)


def _joined(
    parts: Sequence[tuple[str, tuple[int, ...]]],
    state: Mapping[str, Tensor],
    layers: Mapping[str, Adapted],
) -> tuple[Tensor, Tensor, Adapted]:
    """Return A, B and the settings of the one layer that transformers has for `parts`."""
    adapted = [(part, shape, layers[part]) for part, shape in parts if part in layers]
    first = adapted[0][2]
    rank = sum(one.rank for _, _, one in adapted)
    if len(parts) == 1:
        only = adapted[0][0]
        a, b = (state[f"{only}.{part}"].float().contiguous() for part in (LORA_A, LORA_B))
        return a, b, first
    b = torch.zeros(sum(shape[0] for _, shape in parts), rank)
    row = column = 0
    for part, shape in parts:
        if (own := layers.get(part)) is not None:
            block = b[row : row + shape[0], column : column + own.rank]
            # The file has one scale, that of the first part.
            block.copy_(state[f"{part}.{LORA_B}"].float() * (own.scale / first.scale))
            column += own.rank
        row += shape[0]
    a = torch.cat([state[f"{part}.{LORA_A}"].float() for part, _, _ in adapted])
    alpha = first.scale * (sqrt(rank) if first.rslora else rank)
    return a, b, Adapted(rank, alpha, first.rslora)
