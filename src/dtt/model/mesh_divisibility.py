"""Divisibility checks of a model and its sequence lengths over a device mesh."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from dtt.base.errors import ConfigError
from dtt.config.model import LongRopeScaling
from dtt.config.parallel import ParallelConfig, Sizes
from dtt.config.run import RunConfig
from dtt.config.train import TrainConfig
from dtt.model.architecture import AnyArchitecture, Architecture, BuiltArchitecture


def check_layout(cfg: RunConfig, sizes: Sizes, arch: AnyArchitecture) -> None:
    """Raise ConfigError if a model cannot be laid out over the mesh as configured."""
    check_mesh(sizes, arch, cfg.train)
    check_stages(cfg.parallel, arch)
    check_experts(cfg.parallel.expert, sizes, arch)


def check_mesh(sizes: Sizes, arch: AnyArchitecture, train: TrainConfig) -> None:
    """Raise ConfigError if sizes of the model or sequence lengths are not divisible by the mesh.

    The error lists everything that is not divisible, and suggests the largest sizes of `tensor` and
    `context` that work.
    """
    if isinstance(arch, BuiltArchitecture):
        return  # the configuration refuses all layouts that divide a model
    contexts = {train.seq_len, *(tokens for _, tokens in train.context_schedule)}
    found = list(misfits(sizes, arch, contexts))
    if not found:
        return
    # The pairs are few, so all are tried. (1, 1) always fits, so `max` finds one. It prefers
    # the largest number of devices.
    smaller = product(range(1, sizes.tensor + 1), range(1, sizes.context + 1))
    fitting = [
        (tensor * context, tensor, context)
        for tensor, context in smaller
        if not any(misfits(sizes._replace(tensor=tensor, context=context), arch, contexts))
    ]
    _, tensor, context = max(fitting)
    raise ConfigError(
        "the model cannot be divided evenly over the mesh of `parallel`",
        where=", ".join(dict.fromkeys(key for key, _ in found)),
        why="; ".join(why for _, why in found),
        next=f"parallel.tensor={tensor} parallel.context={context}, with the remaining "
        f"devices in parallel.shard or parallel.replicate; or change the sizes that are "
        f"not divisible",
    )


def check_stages(config: ParallelConfig, arch: AnyArchitecture) -> None:
    """Raise ConfigError if the layers of a model do not make the stages of the pipeline."""
    if config.pipeline == 1 or isinstance(arch, BuiltArchitecture):
        return
    given, where = config.layers_per_stage, "parallel.pipeline"
    if arch.tie_embeddings:
        raise ConfigError(
            "a pipeline needs an embedding and a head with weights of their own",
            where=where,
            why="they are tied: the first stage and the last one would train the same weights",
            next="model.tie_embeddings=false, or parallel.shard instead of parallel.pipeline",
        )
    if given is not None and sum(given) != arch.n_layers:
        raise ConfigError(
            "parallel.layers_per_stage does not divide the layers of the model",
            why=f"their sum is {sum(given)}, and model.n_layers={arch.n_layers}",
            next="numbers with this sum, or null to divide them evenly",
        )
    if config.stages > arch.n_layers:
        raise ConfigError(
            "the pipeline has more stages than the model has layers",
            where=where,
            why=f"{config.stages} stages, and model.n_layers={arch.n_layers}",
            next="a smaller parallel.pipeline or parallel.stages_per_rank",
        )


def check_experts(expert: int, sizes: Sizes, arch: AnyArchitecture) -> None:
    """Raise ConfigError if `expert` ranks cannot share the experts of a mixture."""
    if expert == 1:
        return
    ranks = sizes.shard * sizes.context * sizes.tensor
    experts = 0 if arch.mixture is None else arch.mixture.experts
    whys = {
        f"{arch.family} has no experts": not experts,
        f"shard x context x tensor is {ranks}": bool(ranks % expert),
        f"model.n_experts is {experts}": bool(experts % expert),
    }
    if any(whys.values()):
        fitting = [n for n in range(1, expert) if not (ranks % n or experts % n)]
        raise ConfigError(
            f"{expert} devices cannot share the experts of the model evenly",
            where="parallel.expert",
            why="; ".join(why for why, holds in whys.items() if holds),
            next=f"parallel.expert={max(fitting) if experts else 1}",
        )


def misfits(sizes: Sizes, arch: Architecture, contexts: set[int]) -> Iterator[tuple[str, str]]:
    """Yield (config key, reason) for each value that is not divisible by its mesh dimension.

    `contexts` are sequence lengths in tokens. With context parallelism each rank has two chunks of
    a sequence, an early and a late one, to balance causal attention: lengths must be
    divisible by twice the context size.
    """
    divided = {
        "n_heads": arch.n_heads,
        "n_kv_heads": arch.n_kv_heads,
        "ffn_dim": arch.ffn_dim,
        "vocab_size": arch.vocab_size,
    }
    if arch.position == "learned":
        divided["max_seq_len"] = arch.max_seq_len
    for key, value in divided.items():
        if value % sizes.tensor:
            yield f"model.{key}", f"{key} {value} is not a multiple of tensor {sizes.tensor}"
    if isinstance(arch.rope_scaling, LongRopeScaling) and sizes.context > 1:
        # A rank sees a part of a document, so it does not know whether the document is long.
        yield "parallel.context", "longrope needs whole sequences on each rank"
    # Between the layers each tensor-parallel rank holds a slice of the tokens too.
    parts = sizes.tensor * (2 * sizes.context if sizes.context > 1 else 1)
    for tokens in sorted(contexts):
        if tokens % parts:
            named = f"2 x context {sizes.context} x tensor" if sizes.context > 1 else "tensor"
            why = f"{tokens} tokens of a sequence are not a multiple of {named} {sizes.tensor}"
            yield "train.context_schedule" if tokens < max(contexts) else "train.seq_len", why
