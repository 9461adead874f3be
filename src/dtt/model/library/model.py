"""A causal model of the library `transformers` as a `dtt.Model`.

Shapes: B sequences, T tokens, D width of the hidden states, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from inspect import signature
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtt.base.errors import ConfigError
from dtt.base.log import log
from dtt.base.targets import IGNORE_INDEX
from dtt.model.contract import Model, Reduction, Role
from dtt.model.library.after_body import has_router_loss, logit_rule, router_loss
from dtt.model.output import HiddenStates, Output
from dtt.model.token_context import Context

IGNORED = (
    "architectures", "torch_dtype", "dtype", "transformers_version", "_name_or_path", "use_cache",
    "model_type",
)  # fmt: skip
"""Keys of config.json that say nothing of what the model computes."""
BY_MASKS = ("gpt_oss", "afmoe")
"""Types whose layers need a mask of documents each: restarted positions do not separate these."""
CACHES = ("cache", "past_key_values", "cache_params")
"""Names of the cache among the arguments and results of the library's models: newer versions take
the first, and return it under one of the others."""
ANOTHER = "use a model of another type: docs/library-models.md lists those that work"
"""Remedy for a type whose inside dtt cannot train."""
OF_PADDING = ("bloom", "falcon_mamba", "mamba", "opt")
"""Types whose masks have a value for each token, [B, T]."""
FIXED = (".indexer.", "correction_bias", "expert_bias")
"""Parts of the names of parameters that choose tokens or experts: no gradient passes a choice."""
BIAS_COLUMNS = 8
"""Columns that a bias adds to the weight of a head: GEMMs want widths that 8 divides."""
ROUTERS = (".gate.weight", ".router.weight", ".router.classifier.weight", ".gate.wg.weight")
"""Endings of the names of routers of experts in the library."""


class LibraryModel(Model):
    """A model of the library: its names of parameters are those of the library."""

    library: Any
    """The library's own module, whose children are those of this one."""
    body: Any
    """The part of it that computes hidden states."""
    tied: bool
    """True if the head is the embedding."""
    kept_buffers: dict[str, Tensor]
    """Initial values of parameters that are buffers in the library, by name."""
    routed: bool
    """True if `output_router_logits` adds a loss of routers."""
    fixed: frozenset[str]
    """Names of the parameters that no optimizer trains."""

    def __init__(self, config: Mapping[str, Any], vocab_size: int, context: int) -> None:
        """Build the model of a config.json; raise ConfigError for one that the library refuses."""
        super().__init__()
        self.config: Any = library_config(config, vocab_size, context)
        library: Any = _create(self.config)
        head, embedding = library.get_output_embeddings(), library.get_input_embeddings()
        # Not as submodules: their children are those of this model, so that all names are the
        # library's, and its `forward`, which would compute all logits, is not called.
        object.__setattr__(self, "library", library)
        body = next(c for c in library.children() if embedding in set(c.modules()))
        # A few have a shell around it, which the library's `forward` does not call.
        while len(children := [*body.children()]) == 1:
            body = children[0]
        object.__setattr__(self, "body", body)
        if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
            raise _refused(config, f"its head is no matrix: {type(head).__name__}", ANOTHER)
        self.tied = head.weight is embedding.weight
        biased = getattr(head, "bias", None) is not None  # torch's stubs say that all have one
        if self.tied and biased:
            raise _refused(config, "its head is tied to the embedding, and has a bias", ANOTHER)
        if head.out_features != vocab_size:
            why = f"its head has {head.out_features} rows for {vocab_size} token ids"
            raise _refused(config, why)
        for name, child in library.named_children():
            # A tied head is the embedding once more: FSDP2 and checkpoints want each tensor once.
            if not (self.tied and child is head):
                self.add_module(name, child)
        try:
            self._before, self._after, self.softcap = logit_rule(library, self.body)
        except Exception as error:
            why = "no factor and no cap lead from its last hidden states to its logits"
            raise _refused(config, f"{why}: {str(error).splitlines()[0]}", ANOTHER) from error
        self.routed = bool(getattr(self.config, "output_router_logits", False))
        if self.routed and not has_router_loss(library):
            why = "output_router_logits is set, and the library has no loss of its routers"
            raise _refused(config, why, "model.config.output_router_logits=false")
        self.kept_buffers = self._kept_buffers()
        # Some are frozen in the library. Frozen means here that an adapter trains in their place.
        frozen = {name for name, p in self.named_parameters() if not p.requires_grad}
        chosen = {n for n, _ in self.named_parameters() if any(part in n for part in FIXED)}
        self.fixed = frozenset(frozen | chosen | self.kept_buffers.keys())
        self.requires_grad_()
        named = [*self.named_parameters(remove_duplicate=False)]
        if len(named) != len({id(parameter) for _, parameter in named}):
            raise _refused(config, "some of its layers share their parameters", ANOTHER)

    def _kept_buffers(self) -> dict[str, Tensor]:
        """Make parameters of the buffers that belong to the state, so that checkpoints have them.

        They are the corrections of routers. No optimizer trains them.
        """
        kept: dict[str, Tensor] = {}
        for name, module in self.named_modules():
            for inner, buffer in list(module.named_buffers(recurse=False)):
                persistent = inner not in module._non_persistent_buffers_set  # noqa: SLF001
                if persistent and buffer.is_floating_point():
                    del module._buffers[inner]  # noqa: SLF001
                    module.register_parameter(inner, nn.Parameter(buffer))
                    kept[f"{name}.{inner}"] = buffer.clone()
        return kept

    def hidden(self, tokens_BT: Tensor, context: Context) -> HiddenStates:
        """Return the last hidden states; where documents are separate, positions restart.

        Beside them are the logits of routers, [B * T, E] each, if the model has a loss of these.
        """
        # Given positions, the library looks for documents, and masks with a table of all pairs,
        # which fused kernels of attention are spared where none is needed.
        separate = context.documents is not None
        found = self.body(
            input_ids=tokens_BT,
            position_ids=context.positions.expand_as(tokens_BT) if separate else None,
            attention_mask=self._masks(tokens_BT, context),
            use_cache=False,
        )
        routers = found.router_logits if self.routed else ()
        logits = {str(i): one for i, one in enumerate(routers)}
        return HiddenStates(self._for_head(found.last_hidden_state), logits, {})

    def losses(
        self, states: HiddenStates, targets_BT: Tensor | None, z_loss: float, reduction: Reduction
    ) -> Tensor | Output:
        """Return what `Model.losses` does, with the losses that the library adds to that."""
        logits, aux = [*states.aux.values()], {}
        if logits and targets_BT is not None and torch.is_grad_enabled():
            aux = {"balance_loss": router_loss(self.library, logits, targets_BT != IGNORE_INDEX)}
        z_loss += getattr(self.config, "z_loss_coefficient", 0.0)
        return super().losses(states._replace(aux=aux), targets_BT, z_loss, reduction)

    def _for_head(self, hidden_BTD: Tensor) -> Tensor:
        """Return what `head_weight` multiplies: scaled, and with a column of ones for a bias."""
        if (factor := self._before * self._after) != 1.0:
            hidden_BTD = hidden_BTD * factor
        if self._bias() is not None:
            hidden_BTD = F.pad(F.pad(hidden_BTD, (0, 1), value=self._after), (0, BIAS_COLUMNS - 1))
        return hidden_BTD

    def reader(self) -> Callable[[Tensor], Tensor]:
        """Return the function of `Model.reader`, with the library's cache if that is exact."""
        return self._cached_reader() if self._caches else super().reader()

    def _cached_reader(self) -> Callable[[Tensor], Tensor]:
        state: dict[str, Any] = {}
        length, known = 0, signature(self.body.forward).parameters

        def read(tokens_T: Tensor) -> Tensor:
            nonlocal state, length
            positions_T = torch.arange(length, length + len(tokens_T), device=tokens_T.device)
            how = {"position_ids": positions_T[None], "use_cache": True, **state}
            found = self.body(input_ids=tokens_T[None], **how)
            name = next((name for name in CACHES if name in found), None)
            state = {} if name is None else {name if name in known else CACHES[0]: found[name]}
            length += len(tokens_T)
            hidden_11D = self._for_head(found.last_hidden_state[:, -1:])
            logits_11V: Any = self.losses(HiddenStates(hidden_11D, {}, {}), None, 0.0, "sum")
            return cast("Tensor", logits_11V[0, -1])

        return read

    @cached_property
    def _caches(self) -> bool:
        """True if the library's cache gives the logits of a whole pass, by a text of six tokens.

        Some classes ignore the cache that they are given, or take another argument for it.
        """
        ids = torch.arange(6, device=self.head_weight().device)
        tolerance = 0.05 if ids.is_cuda or self.head_weight().dtype != torch.float32 else 1e-3
        try:
            cached, whole = self._cached_reader(), super().reader()
            for part in (ids[:3], ids[3:4], ids[4:]):
                ours, theirs = cached(part), whole(part)
                if (ours - theirs).abs().max() > tolerance * theirs.abs().max():
                    raise ValueError("its logits are not those of a whole pass")
        except Exception as error:  # noqa: BLE001  whatever a class of the library raises
            log.warning(
                "generation computes the whole text for each token: the cache of %s cannot be used "
                "(%s)",
                self.config.model_type,
                str(error).partition("\n")[0],
            )
            return False
        return True

    def _masks(self, tokens_BT: Tensor, context: Context) -> Any:
        """Return the masks that the library does not make by itself; None where it does.

        It makes those of packed documents from positions that restart, in nearly all classes.
        """
        length = tokens_BT.shape[1]
        if tokens_BT.is_meta:
            # It would look for documents in values, which these have not.
            if self.config.model_type in OF_PADDING:
                return torch.ones_like(tokens_BT)
            return tokens_BT.new_zeros(1, 1, length, length, dtype=torch.float32)
        if context.documents is None or self.config.model_type not in BY_MASKS:
            return None
        index_T = torch.arange(length, device=tokens_BT.device)
        distance_TT = index_T[:, None] - index_T
        same_BTT = context.documents[:, :, None] == context.documents[:, None]
        windows = {"full_attention": length, "sliding_attention": self.config.sliding_window}
        return {
            kind: self._mask(same_BTT & (distance_TT >= 0) & (distance_TT < window))
            for kind, window in windows.items()
        }

    def _mask(self, seen_BTT: Tensor) -> Tensor:
        """Return a mask in the form of the attention of the model, [B, 1, T, T]."""
        if self.config._attn_implementation != "eager":  # noqa: SLF001  it has no public name
            return seen_BTT[:, None]
        dtype = self._head().weight.dtype
        # Added to scores. Not `where` of two numbers, which are fp32: the least of fp64 is none.
        added_BTT = torch.zeros_like(seen_BTT, dtype=dtype)
        return added_BTT.masked_fill(~seen_BTT, torch.finfo(dtype).min)[:, None]

    def head_weight(self) -> Tensor:
        """Return the weight of the head, [V, D]; columns of its bias follow if it has one."""
        weight: Tensor = self._head().weight
        bias = self._bias()
        if bias is None:
            return weight
        return torch.cat([weight, F.pad(bias[:, None], (0, BIAS_COLUMNS - 1))], dim=1)

    def _head(self) -> Any:
        """Return the module of this model that owns the weight of the head."""
        library = self.library
        return library.get_input_embeddings() if self.tied else library.get_output_embeddings()

    def _bias(self) -> Tensor | None:
        return None if self.tied else self._head().bias

    def linear_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights that LoRA can adapt: no choice of tokens, which gets no gradient."""
        yield from ((name, w) for name, w in super().linear_weights() if name not in self.fixed)

    def by_token(self) -> frozenset[str]:
        """Return the names of parameters that have a row for each token id."""
        library = self.library
        owners = (library.get_input_embeddings(), library.get_output_embeddings())
        named = self.named_modules()
        return frozenset(f"{name}.weight" for name, module in named if module in owners)

    def blocks(self) -> Mapping[int, nn.Module]:
        """Return the blocks by index: the longest list of modules, the outermost of equal ones."""
        lists = [module for module in self.body.modules() if isinstance(module, nn.ModuleList)]
        layers = getattr(self.config, "num_hidden_layers", None)
        lists.sort(key=lambda one: (len(one) == layers, len(one)), reverse=True)
        return dict(enumerate(lists[0])) if lists else {}

    def role(self, name: str, parameter: Tensor) -> Role:
        """Return the role of a parameter; see `Model.role`."""
        if name in self.fixed:
            return "balance"
        if name.endswith((".lora_a", ".lora_b")):
            return "adapter"
        if parameter is self._head().weight and not self.tied:
            return "head"
        if parameter.ndim == 2 and name.endswith(ROUTERS):
            return "router"
        return super().role(name, parameter)

    def init_weights(self, module: nn.Module) -> None:
        """Initialise the parameters of a module as the library does."""
        for name, values in self.kept_buffers.items():
            owner, _, inner = name.rpartition(".")
            if self.get_submodule(owner) is module:
                module.get_parameter(inner).copy_(values)
        # The library's own hook for each class; that of the body knows the sizes of the body.
        getattr(self.body, "_init_weights", self.library._init_weights)(module)  # noqa: SLF001

    def notes(self) -> Iterator[str]:
        """Yield the dropout that the configuration has: in some types of models by default."""
        config = self.config.get_text_config().to_dict()
        named = {k: v for k, v in config.items() if "drop" in k and isinstance(v, float) and v}
        for key, value in named.items():
            yield f"dropout: model.config.{key} is {value}; 0.0 turns it off"

    def without_values(self) -> Self:
        """Return a copy on the meta device, whose experts compute shapes without values."""
        copy = super().without_values()
        # The loop over experts asks which of them have tokens. This one copies the weights of the
        # experts for each token, which costs nothing here.
        copy.library.set_experts_implementation("batched_mm")
        return copy

    def active_share(self) -> float:
        """Return the share of the experts that computes a token; 1.0 without experts."""
        config = self.config.get_text_config()
        per_token = getattr(config, "num_experts_per_tok", None)
        names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
        experts = next((n for name in names if (n := getattr(config, name, None))), None)
        return per_token / experts if per_token and experts else 1.0


def library_config(config: Mapping[str, Any], vocab_size: int, context: int) -> Any:
    """Return the library's configuration; raise ConfigError for keys that it does not know."""
    known = _defaults(config)
    # The library takes any key, and ignores those that it does not know.
    if unknown := unknown_keys(config):
        raise _refused(config, f"its configuration has no {', '.join(unknown)}")
    # A row of padding gets no gradient in the library. dtt pads with positions that nothing is
    # trained on, and the id may be a token of the tokenizer.
    sizes = {"vocab_size": vocab_size, "pad_token_id": None}
    # Older types have a name of their own for it.
    length = known.attribute_map.get("max_position_embeddings", "max_position_embeddings")
    if length in dir(known) and not {length, "max_position_embeddings"} & config.keys():
        sizes[length] = context
    return made({**config, **sizes})


def made(config: Mapping[str, Any]) -> Any:
    """Return the library's configuration of a config.json; raise ConfigError for wrong values."""
    from transformers import AutoConfig, PretrainedConfig

    given = {key: value for key, value in config.items() if key not in IGNORED}
    # The library writes an infinity as an object: JSON has none.
    given = PretrainedConfig._decode_special_floats(given)  # noqa: SLF001
    try:
        return AutoConfig.for_model(str(config["model_type"]), **given)
    except Exception as error:
        raise _refused(config, f"{type(error).__name__}: {error}") from error


def unknown_keys(config: Mapping[str, Any]) -> list[str]:
    """Return the keys of a config.json that the library ignores."""
    known = _defaults(config)
    # Not `hasattr`: some raise for a size that differs from layer to layer.
    names = {*IGNORED, *_arguments(known), *dir(known)}
    return [key for key in config if key not in names]


def _defaults(config: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    kind = config.get("model_type")
    try:
        known = AutoConfig.for_model(str(kind))
    except ValueError:
        raise _refused(config, f"transformers has no model_type {kind!r}") from None
    except Exception as error:
        raise _refused(config, f"{type(error).__name__}: {error}") from error
    parts = {key.partition("_")[0] for key in known.sub_configs}
    if parts & {"text", "vision", "audio", "decoder"}:
        raise _refused(config, f"it has parts: {', '.join(sorted(known.sub_configs))}", ANOTHER)
    if known.is_encoder_decoder:
        raise _refused(config, "it is an encoder with a decoder", ANOTHER)
    return known


def _arguments(config: Any) -> frozenset[str]:
    """Return the keys that the class of a configuration takes, also under older names."""
    names = {*signature(type(config).__init__).parameters, *getattr(config, "attribute_map", {})}
    # Older names of rotary settings, which the library converts.
    return frozenset(names | {"rope_theta", "rope_scaling", "rope_parameters", "head_dim"})


def _create(config: Any) -> Any:
    """Return the library's module; parameters are where those of new modules are put."""
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    auto: Any = AutoModelForCausalLM

    with no_init_weights():
        try:
            # Its grouped products take bf16 only, and no autocast.
            library = auto.from_config(
                config,
                dtype=torch.float32,
                experts_implementation="eager",
                trust_remote_code=False,
            )
            library.get_input_embeddings()
            for module in library.modules():
                if type(module).__name__ == "FalconLinear":  # the same product, in two operators
                    module.__class__ = nn.Linear
            # Without initial values, the library does not tie by itself either.
            library.tie_weights()
        except Exception as error:
            raise _refused(config.to_dict(), f"{type(error).__name__}: {error}") from error
    return library


def _refused(
    config: Mapping[str, Any],
    why: str,
    remedy: str = "correct model.config, or install the version of transformers that has the model",
) -> ConfigError:
    kind = config.get("model_type")
    return ConfigError(
        f"dtt cannot train a model of type {kind!r} of transformers",
        where="model.config",
        why=why,
        next=remedy,
    )
