"""Sampling, one token at a time, with a cache of keys and values.

Shapes: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dtt.model.cache import KVCache
from dtt.model.decoder import Decoder


@torch.inference_mode()
def generate(
    model: Decoder,
    prompt_ids: list[int],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    stop_id: int | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[int]:
    """Yield the tokens that follow a prompt of at least one token.

    Ends after `max_new_tokens`, before `stop_id` (which is not yielded), or when prompt and output
    fill the model's context (`max_seq_len`). Temperature 0 takes the likeliest token; else the
    choice is among the `top_k` likeliest that make up the first `top_p` of the probability.
    `generator` must live on the model's device. The model is in evaluation mode meanwhile.
    """
    room = model.arch.max_seq_len - len(prompt_ids)
    weight = model.embed.weight
    cache = KVCache(model.arch, 1, model.arch.max_seq_len, weight.device, weight.dtype)
    was_training = model.training
    model.eval()
    try:
        tokens_1T = torch.tensor([prompt_ids], device=weight.device)
        for _ in range(min(max_new_tokens, room)):
            logits_V = model(tokens_1T, cache=cache)[0, -1].float()
            token = sample(logits_V, temperature, top_k, top_p, generator)
            if token == stop_id:
                return
            yield token
            tokens_1T = torch.tensor([[token]], device=weight.device)
    finally:
        model.train(was_training)


def sample(
    logits_V: Tensor,
    temperature: float,
    top_k: int | None,
    top_p: float,
    generator: torch.Generator | None,
) -> int:
    """Draw one token id; see `generate` for the options."""
    if temperature == 0:
        return int(logits_V.argmax())
    ordered_V, ids_V = (logits_V / temperature).sort(descending=True)
    if top_k is not None:
        ordered_V = ordered_V[:top_k]
    probabilities = ordered_V.softmax(dim=-1)
    if top_p < 1.0:
        before = probabilities.cumsum(dim=-1) - probabilities
        probabilities = probabilities.masked_fill(before > top_p, 0.0)
    return int(ids_V[torch.multinomial(probabilities, 1, generator=generator)])
