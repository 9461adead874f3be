"""What dtt has to know of a family: facts, and how its names read on the other side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dtt.config.model import ModelConfig
from dtt.model.architecture import Architecture
from dtt.model.families.hf_config import Values, check_values, unsupported
from dtt.model.section import section_problems


@dataclass(frozen=True)
class WeightRule:
    """One Hugging Face tensor and the parameters of ours that it holds.

    `{i}` in a name stands for the layer. Several of ours are equal parts of theirs, stacked along
    the output axis; `transpose` says that theirs is [in, out] where ours is [out, in].
    """

    theirs: str
    ours: tuple[str, ...]
    transpose: bool = False

    def of_layer(self, i: int) -> WeightRule:
        """The rule with `{i}` filled in."""
        return replace(
            self,
            theirs=self.theirs.format(i=i),
            ours=tuple(name.format(i=i) for name in self.ours),
        )


@dataclass(frozen=True)
class Family:
    """A published architecture."""

    name: str
    hf_model_type: str
    """`model_type` in config.json."""
    hf_class: str
    """`architectures` in config.json: the class that transformers builds."""
    architecture: Callable[[ModelConfig, int, int], Architecture]
    """`(cfg, tokenizer_size, seq_len)`: every null of the config resolved, ConfigError when the
    tokenizer or the sequences do not fit."""
    hf_facts: Callable[[Architecture], dict[str, Any]]
    """What config.json says of this family, besides what it says of all."""
    hf_values: Mapping[str, Values]
    """Keys of config.json that the family has, beside those of all families, and what each may
    say; a key that is not among them is refused."""
    read_hf_config: Callable[[Mapping[str, Any]], Architecture]
    """From a config.json whose keys were checked; InputError when they contradict each other."""
    weights: tuple[WeightRule, ...]

    def from_hf_config(
        self, config: Mapping[str, Any], defaults: Callable[[], Mapping[str, Any]] = dict
    ) -> Architecture:
        """Return the architecture that a config.json describes.

        InputError names what `Decoder` does not compute, and keys that dtt does not know unless
        they have the value in `defaults()` (of transformers' class for the family).
        """
        check_values(config, self.hf_values, defaults)
        arch = self.read_hf_config(config)
        problems = list(section_problems(arch))
        if problems:
            raise unsupported(config, "; ".join(problems))
        return arch

    def to_hf_config(self, arch: Architecture, end_of_document: int | None) -> dict[str, Any]:
        """What goes into config.json, dtype excepted; documents end with the token of that id."""
        return {
            "model_type": self.hf_model_type,
            "architectures": [self.hf_class],
            "vocab_size": arch.vocab_size,
            **self.hf_facts(arch),
            "initializer_range": arch.init_std,
            "tie_word_embeddings": arch.tie_embeddings,
            "bos_token_id": end_of_document,
            "eos_token_id": end_of_document,
        }

    def weight_rules(self, arch: Architecture) -> Iterator[WeightRule]:
        """The rules of this model, one per Hugging Face tensor; a tied head has none."""
        for rule in self.weights:
            if rule.ours == ("head.weight",) and arch.tie_embeddings:
                continue
            if "{i}" in rule.theirs:
                yield from (rule.of_layer(i) for i in range(arch.n_layers))
            else:
                yield rule


def same_name(theirs: str, ours: str, *suffixes: str) -> tuple[WeightRule, ...]:
    """Rules for tensors that differ in name only, one per suffix (`weight`, `bias`)."""
    return tuple(WeightRule(f"{theirs}.{s}", (f"{ours}.{s}",)) for s in suffixes)
