"""Autoregressive sampling, with and without a KV cache.

Shapes: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from dtt.errors import Diverged
from dtt.model.cache import KVCache
from dtt.model.decoder import Decoder


def generate(
    model: Decoder,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    stop_id: int | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[int]:
    """Yield the tokens that continue a prompt; see `generate_batch`."""
    for _, token in generate_batch(
        model,
        [prompt_ids],
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        stop_id=stop_id,
        generators=[generator],
    ):
        yield token


@torch.inference_mode()
def generate_batch(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    stop_id: int | None = None,
    generators: Sequence[torch.Generator | None],
) -> Iterator[tuple[int, int]]:
    """Yield (index of the prompt, token) for each new token, as it is sampled.

    Prompts have at least one token. Each is continued independently of the others: until it has
    `max_new_tokens`, until `stop_id` (which is not yielded), or until it fills the model's context
    (`max_seq_len`). Temperature 0 selects the most likely token. Otherwise the token is drawn from
    the smallest set of the `top_k` most likely tokens whose probability reaches `top_p`, with the
    prompt's own generator, which must be on the model's device. The model is in evaluation mode
    until the iterator ends.

    Prompts are prefilled one by one, so that none needs padding; then each step decodes one token
    of every sequence.
    """
    context = model.arch.max_seq_len
    left = [min(max_new_tokens, context - len(prompt)) for prompt in prompts]
    going = [i for i in range(len(prompts)) if left[i] > 0]
    capacity = max((len(prompts[i]) + left[i] for i in going), default=0)
    weight = model.embed.weight
    cache = KVCache(model.arch, len(going), capacity, weight.device, weight.dtype)
    was_training = model.training
    model.eval()
    try:
        logits = [_read(model, cache, row, prompts[i]) for row, i in enumerate(going)]
        while going:
            rows, tokens = [], []
            for row, i in enumerate(going):
                token = sample(logits[row].float(), temperature, top_k, top_p, generators[i])
                if token == stop_id:
                    continue
                yield i, token
                left[i] -= 1
                if left[i] > 0:
                    rows.append(row)
                    tokens.append(token)
            if len(rows) < len(going):
                going = [going[row] for row in rows]
                cache.keep(rows)
            if going:
                tokens_B1 = torch.tensor(tokens, device=weight.device)[:, None]
                logits = list(model(tokens_B1, cache=cache)[:, -1])
    finally:
        model.train(was_training)


@torch.no_grad()  # FSDP2 reuses buffers in training, which inference tensors would forbid
def generate_uncached(
    module: nn.Module,
    multiple: int,
    agreed: Callable[[int], int],
    context: int,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    stop_id: int,
    generator: torch.Generator,
) -> Iterator[int]:
    """Yield the tokens that continue a prompt, for a model that is sharded over several ranks.

    All ranks call this together. There is no cache: each token takes a forward pass over all tokens
    before it, padded to one length that is a multiple of `multiple`, and at most `context` tokens.
    `agreed` returns one rank's token on all ranks: the last bits of their logits may differ, and
    with them the sampled token or the end of the text.
    """
    ids = list(prompt_ids)
    end = min(len(ids) + max_new_tokens, context)
    padded = torch.zeros(1, -(-end // multiple) * multiple, dtype=torch.int64)
    was_training = module.training
    module.eval()
    try:
        while len(ids) < end:
            padded[0, : len(ids)] = torch.tensor(ids)
            logits = module(padded.to(generator.device))[0, len(ids) - 1]
            token = agreed(sample(logits.float(), temperature, None, top_p, generator))
            if token == stop_id:
                return
            yield token
            ids.append(token)
    finally:
        module.train(was_training)


def _read(model: Decoder, cache: KVCache, row: int, prompt: Sequence[int]) -> Tensor:
    """Prefill one row of the cache with a prompt; return the logits [V] of the next token."""
    own = cache.row(row)
    logits: Tensor = model(torch.tensor([prompt], device=cache.device), cache=own)[0, -1]
    cache.lengths[row] = own.lengths[0]
    return logits


def sample(
    logits_V: Tensor,
    temperature: float,
    top_k: int | None,
    top_p: float,
    generator: torch.Generator | None,
) -> int:
    """Draw one token id; see `generate_batch` for the options.

    Raises Diverged if a logit is NaN or +inf.
    """
    highest = logits_V.max()
    if not highest.isfinite():  # max() is NaN if any logit is
        raise Diverged(
            "the model gives no probabilities",
            why=f"its largest logit is {highest.item()}",
            next="take weights from before training diverged: dtt export JOB --step STEP",
        )
    if temperature == 0:
        return int(logits_V.argmax())
    logits_V = (logits_V - highest) / temperature  # finite at any temperature, except for -inf
    if top_k is None and top_p == 1.0:  # sorting takes longer than drawing
        return int(torch.multinomial(logits_V.softmax(dim=-1), 1, generator=generator))
    ordered, ids = logits_V.topk(min(top_k or len(logits_V), len(logits_V)))
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    probabilities = probabilities.masked_fill(before > top_p, 0.0)
    return int(ids[torch.multinomial(probabilities, 1, generator=generator)])
