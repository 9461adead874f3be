"""Autoregressive sampling, with and without a KV cache.

Shapes: V vocabulary.

`model/generate.py` prefills the KV cache (`model/kv_cache.py`) prompt by prompt, so no prompt is
padded, and then decodes one token for all prompts at a time. Each row has its own length, random
number generator and end: a prompt gets the same tokens as it would alone. Layers with a window
cache all keys and attend to those within the window. `dtt chat` decodes in the same way, with a
cache that it keeps: only the tokens after what a prompt shares with the one before are computed.
Whoever reads the tokens ends a text, so stop tokens and stop texts have one rule
(`data/text/continuation.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dtt.base.errors import Diverged
from dtt.model.architecture import Architecture
from dtt.model.contract import Model
from dtt.model.decoder import Decoder
from dtt.model.kv_cache import KVCache
from dtt.model.token_context import CachedContext

CHUNK = 1024
"""Number of tokens that are prefilled at once behind cached ones, to bound their mask."""


def generate(
    model: Model,
    prompt_ids: Sequence[int],
    *,
    generator: torch.Generator | None = None,
    **options: Any,
) -> Generator[int]:
    """Yield the tokens that continue a prompt; see `generate_batch`."""
    with closing(generate_batch(model, [prompt_ids], generators=[generator], **options)) as tokens:
        for _, token in tokens:
            yield token


def generate_batch(
    model: Model,
    prompts: Sequence[Sequence[int]],
    *,
    generators: Sequence[torch.Generator | None],
    ended: Collection[int] = (),
    cache: KVCache | None = None,
    **options: Any,
) -> Generator[tuple[int, int]]:
    """Yield (index of the prompt, token) for each new token, as it is sampled.

    Prompts have at least one token. Each is continued independently of the others: until it has
    `max_new_tokens`, until the caller adds its index to `ended`, as at a stop token, or until it
    fills the model's context (`max_seq_len`). `draw` describes the other options. Meanwhile the
    model is in eval mode. A `cache` for all prompts may contain their beginnings; one whose layers
    dtt does not know continues them one by one, by its own `reader`.
    """
    if isinstance(model, Decoder):
        yield from _generate_cached(model, prompts, generators, ended, cache, **options)
        return
    for i, prompt in enumerate(prompts):
        with closing(_generate_read(model, prompt, generators[i], **options)) as tokens:
            for token in tokens:
                yield i, token
                if i in ended:
                    break


@torch.inference_mode()
def _generate_read(
    model: Model,
    prompt_ids: Sequence[int],
    generator: torch.Generator | None,
    max_new_tokens: int,
    **sampling: Any,
) -> Generator[int]:
    """Yield the tokens that continue one prompt, by the model's `reader`."""
    new, device = list(prompt_ids), model.head_weight().device
    with in_eval_mode(model):
        read = model.reader()
        for _ in range(min(max_new_tokens, model.arch.max_seq_len - len(prompt_ids))):
            token = sample(read(torch.tensor(new, device=device)), generator, **sampling)
            yield token
            new = [token]


@torch.inference_mode()
def _generate_cached(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    generators: Sequence[torch.Generator | None],
    ended: Collection[int],
    cache: KVCache | None,
    max_new_tokens: int,
    **sampling: Any,
) -> Generator[tuple[int, int]]:
    """Yield what `generate_batch` does, in one forward pass a token for all prompts together."""
    # The context includes the prompt. A learned position table has no row beyond it.
    texts, arch, weight = [list(prompt) for prompt in prompts], model.arch, model.embed.weight
    remaining = [min(max_new_tokens, arch.max_seq_len - len(text)) for text in texts]
    active = [i for i in range(len(texts)) if remaining[i] > 0]
    capacity = max((len(texts[i]) + remaining[i] for i in active), default=0)
    cache = cache or KVCache(arch, len(active), capacity, weight.device, weight.dtype)
    with in_eval_mode(model):
        logits_BV = _prefill(model, cache, [texts[i] for i in active]) if active else weight
        while active:
            drawn_B = draw(logits_BV, [generators[i] for i in active], **sampling)
            read = _start_reading(drawn_B)
            # A row with its last token leaves now, before a forward pass that would be for nothing.
            rows = [row for row, i in enumerate(active) if remaining[i] > 1]
            # Started before the host knows the tokens, so that the GPU is not idle meanwhile. A row
            # that stops costs one pass too many.
            ahead = bool(rows) and _asynchronous(weight.device) and not _become_long(arch, cache)
            following_BV = _decode(model, cache, drawn_B, rows) if ahead else None
            going = []
            for row, (i, token) in enumerate(zip(active, read(), strict=True)):
                if token == NOT_FINITE:
                    raise _diverged(logits_BV[row])
                # The consumer may abandon the iterator here; the mode is restored then, too.
                yield i, token
                texts[i].append(token)
                remaining[i] -= 1
                if remaining[i] > 0 and i not in ended:
                    going.append(row)
            active = [active[row] for row in going]
            if not active:
                return  # and leave the rows of a caller's cache
            if following_BV is not None:
                logits_BV = _keep(following_BV, cache, [rows.index(row) for row in going])
            elif _become_long(arch, cache):
                cache.keep(going)
                logits_BV = _prefill(model, cache, [texts[i] for i in active])
            else:
                logits_BV = _decode(model, cache, drawn_B, going)


class PrefixCachedGenerator:
    """Generation from successive prompts, which computes only tokens after their common prefix.

    Of a model that dtt's decoder does not compute, it computes all tokens for each.

    The turns of a conversation are such prompts: each begins with the previous prompt and answer.
    """

    def __init__(self, model: Model) -> None:
        """Generate with `model`, which stays in evaluation mode."""
        # Several threads may share the model, so no one of them may change its mode.
        self.model = model.eval()
        self.device = model.head_weight().device
        self.cache: KVCache | None = None
        if isinstance(model, Decoder):
            self.cache = KVCache(model.arch, 1, 0, self.device, model.embed.weight.dtype)
        self.cached_ids: list[int] = []
        """Tokens whose keys and values are cached. Appended to after a complete forward pass, so an
        exception at any point leaves a state from which the next prompt can continue."""

    def cached_prefix(self, prompt_ids: Sequence[int]) -> int:
        """Return the number of cached tokens of a prompt; the last token is always computed."""
        if self.cache is None:
            return 0
        is_long = self.model.arch.is_long
        if is_long(len(self.cached_ids)) != is_long(len(prompt_ids)):
            return 0  # the cached keys of long texts are rotated differently
        pairs = zip(self.cached_ids, prompt_ids[:-1], strict=False)
        return next(
            (i for i, (ours, theirs) in enumerate(pairs) if ours != theirs),
            min(len(self.cached_ids), len(prompt_ids) - 1),
        )

    def generate(
        self, prompt_ids: Sequence[int], *, max_new_tokens: int, **options: Any
    ) -> Generator[int]:
        """Yield the tokens that continue a prompt; see `generate` for the options.

        The caller ends the iterator at a stop token by not asking for the next one.
        """
        if self.cache is None:
            yield from generate(self.model, prompt_ids, max_new_tokens=max_new_tokens, **options)
            return
        kept = self.cached_prefix(prompt_ids)
        capacity = min(len(prompt_ids) + max_new_tokens, self.model.arch.max_seq_len)
        if capacity > self.cache.memory.shape[4]:
            self.cache.reserve(capacity)
        # Shortening the length is enough: what lies behind it is overwritten, and masked until
        # then.
        self.cached_ids, self.cache.lengths = self.cached_ids[:kept], [kept]
        computed = list(prompt_ids[kept:])
        options |= {"max_new_tokens": max_new_tokens, "cache": self.cache}
        with closing(generate(self.model, prompt_ids, **options)) as tokens:
            for token in tokens:
                # A token is drawn when all before it are computed.
                self.cached_ids += computed
                computed = [token]
                yield token


class GeneratorPool:
    """Generators for several threads, used like a single PrefixCachedGenerator.

    Each prompt gets the idle generator that has cached the longest prefix of it, so the turns of
    one conversation find their cache again although others are answered in between.
    """

    def __init__(self, model: Model, size: int) -> None:
        """Generate at most `size` continuations at once: each has a KV cache of its own."""
        self.model, self.device = model, model.head_weight().device
        self._idle = [PrefixCachedGenerator(model) for _ in range(size)]
        self._free = threading.Semaphore(size)
        self._lock = threading.Lock()

    def cached_prefix(self, prompt_ids: Sequence[int]) -> int:
        """Return the number of tokens of a prompt that an idle generator has cached."""
        with self._lock:
            return max((idle.cached_prefix(prompt_ids) for idle in self._idle), default=0)

    def generate(self, prompt_ids: Sequence[int], **options: Any) -> Generator[int]:
        """Yield the tokens that continue a prompt, after a wait if no generator is idle."""
        with self._free:
            with self._lock:
                chosen = max(self._idle, key=lambda idle: idle.cached_prefix(prompt_ids))
                self._idle.remove(chosen)
            try:
                with closing(chosen.generate(prompt_ids, **options)) as tokens:
                    yield from tokens
            finally:
                with self._lock:
                    self._idle.append(chosen)


@torch.no_grad()  # FSDP2 reuses buffers in training, which inference tensors would forbid
def generate_uncached(
    module: nn.Module,
    multiple: int,
    broadcast: Callable[[int], int],
    context: int,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    generator: torch.Generator | None,
    **sampling: Any,
) -> Generator[int]:
    """Yield the tokens that continue a prompt, for a model that is sharded over several ranks.

    All ranks call this together. There is no cache: each token takes a forward pass over all tokens
    before it, padded to one length that is a multiple of `multiple`, and at most `context` tokens.
    `broadcast` returns one rank's token on all ranks: the last bits of their logits may differ, and
    with them the sampled token or the end of the text.
    """
    ids = list(prompt_ids)
    end = min(len(ids) + max_new_tokens, context)
    # One shape for the whole text: a compiled model compiles once. Zeros after a token do not
    # change its logits, because attention is causal.
    padded = torch.zeros(1, -(-end // multiple) * multiple, dtype=torch.int64)
    device = next(module.parameters()).device
    with in_eval_mode(module):
        while len(ids) < end:
            padded[0, : len(ids)] = torch.tensor(ids)
            logits = module(padded.to(device))[0, len(ids) - 1]
            # All ranks must call this in the same iteration: it is a collective, and so is the
            # forward pass.
            token = broadcast(sample(logits, generator, **sampling))
            yield token
            ids.append(token)


@contextmanager
def in_eval_mode(module: nn.Module) -> Iterator[None]:
    """Disable dropout inside the context; afterwards, the model is in the mode it was in."""
    was_training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(was_training)


def _prefill(model: Decoder, cache: KVCache, texts: Sequence[Sequence[int]]) -> Tensor:
    """Compute what the cache lacks of each row's text; return the logits [B, V] of the next tokens.

    One by one, so that no prompt needs padding. A text of LongRoPE that becomes long is computed
    again, because its cached keys change.
    """
    logits = []
    for row, text in enumerate(texts):
        # Shares the memory of the batch, so that keys and values are written to their place.
        one = cache.row(row)
        if model.arch.becomes_long(one.lengths[0], len(text) - one.lengths[0]):
            one.lengths = [0]
        # A prompt without cached tokens needs no mask, at any length. Behind cached ones it needs a
        # mask [CHUNK, S].
        size = CHUNK if one.lengths[0] else len(text)
        parts = [text[i : i + size] for i in range(one.lengths[0], len(text), size)]
        passes = [_cached(model, torch.tensor([part], device=cache.device), one) for part in parts]
        logits.append(passes[-1][0, -1])
        cache.lengths[row] = one.lengths[0]
    return torch.stack(logits)


def _become_long(arch: Architecture, cache: KVCache) -> bool:
    """Return True if one more token makes a text in the cache a long one: see `becomes_long`."""
    return any(arch.becomes_long(length, 1) for length in cache.lengths)


def _decode(model: Decoder, cache: KVCache, tokens_B: Tensor, rows: Sequence[int]) -> Tensor:
    """Compute one more token of `rows`, which stay in the cache; return their logits [B, V]."""
    if len(rows) < len(tokens_B):
        cache.keep(rows)
        tokens_B = tokens_B[rows]
    # NOT_FINITE is no id: embedding it would end the CUDA context before the host can report it.
    return _cached(model, tokens_B[:, None].clamp(min=0), cache)[:, -1]


def _cached(model: Decoder, tokens_BT: Tensor, cache: KVCache) -> Tensor:
    """Append tokens to the cache; return the logits [B, 1, V] after the last one of each row."""
    logits_B1V: Tensor = model(tokens_BT, context=CachedContext(tokens_BT, cache))
    return logits_B1V


def _keep(logits_BV: Tensor, cache: KVCache, rows: Sequence[int]) -> Tensor:
    """Drop all rows except `rows` from the cache; return their logits [B, V]."""
    if len(rows) == len(logits_BV):
        return logits_BV
    cache.keep(rows)
    return logits_BV[rows]


def _asynchronous(device: torch.device) -> bool:
    """Return True if the host may continue while the device computes."""
    return device.type == "cuda"


def _start_reading(x: Tensor) -> Callable[[], list[int]]:
    """Start to copy `x` to the host; return a function that waits for the copy and returns it.

    It does not wait for kernels that are started in between.
    """
    copy = x.to("cpu", non_blocking=True)  # from a GPU: into pinned memory
    if not x.is_cuda:
        return copy.tolist
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()

    def read() -> list[int]:
        copied.synchronize()
        return copy.tolist()

    return read


NOT_FINITE = -1
"""What `draw` returns in place of a token if a logit is NaN or +inf."""


def draw(
    logits_BV: Tensor,
    generators: Sequence[torch.Generator | None],
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
) -> Tensor:
    """Draw a token id for each row, [B], or NOT_FINITE.

    Temperature 0 selects the most likely token. Otherwise the token is drawn from the smallest set
    of the `top_k` most likely tokens whose probability reaches `top_p`, with the row's generator.
    Nothing here waits for the device. Each row has its own generator, so that its text does not
    depend on the other rows.
    """
    logits_BV = logits_BV.float()
    highest_B1 = logits_BV.amax(dim=-1, keepdim=True)
    finite_B1 = highest_B1.isfinite()  # the maximum is NaN if any logit is
    if temperature == 0:
        token_B1 = logits_BV.argmax(dim=-1, keepdim=True)
    else:
        # Finite at any temperature, except for -inf. On a GPU, multinomial answers NaN with a
        # device-side assertion, after which CUDA is unusable.
        logits_BV = ((logits_BV - highest_B1) / temperature).where(finite_B1, 0.0)
        ids_BV = None
        if top_k is not None or top_p < 1.0:  # sorting takes longer than drawing
            vocabulary = logits_BV.shape[-1]
            logits_BV, ids_BV = logits_BV.topk(min(top_k or vocabulary, vocabulary))
        weights_BV = logits_BV.softmax(dim=-1)
        if ids_BV is not None:
            # A token is dropped if those before it reach top_p; the most likely one never is. Of
            # the sums themselves: `sum - weight` is not the sum before it, as floats round.
            reached_BV = weights_BV.cumsum(dim=-1)[:, :-1] >= top_p
            weights_BV[:, 1:] = weights_BV[:, 1:].masked_fill(reached_BV, 0.0)
        # multinomial scales the weights to a sum of 1 by itself.
        rows = zip(weights_BV, generators, strict=True)
        token_B1 = torch.stack([torch.multinomial(row, 1, generator=own) for row, own in rows])
        if ids_BV is not None:
            token_B1 = ids_BV.gather(1, token_B1)
    return token_B1.where(finite_B1, NOT_FINITE)[:, 0]


def sample(logits_V: Tensor, generator: torch.Generator | None, **sampling: Any) -> int:
    """Draw one token id, and wait for it; see `draw` for the options.

    Raises Diverged if a logit is NaN or +inf.
    """
    token = int(draw(logits_V[None], [generator], **sampling))
    if token == NOT_FINITE:
        raise _diverged(logits_V)
    return token


def _diverged(logits_V: Tensor) -> Diverged:
    return Diverged(
        "the model's logits are not finite",
        why=f"its largest logit is {logits_V.max().item()}",
        next="use weights from before training diverged: dtt export JOB@STEP",
    )
