"""The description of a model family: its architecture, its config.json and its weight names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dtt.config.model import ModelConfig
from dtt.model.architecture import Architecture
from dtt.model.config_section import section_problems
from dtt.model.families.hf_config import Values, check_values, unsupported

MIXTURE = tuple(f"layers.{{i}}.mlp.{part}." for part in ("router", "experts", "shared"))
"""Beginnings of the names of the parameters of a mixture."""


@dataclass(frozen=True)
class WeightRule:
    """The mapping between tensors of a Hugging Face model and parameters of dtt.

    `{i}` in a name is the layer index. With `{e}` in `hf_name`, Hugging Face has one tensor per
    expert e: the slice e of each parameter, which is a stack [experts, out, in]. If there are
    several parameters, the Hugging Face tensor is their concatenation along the output axis.
    `transpose` is True if the Hugging Face tensor is [in, out], where dtt's is [out, in].
    """

    hf_name: str
    dtt_names: tuple[str, ...]
    transpose: bool = False

    def of_layer(self, i: int) -> WeightRule:
        """Return the rule for layer `i`, with `{i}` filled in."""
        return replace(
            self,
            hf_name=self.hf_name.replace("{i}", str(i)),
            dtt_names=tuple(name.replace("{i}", str(i)) for name in self.dtt_names),
        )

    def of_expert(self, e: int) -> str:
        """Return the name of the Hugging Face tensor of expert `e`."""
        return self.hf_name.replace("{e}", str(e))

    def fits(self, arch: Architecture, i: int) -> bool:
        """Return False for a rule of another kind of MLP than layer `i` has."""
        if not self.dtt_names[0].startswith("layers.{i}.mlp."):
            return True
        of_mixture = self.dtt_names[0].startswith(MIXTURE)
        return of_mixture == (arch.mixture_of(i) is not None)

    @property
    def per_expert(self) -> bool:
        """True if Hugging Face has one tensor per expert."""
        return "{e}" in self.hf_name


@dataclass(frozen=True)
class DecoderFamily:
    """A published model architecture, and its Hugging Face format."""

    name: str
    hf_model_type: str
    """`model_type` in config.json."""
    hf_class: str
    """`architectures` in config.json: the class that transformers builds."""
    architecture: Callable[[ModelConfig, int, int], Architecture]
    """Function `(cfg, tokenizer_size, seq_len)` that resolves every null of the config. It raises
    ConfigError if the tokenizer or the sequences do not fit."""
    hf_facts: Callable[[Architecture], dict[str, Any]]
    """Entries of config.json that are specific to the family."""
    hf_values: Mapping[str, Values]
    """Keys of config.json that are specific to the family, with their supported values; any other
    key is rejected."""
    read_hf_config: Callable[[Mapping[str, Any]], Architecture]
    """Function that reads a config.json whose keys were checked. It raises InputError if they
    contradict each other."""
    weights: tuple[WeightRule, ...]

    def from_hf_config(
        self, config: Mapping[str, Any], defaults: Callable[[], Mapping[str, Any]] = dict
    ) -> Architecture:
        """Return the architecture that a config.json describes.

        Raises InputError for features that `Decoder` does not support, and for keys that dtt does
        not know, unless they have the value in `defaults()` (those of transformers' class for the
        family).
        """
        check_values(config, self.hf_values, defaults)
        arch = self.read_hf_config(config)
        problems = list(section_problems(arch))
        if problems:
            raise unsupported(config, "; ".join(problems))
        return arch

    def to_hf_config(self, arch: Architecture, end_of_document: int | None) -> dict[str, Any]:
        """Return the content of config.json, except the dtype.

        `end_of_document` is the id of the token that ends a document.
        """
        return {
            "model_type": self.hf_model_type,
            "architectures": [self.hf_class],
            "vocab_size": arch.vocab_size,
            **self.hf_facts(arch),
            "initializer_range": arch.init_std.matrix,
            "tie_word_embeddings": arch.tie_embeddings,
            # dtt separates documents by one token, which also starts a generation. GPT-2 uses the
            # same id for both.
            "bos_token_id": end_of_document,
            "eos_token_id": end_of_document,
        }

    def weight_rules(self, arch: Architecture) -> Iterator[WeightRule]:
        """Yield the rules of this model, with the layer filled in; a tied head has none."""
        for rule in self.weights:
            if rule.dtt_names == ("head.weight",) and arch.tie_embeddings:
                continue
            if "{i}" in rule.hf_name:
                layers = (i for i in range(arch.n_layers) if rule.fits(arch, i))
                yield from (rule.of_layer(i) for i in layers)
            else:
                yield rule


def same_name(hf_name: str, dtt_name: str, *suffixes: str) -> tuple[WeightRule, ...]:
    """Return rules for tensors that differ in name only, one per suffix (`weight`, `bias`)."""
    return tuple(WeightRule(f"{hf_name}.{s}", (f"{dtt_name}.{s}",)) for s in suffixes)
