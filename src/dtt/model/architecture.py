"""What a decoder is made of, with nothing left open: every axis chosen, every size known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dtt.config.model import ModelConfig, NoRopeScaling, RopeScaling
from dtt.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A resolved decoder. `Decoder` is built from this alone; families make it."""

    family: str
    vocab_size: int
    max_seq_len: int
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_dim: int
    norm: Literal["layernorm", "rmsnorm", "rmsnorm_plus_one"]
    """`rmsnorm_plus_one` keeps its weight as the distance from one, as Gemma does."""
    norm_eps: float
    qk_norm: bool
    """Whether each head's queries and keys are normed, before they are rotated."""
    sandwich_norm: bool
    """Whether what attention and MLP give is normed too, before it is added."""
    position: Literal["learned", "rope"]
    rope_theta: float
    rope_scaling: RopeScaling
    rope_local_theta: float | None
    """Base in layers with a window, which then have no scaling; None: as the other layers."""
    windows: tuple[int | None, ...]
    """For each layer, how many tokens one may attend to, itself included; None: all before it."""
    mlp: Literal["gelu", "swiglu", "geglu"]
    bias: bool
    """Whether linear layers (the head excepted) have one."""
    tie_embeddings: bool
    embed_scale: float
    """Multiplies the token embeddings."""
    attn_scale: float
    """Multiplies the products of queries and keys."""
    residual_scale: float
    """Multiplies what attention and MLP add to the residual stream."""
    logit_scale: float
    """Multiplies the final hidden states, before the head."""
    logit_softcap: float | None
    """c of c * tanh(logits / c)."""
    init_std: float
    dropout: float

    def rope(self, layer: int) -> tuple[float, RopeScaling] | None:
        """Base and scaling of the rotary embedding in a layer; None with learned positions."""
        if self.position == "learned":
            return None
        if self.windows[layer] is not None and self.rope_local_theta is not None:
            return self.rope_local_theta, NoRopeScaling()
        return self.rope_theta, self.rope_scaling


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `number`."""
    return -(-number // multiple) * multiple


def fit_vocabulary(cfg: ModelConfig, tokenizer_size: int) -> int:
    """Rows of the embedding; ConfigError if the tokenizer has ids beyond them."""
    if cfg.vocab_size is None:
        return round_up(tokenizer_size, 64)
    if cfg.vocab_size < tokenizer_size:
        raise ConfigError(
            f"model.vocab_size ({cfg.vocab_size}) is smaller than the tokenizer's vocabulary"
            f" ({tokenizer_size})",
            why="token ids would lie outside the embedding",
            next="set model.vocab_size=null to take the tokenizer's, or use another tokenizer",
        )
    return cfg.vocab_size


def fit_context(cfg: ModelConfig, seq_len: int) -> int:
    """Longest context; ConfigError if training sequences would be longer."""
    if cfg.max_seq_len is None:
        return seq_len
    if cfg.max_seq_len < seq_len:
        raise ConfigError(
            f"train.seq_len ({seq_len}) is longer than model.max_seq_len ({cfg.max_seq_len})",
            next=f"set train.seq_len={cfg.max_seq_len}, or raise model.max_seq_len",
        )
    return cfg.max_seq_len
