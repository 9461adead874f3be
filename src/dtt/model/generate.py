"""Autoregressive generation, in one loop for every kind of model and of use.

Prompts are prefilled together, and then each step computes a token of all of them. Each row has its
own length, random number generator and end, so a prompt gets the same tokens as it would alone.
`Decoding` (`model/decoding.py`) computes the steps: with dtt's cache (`model/kv_cache.py`), or by a
model's own `reader`. `dtt chat` decodes in the same way, with a cache that it keeps: only the
tokens after what a prompt shares with the one before are computed. Whoever reads the tokens ends a
text, so stop tokens and stop texts have one rule (`data/text/continuation.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dtt.model.contract import Model
from dtt.model.decoder import Decoder
from dtt.model.decoding import Decoding, ReaderDecoding, StaticDecoding
from dtt.model.sampling import SamplingRule, checked


def generate(
    model: Any,
    prompt_ids: Sequence[int],
    *,
    generator: torch.Generator | None = None,
    **options: Any,
) -> Generator[int]:
    """Yield the tokens that continue a prompt; see `generate_batch`."""
    with closing(generate_batch(model, [prompt_ids], generators=[generator], **options)) as tokens:
        for _, token in tokens:
            yield token


# Not `inference_mode`: FSDP2 reuses buffers in training, which inference tensors would forbid.
@torch.no_grad()
def generate_batch(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    generators: Sequence[torch.Generator | None],
    max_new_tokens: int,
    ended: Collection[int] = (),
    decoding: Decoding | None = None,
    **sampling: Any,
) -> Generator[tuple[int, int]]:
    """Yield (index of the prompt, token) for each new token, as it is sampled.

    Prompts have at least one token. Each is continued independently of the others: until it has
    `max_new_tokens`, until the caller adds its index to `ended`, as at a stop token, or until it
    fills the model's context (`max_seq_len`). `SamplingRule` describes the other options. Meanwhile
    the model is in eval mode: a `Model`, or with `decoding` also what wraps it. `decoding` may have
    memory and graphs of earlier prompts.
    """
    # The context includes the prompt. A learned position table has no row beyond it.
    context, rule = model.arch.max_seq_len, SamplingRule(**sampling)
    texts = [list(prompt) for prompt in prompts]
    remaining = [min(max_new_tokens, context - len(text)) for text in texts]
    # The longest first: prompts of about the same length are prefilled together.
    rows = sorted((i for i in range(len(texts)) if remaining[i] > 0), key=lambda i: -len(texts[i]))
    if not rows:
        return
    live, capacity = set(rows), max(len(texts[i]) + remaining[i] for i in rows)
    decoding = decoding or make_decoding(model)
    with in_eval_mode(model):
        again, started = True, False
        while live:
            if again:
                own = [generators[i] for i in rows]
                decoding.start([texts[i] for i in rows], capacity, rule, own)
            elif not started:
                decoding.step()
            read = _start_reading(decoding.tokens)
            # Started before the host knows the tokens, so that the GPU is not idle meanwhile: a
            # stop token is seen one step late, and the step after it is computed for nothing. Not
            # if no row has more than this token to come.
            further = any(remaining[i] > 1 for i in live)
            started = decoding.ahead and further and not decoding.outgrown()
            if started:
                decoding.step()
            for i, token in sorted(zip(rows, read(), strict=True)):
                if i in live:
                    # The consumer may abandon the iterator here; the mode is restored then, too.
                    yield i, checked(token)
                    texts[i].append(token)
                    remaining[i] -= 1
            live = {i for i in live if remaining[i] > 0 and i not in ended}
            again = not started and decoding.outgrown()
            # On a CPU each row costs its time. On a GPU a step takes about as long for 33 rows as
            # for 64, and each number of rows needs a graph of its own.
            few = len(rows) // 2 if decoding.ahead else len(rows) - 1
            if live and (again or len(live) <= few):
                decoding.keep([row for row, i in enumerate(rows) if i in live])
                rows = [i for i in rows if i in live]


def make_decoding(model: Any) -> Decoding:
    """Return a state for texts of a `Model`: with a KV cache if dtt knows what its layers keep."""
    if isinstance(model, Decoder):
        return StaticDecoding(model)
    return ReaderDecoding(lambda _: model.reader(), model.head_weight().device)


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
        self._decoding = make_decoding(self.model)
        self.cached_ids: list[int] = []
        """Tokens whose keys and values are cached. Appended to after a complete forward pass, so an
        exception at any point leaves a state from which the next prompt can continue."""

    def cached_prefix(self, prompt_ids: Sequence[int]) -> int:
        """Return the number of cached tokens of a prompt; the last token is always computed."""
        is_long = self.model.arch.is_long
        if is_long(len(self.cached_ids)) != is_long(len(prompt_ids)):
            return 0  # the cached keys of long texts are rotated differently
        pairs = zip(self.cached_ids, prompt_ids[:-1], strict=False)
        return next(
            (i for i, (ours, theirs) in enumerate(pairs) if ours != theirs),
            min(len(self.cached_ids), len(prompt_ids) - 1),
        )

    def generate(self, prompt_ids: Sequence[int], **options: Any) -> Generator[int]:
        """Yield the tokens that continue a prompt; see `generate` for the options.

        The caller ends the iterator at a stop token by not asking for the next one.
        """
        kept = self.cached_prefix(prompt_ids)
        self.cached_ids = self.cached_ids[:kept]
        if isinstance(self._decoding, StaticDecoding):
            self._decoding.kept = kept
        computed = list(prompt_ids[kept:])
        options["decoding"] = self._decoding
        with closing(generate(self.model, prompt_ids, **options)) as tokens:
            for token in tokens:
                # A token is drawn when all before it are computed.
                if isinstance(self._decoding, StaticDecoding):
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


@contextmanager
def in_eval_mode(module: nn.Module) -> Iterator[None]:
    """Disable dropout inside the context; afterwards, the model is in the mode it was in."""
    was_training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(was_training)


def _start_reading(x: Tensor) -> Callable[[], list[int]]:
    """Start to copy `x` to the host; return a function that waits for the copy and returns it.

    It does not wait for kernels that are started in between.
    """
    copy = x.to("cpu", non_blocking=True, copy=True)  # from a GPU: into pinned memory
    if not x.is_cuda:
        return copy.tolist
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()

    def read() -> list[int]:
        copied.synchronize()
        return copy.tolist()

    return read
