"""The state of texts that are continued together, and the step that computes their next tokens.

On a GPU the step is a CUDA graph: its hundreds of kernels are launched as one.

Shapes: B texts, V vocabulary, W random numbers of a token.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dtt.base.log import log
from dtt.model.architecture import Architecture
from dtt.model.attention_backend import attention_within, by_window
from dtt.model.kv_cache import CachedAttention, KVCache, Prefill, asynchronous, cached_mask
from dtt.model.sampling import SamplingRule, fill_noise
from dtt.model.sdpa import kernels
from dtt.model.token_context import GivenContext

CHUNK = 1024
"""Number of tokens that are prefilled at once behind cached ones, to bound their mask."""
PREFILL_TOKENS = 8192
"""Number of tokens that prompts are prefilled in together, to bound their activations."""

Generators = Sequence[torch.Generator | None]
Reader = Callable[[Tensor], Tensor]
"""A function that reads the next tokens of a text, [T]: the logits [V] after them."""
Step = Callable[[], None]

_capturing = threading.Lock()
"""One thread captures at a time: the answers of `dtt chat --web` have a thread each."""


class StepGraphs:
    """Steps by their key, captured on a GPU at their second run and replayed from then on.

    A step may read and write tensors only in place, and its key must determine all else that it
    does. Its first run is eager: libraries allocate and compile what must not be captured, and one
    token more does not pay for a graph.
    """

    def __init__(self, device: torch.device) -> None:
        """Capture steps on `device`; without a GPU, run them."""
        # Fake tensors say cuda without a GPU.
        self.captures = device.type == "cuda" and torch.cuda.is_available()
        self._replays: dict[Hashable, Step | None] = {}
        self._pool: Any = None

    def run(self, key: Hashable, step: Step) -> None:
        """Run a step, which does the same as the one that had this key before."""
        if not self.captures or key not in self._replays:
            self._replays[key] = None
            step()
            return
        replay = self._replays[key]
        if replay is None:
            replay = self._replays[key] = self.captured(step)
        replay()

    def captured(self, step: Step) -> Step:
        """Return a function that does what a step does, which has not run yet."""
        # Other threads may allocate and launch meanwhile. Graphs of one cache are never replayed at
        # the same time, so they share the memory of their activations.
        how: dict[str, Any] = {"pool": self._pool, "capture_error_mode": "thread_local"}
        try:
            graph = torch.cuda.CUDAGraph()
            with _capturing, torch.cuda.graph(graph, **how):
                step()
        except RuntimeError as error:
            # A layer that waits for the host, as one of a user's own may.
            log.warning(
                "each token is launched kernel by kernel: a CUDA graph cannot hold a step (%s)",
                str(error).partition("\n")[0],
            )
            self.captures = False
            return step
        self._pool = graph.pool()
        return graph.replay

    def clear(self) -> None:
        """Forget all steps: their tensors have been replaced."""
        self._replays.clear()


class StaticDecoding:
    """Decoding with a cache in memory allocated once, by a step on fixed shapes.

    On a GPU the step, with the choice of the token, becomes a CUDA graph: the host would need 15 ms
    to launch the kernels of a token of 1B weights, which take 1 ms. All that changes from token to
    token (tokens, lengths, random numbers) is in tensors that are updated in place. On a CPU the
    same step runs eagerly.
    """

    def __init__(self, model: Any) -> None:
        """Decode with a `Decoder` in evaluation mode."""
        self._model, self._device = model, model.head_weight().device
        self._graphs = StepGraphs(self._device)
        self._whole: KVCache | None = None
        self._cache: Any = None  # of the rows: a part of the whole one, which later texts use again
        self._tokens = self._noise = torch.empty(0)
        self._rule = SamplingRule()
        self._own: Generators = ()
        self.kept = 0
        """Number of tokens of the next text, started alone, that the cache already has."""
        self.ahead = asynchronous(self._device)
        """True if the next step is started before the host has read the tokens of the last one."""

    @torch.inference_mode()
    def start(
        self, texts: Sequence[Sequence[int]], capacity: int, rule: SamplingRule, own: Generators
    ) -> None:
        """Compute texts, the longest first, from their beginning, and choose their next tokens.

        A text may grow to `capacity` tokens. Each has its random generator in `own`.
        """
        self._rule, self._own = rule, own
        kept, self.kept = self.kept, 0
        lengths, cache = list(map(len, texts)), self._reserve(len(texts), capacity)
        # Shortening is enough: what lies behind the lengths is overwritten, and masked until then.
        cache.set_lengths([kept] * len(texts))
        if kept:
            logits_BV = self._extended(texts[0][kept:])
        else:
            groups = prompt_groups(lengths, self._model.arch.is_long)
            logits_BV = torch.cat([self._prefilled(texts[at], cache.rows(at)) for at in groups])
        cache.set_lengths(lengths)
        self.tokens.copy_(rule.pick(logits_BV, self._draw()))

    @torch.inference_mode()
    def step(self) -> None:
        """Append the last tokens, and choose the next ones."""
        cache, rule, tokens_B, noise_BW = self._cache, self._rule, self.tokens, self._draw()

        def compute() -> None:
            # NAN and INFINITE are no ids: to embed them would end the CUDA context.
            logits_BV = self._computed(tokens_B[:, None].clamp(min=0))
            # Sequences that have ended are computed with the others, and must not leave the memory.
            cache.lengths_B.add_(1).clamp_(max=cache.last)
            tokens_B.copy_(rule.pick(logits_BV, noise_BW))

        read = (cache.places(window, 1) for window in dict.fromkeys(self._model.arch.windows))
        ranges = tuple((places.start, places.stop) for places in read)
        self._graphs.run((len(tokens_B), ranges, rule), compute)
        cache.advance()

    @torch.inference_mode()
    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows except these, which ascend."""
        self.tokens[: len(rows)] = self.tokens[rows]
        self._own = [self._own[row] for row in rows]
        self._cache.keep(rows)

    def outgrown(self) -> bool:
        """Return True if LongRoPE rotates one of the texts differently from its next token on.

        Then they must be started again.
        """
        is_long = self._model.arch.is_long
        return any(is_long(n + 1) and not is_long(n) for n in self._cache.lengths if n > 0)

    @property
    def tokens(self) -> Tensor:
        """The last token of each row, or NAN or INFINITE, [B]; the next step overwrites it."""
        return self._tokens[: len(self._cache.lengths)]

    def _reserve(self, rows: int, capacity: int) -> KVCache:
        """Return a cache for these texts, in the memory of earlier ones if that suffices."""
        whole = self._whole
        if whole is None or len(whole.lengths) < rows:
            self._whole = self._cache = None  # freed before more is allocated
            dtype = self._model.embed.weight.dtype
            whole = self._whole = KVCache(self._model.arch, rows, capacity, self._device, dtype)
            self._tokens = torch.zeros(rows, dtype=torch.int64, device=self._device)
            self._graphs.clear()
        elif whole.capacity < capacity:
            whole.reserve(capacity)
            self._graphs.clear()
        self._cache = cache = whole.rows(slice(0, rows))
        return cache

    def _draw(self) -> Tensor:
        """Return new random numbers for each row, [B, W], in the same memory each time."""
        shape = len(self._tokens), self._rule.width(self._model.arch.vocab_size)
        if self._noise.shape != shape:
            self._noise = torch.empty(shape, device=self._device)
            self._graphs.clear()
        # Drawn outside of the graph: one generator a row, which no graph has to know.
        return fill_noise(self._noise[: len(self._own)], self._own)

    def _prefilled(self, texts: Sequence[Sequence[int]], rows: KVCache) -> Tensor:
        """Compute prompts together; return the logits of their next tokens, [B, V]."""
        padded = [[*text, *[0] * (len(texts[0]) - len(text))] for text in texts]
        tokens_BT = torch.tensor(padded, device=self._device)
        last_B = torch.tensor([len(text) - 1 for text in texts], device=self._device)
        context = prompt_context(self._model.arch, tokens_BT, last_B, rows)
        logits_BV: Tensor = self._model(tokens_BT, context=context)[:, -1]
        return logits_BV

    def _extended(self, new: Sequence[int]) -> Tensor:
        """Compute tokens behind the cached ones of the only row; return the next logits, [1, V]."""
        cache, logits_1V = self._cache, torch.empty(0)
        for tokens_1T in torch.split(torch.tensor([new], device=self._device), CHUNK, dim=1):
            logits_1V = self._computed(tokens_1T)
            cache.set_lengths([cache.lengths[0] + tokens_1T.shape[1]])
        return logits_1V

    def _computed(self, tokens_BT: Tensor) -> Tensor:
        """Compute tokens that follow those in the cache; return the next logits, [B, V]."""
        context = following_context(self._model.arch, tokens_BT, self._cache)
        logits_BV: Tensor = self._model(tokens_BT, context=context)[:, -1]
        return logits_BV


def prompt_context(
    arch: Architecture, tokens_BT: Tensor, last_B: Tensor, cache: KVCache
) -> GivenContext:
    """Return the place of prompts that an empty cache keeps; `last_B` are their last positions.

    Each is padded behind its last token, so that the token at position p of any prompt is at place
    p of the cache, and so that causal attention needs no mask: no token attends to the padding, and
    what the cache keeps of it is overwritten before it is read. Padding in front would need a mask
    in every layer, which the fastest kernels do not take, and positions that differ from places.
    """
    positions_1T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)[None]
    # In the dtype of the weights, which a kernel chosen for training may not take.
    allowed = kernels(tokens_BT.device, "auto", training=False)
    whole = by_window(
        arch.windows, lambda w: attention_within(arch.attn_scale, w, tokens_BT, None, allowed)
    )
    attention_fns = [Prefill(*cache.layer(i), attend) for i, attend in enumerate(whole)]
    return GivenContext(tokens_BT, positions_1T, attention_fns, last_B)


def following_context(arch: Architecture, tokens_BT: Tensor, cache: KVCache) -> GivenContext:
    """Return the place of tokens that follow those in a cache, which keeps them too."""
    count = tokens_BT.shape[1]
    positions_BT, new = cache.positions(count), cache.new_places(count)
    if new is None:
        # Indexing pairs each row with its own positions, on the device.
        rows_B1 = torch.arange(len(positions_BT), device=cache.device)[:, None]
        index: tuple[Any, ...] = rows_B1, slice(None), positions_BT
    else:
        index = slice(None), slice(None), new

    def limits(window: int | None) -> tuple[slice, Tensor | None]:
        places = cache.places(window, count)
        return places, cached_mask(cache, window, places, positions_BT)

    # All layers with one window share the mask; each has its own keys and values.
    attention_fns = [
        CachedAttention(*cache.layer(i), arch.attn_scale, index, *of_window)
        for i, of_window in enumerate(by_window(arch.windows, limits))
    ]
    return GivenContext(tokens_BT, positions_BT, attention_fns, "last")


def prompt_groups(lengths: Sequence[int], is_long: Callable[[int], bool]) -> Iterator[slice]:
    """Yield the prompts to prefill together, of lengths that descend.

    Prompts of at least half the length of the longest are padded to it: at most half of a pass is
    padding, and for short ones reading the weights costs more than that.
    """
    start = 0
    for end in range(1, len(lengths) + 1):
        if end < len(lengths):
            longest, following = lengths[start], lengths[end]
            fits = (end + 1 - start) * longest <= PREFILL_TOKENS
            # LongRoPE rotates by the length, and padding would be a part of that.
            if fits and 2 * following >= longest and is_long(longest) == is_long(following):
                continue
        yield slice(start, end)
        start = end


class ReaderDecoding:
    """Decoding of texts one by one, by readers; its methods are those of `StaticDecoding`.

    For models with layers that dtt does not know, and for those whose weights are divided over
    ranks. All ranks then call this together.
    """

    ahead = False

    def __init__(
        self,
        reader: Callable[[int], Reader],
        device: torch.device,
        broadcast: Callable[[list[int]], list[int]] = list,
    ) -> None:
        """Decode with what `reader(capacity)` returns for each text.

        `broadcast` returns one rank's tokens on all ranks: the last bits of their logits may
        differ, and with them the tokens.
        """
        self._reader, self._device, self._broadcast = reader, device, broadcast
        self._texts: list[tuple[Reader, Sequence[int], torch.Generator | None]] = []

    def start(
        self, texts: Sequence[Sequence[int]], capacity: int, rule: SamplingRule, own: Generators
    ) -> None:
        """Read texts and choose their next tokens."""
        self._rule = rule
        readers = [self._reader(capacity) for _ in texts]
        self._texts = list(zip(readers, texts, own, strict=True))
        self.step()

    def step(self) -> None:
        """Read what is new of each text, and choose the next tokens."""
        readers, new, own = zip(*self._texts, strict=True)
        tokens = [torch.tensor(ids, device=self._device) for ids in new]
        logits_BV = torch.stack([read(ids) for read, ids in zip(readers, tokens, strict=True)])
        noise_BW = logits_BV.new_empty(len(new), self._rule.width(logits_BV.shape[1])).float()
        tokens_B = self._rule.pick(logits_BV, fill_noise(noise_BW, own))
        # A collective, as the passes are: all ranks call it in the same iteration.
        chosen = [[token] for token in self._broadcast(tokens_B.tolist())]
        self._texts = list(zip(readers, chosen, own, strict=True))

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows except these."""
        self._texts = [self._texts[row] for row in rows]

    def outgrown(self) -> bool:
        """Return False: readers keep what stays true."""
        return False

    @property
    def tokens(self) -> Tensor:
        """The last token of each row, [B]."""
        return torch.tensor([new[-1] for _, new, _ in self._texts])


Decoding = StaticDecoding | ReaderDecoding


def whole_passes(
    module: nn.Module, multiple: int, broadcast: Callable[[list[int]], list[int]]
) -> ReaderDecoding:
    """Return a state for texts of a sharded model, of which each token takes a whole pass.

    All passes have one length, the capacity of a text padded to a multiple of `multiple`: a
    compiled model compiles once.
    """
    device = next(module.parameters()).device

    def reader(capacity: int) -> Reader:
        shape = 1, -(-capacity // multiple) * multiple
        padded_1T, length = torch.zeros(shape, dtype=torch.int64, device=device), 0

        def read(tokens_T: Tensor) -> Tensor:
            nonlocal length
            padded_1T[0, length : length + len(tokens_T)] = tokens_T
            length += len(tokens_T)
            # Zeros behind a token do not change its logits, because attention is causal.
            logits_V: Tensor = module(padded_1T)[0, length - 1]
            return logits_V

        return read

    return ReaderDecoding(reader, device, broadcast)
