from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from support.tiny_architectures import tiny_architecture
from torch import Tensor

from dtt.base.errors import Diverged
from dtt.config.model import LongRopeScaling, ModelConfig
from dtt.model import families
from dtt.model.decoder import Decoder
from dtt.model.decoding import (
    StaticDecoding,
    Step,
    StepGraphs,
    following_context,
    prompt_context,
    prompt_groups,
)
from dtt.model.generate import PrefixCachedGenerator, generate, generate_batch
from dtt.model.init import initialize
from dtt.model.kv_cache import KVCache
from dtt.model.sampling import SamplingRule, checked, fill_noise

PROMPT = [5, 17, 3, 88]
PROMPTS = [PROMPT, [41], [9] * 20, [7, 2, 64, 30, 12, 99, 1, 8, 70]]
"""Longer and shorter than the windows of the tiny architectures; one leaves room for 4 tokens."""


@pytest.fixture(params=["gpt2", "llama-grouped-tied", "qwen2", "phi3", "gemma3"])
def model(request: pytest.FixtureRequest) -> Decoder:
    """Learned positions, all keys, windows, partial rotation, and windows in some layers."""
    model = Decoder(tiny_architecture(request.param))
    initialize(model, seed=3)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4)  # so that the likeliest token depends on more than the last one
    return model


def test_greedy_with_cache_equals_the_likeliest_token_of_a_full_pass(model: Decoder) -> None:
    ids = list(PROMPT)
    for token in generate(model, PROMPT, max_new_tokens=12, temperature=0):
        assert token == int(model(torch.tensor([ids]))[0, -1].argmax())
        ids.append(token)
    assert len(ids) == len(PROMPT) + 12
    assert len(set(ids)) > 3


def cached(model: Decoder, tokens: Tensor, cache: KVCache) -> Tensor:
    logits: Tensor = model(tokens, context=following_context(model.arch, tokens, cache))
    cache.set_lengths([length + tokens.shape[1] for length in cache.lengths])
    return logits


def sample(logits_V: Tensor, generator: torch.Generator | None, **sampling: Any) -> int:
    rule = SamplingRule(**sampling)
    noise = torch.empty(1, rule.width(len(logits_V)))
    return checked(int(rule.pick(logits_V[None], fill_noise(noise, [generator]))))


@torch.no_grad()
def test_sampling_with_cache_equals_sampling_without(model: Decoder) -> None:
    def draw(generator: torch.Generator) -> list[int]:
        ids = list(PROMPT)
        for _ in range(12):
            how = {"temperature": 0.9, "top_k": 20, "top_p": 0.95}
            ids.append(sample(model(torch.tensor([ids]))[0, -1], generator, **how))
        return ids[len(PROMPT) :]

    cached = generate(
        model,
        PROMPT,
        max_new_tokens=12,
        temperature=0.9,
        top_k=20,
        top_p=0.95,
        generator=torch.Generator().manual_seed(1),
    )
    assert list(cached) == draw(torch.Generator().manual_seed(1))


def test_it_stops_when_the_context_is_full(model: Decoder) -> None:
    tokens = list(generate(model, PROMPT, max_new_tokens=1000, temperature=0))
    assert len(PROMPT) + len(tokens) == model.arch.max_seq_len


def test_it_leaves_the_model_in_the_mode_it_found(model: Decoder) -> None:
    model.train()
    next(generate(model, PROMPT, max_new_tokens=1))
    assert list(generate(model, PROMPT, max_new_tokens=1))
    assert model.training


@torch.no_grad()
@pytest.mark.parametrize("pieces", [(6, *[1] * 14), (6, 9, 5), (1, 2, 17), (20,), (3, 1, 1, 15)])
def test_logits_do_not_depend_on_how_a_prompt_is_divided(
    model: Decoder, pieces: tuple[int, ...]
) -> None:
    tokens = torch.randint(model.arch.vocab_size, (2, 20))
    full = model(tokens)
    cache = KVCache(model.arch, 2, 20, tokens.device, torch.float32)
    for part in tokens.split(pieces, dim=1):
        logits = cached(model, part, cache)
        position = cache.lengths[0] - 1
        torch.testing.assert_close(logits[:, 0], full[:, position], rtol=1e-4, atol=1e-4)
    assert cache.lengths == [20, 20]


@torch.no_grad()
def test_prompts_prefilled_together_have_the_logits_of_each_alone(model: Decoder) -> None:
    """Exact to the rounding of fp32, in the prefill and for several tokens behind it."""
    prompts = sorted(PROMPTS, key=len, reverse=True)
    ids = torch.tensor([prompt + [0] * (20 - len(prompt)) for prompt in prompts])
    cache = KVCache(model.arch, len(ids), 24, ids.device, torch.float32)
    last = torch.tensor([len(prompt) - 1 for prompt in prompts])
    together = model(ids, context=prompt_context(model.arch, ids, last, cache))[:, 0]
    cache.set_lengths([len(prompt) for prompt in prompts])
    further = cached(model, torch.tensor([[8, 1, 30]]).expand(len(ids), 3), cache)[:, 0]
    for row, prompt in enumerate(prompts):
        alone = model(torch.tensor([prompt]))[0, -1]
        torch.testing.assert_close(together[row], alone, rtol=1e-5, atol=1e-5)
        longer = model(torch.tensor([[*prompt, 8, 1, 30]]))[0, -1]
        torch.testing.assert_close(further[row], longer, rtol=1e-4, atol=1e-4)


def test_prompts_of_similar_lengths_are_prefilled_together() -> None:
    def groups(*lengths: int) -> list[list[int]]:
        found = prompt_groups(lengths, lambda length: length > 50)
        return [list(lengths[rows]) for rows in found]

    assert groups(9, 9, 5, 4, 4, 2, 1) == [[9, 9, 5], [4, 4, 2], [1]]
    assert groups(60, 51, 50, 40) == [[60, 51], [50, 40]]  # short and long texts of LongRoPE
    assert groups(5000, 4000, 3000) == [[5000], [4000, 3000]]  # at most 8,192 tokens a pass


class CountingDecoder(Decoder):
    """Records the number of tokens of each forward pass."""

    def forward(self, tokens_BT: torch.Tensor, *given: Any, **options: Any) -> torch.Tensor:
        self.computed.append(tokens_BT.shape[1])
        return super().forward(tokens_BT, *given, **options)


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("chunk", [1024, 2])
def test_successive_prompts_give_what_each_gives_alone_and_compute_only_new_tokens(
    model: Decoder, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dtt.model.decoding.CHUNK", chunk)
    options: dict[str, Any] = {"max_new_tokens": 3, "temperature": 0, "top_k": None, "top_p": 1.0}
    counting = CountingDecoder(model.arch)
    counting.load_state_dict(model.state_dict())
    cached, draws = PrefixCachedGenerator(counting), torch.Generator()
    history = list(PROMPT)
    for new in ([], [9, 9, 41, 2], [70], [5, 6, 7, 8]):
        history += new
        counting.computed = []
        kept = cached.cached_prefix(history)
        answer = list(cached.generate(history, **options, generator=draws))
        assert answer == list(generate(model, history, **options))
        assert sum(counting.computed) == len(history) - kept + len(answer) - 1
        assert kept == max(0, len(history) - len(new) - 1) if history != PROMPT else kept == 0
        history += answer
    other = [5, 17, 99, 4]  # its third token differs from that of the cache
    assert cached.cached_prefix(other) == 2
    alone = list(generate(model, other, **options))
    assert list(cached.generate(other, **options, generator=draws)) == alone
    assert cached.cached_prefix(other[:2]) == 1  # the last token is computed, for its logits


@pytest.mark.usefixtures("order")
def test_generation_continues_after_an_interruption_at_any_forward_pass(model: Decoder) -> None:
    options: dict[str, Any] = {"max_new_tokens": 8, "temperature": 0, "top_k": None, "top_p": 1.0}
    expected = list(generate(model, PROMPT, **options))
    interrupted = CountingDecoder(model.arch)
    interrupted.load_state_dict(model.state_dict())
    interrupted.computed = []
    for layer in range(model.arch.n_layers):
        for passes in range(1, 8):
            cached = PrefixCachedGenerator(interrupted)
            calls = 0

            def stop(*_: object, passes: int = passes) -> None:
                nonlocal calls
                calls += 1
                if calls == passes:
                    raise KeyboardInterrupt

            hook = interrupted.layers[layer].register_forward_hook(stop)
            with pytest.raises(KeyboardInterrupt):
                list(cached.generate(PROMPT, **options, generator=torch.Generator()))
            hook.remove()
            answer = cached.generate(PROMPT, **options, generator=torch.Generator())
            assert list(answer) == expected


def in_a_batch(
    model: Decoder, seed: int | None, stop: int | None = None, **options: Any
) -> list[list[int]]:
    answers: list[list[int]] = [[] for _ in PROMPTS]
    generators = [None if seed is None else torch.Generator().manual_seed(seed) for _ in PROMPTS]
    ended = set[int]()
    options |= {"generators": generators, "ended": ended}
    for row, token in generate_batch(model, PROMPTS, **options):
        answers[row].append(token)
        if token == stop:
            ended.add(row)
    return answers


def one_by_one(model: Decoder, seed: int | None, **options: Any) -> list[list[int]]:
    generators = [None if seed is None else torch.Generator().manual_seed(seed) for _ in PROMPTS]
    return [
        list(generate(model, prompt, generator=generator, **options))
        for prompt, generator in zip(PROMPTS, generators, strict=True)
    ]


class RecordingGraphs(StepGraphs):
    """Steps that are run again, as a graph is replayed; `log` says what was done."""

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__(device or torch.device("cpu"))
        self.captures, self.log = True, list[str]()

    def captured(self, step: Step) -> Step:
        self.log.append("capture")
        return lambda: self.log.append("replay") or step()


@pytest.fixture(params=["as on a CPU", "as on a GPU"])
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode as on a CPU, or as on a GPU.

    There a step starts before the host has read the last tokens, attention reads whole blocks of
    the cache, and the step of equal shapes that ran before is run again, as a CUDA graph is.
    """
    if request.param == "as on a GPU":
        for module in ("decoding", "kv_cache"):
            monkeypatch.setattr(f"dtt.model.{module}.asynchronous", lambda _: True)
        monkeypatch.setattr("dtt.model.kv_cache.GPU_BLOCK", 8)
        monkeypatch.setattr("dtt.model.decoding.StepGraphs", RecordingGraphs)


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize(
    ("seed", "options"),
    [(None, {"temperature": 0}), (4, {"temperature": 0.9, "top_k": 20, "top_p": 0.95}), (4, {})],
)
def test_prompts_in_a_batch_get_what_each_gets_alone(
    model: Decoder, seed: int | None, options: dict[str, Any]
) -> None:
    answers = in_a_batch(model, seed, max_new_tokens=12, **options)
    assert answers == one_by_one(model, seed, max_new_tokens=12, **options)
    assert [len(answer) for answer in answers] == [12, 12, 4, 12]


@pytest.mark.usefixtures("order")
def test_each_prompt_of_a_batch_ends_by_itself(model: Decoder) -> None:
    whole = in_a_batch(model, None, max_new_tokens=100, temperature=0)
    assert [len(a) + len(p) for a, p in zip(whole, PROMPTS, strict=True)] == 4 * [24]
    stop = whole[1][5]
    stopped = in_a_batch(model, None, max_new_tokens=100, temperature=0, stop=stop)
    expected = [a[: a.index(stop) + 1] if stop in a else a for a in whole]
    assert stopped == expected
    assert len(stopped[1]) < len(whole[1])


def test_a_prompt_that_fills_the_context_gets_nothing_and_delays_no_other(model: Decoder) -> None:
    full = [1] * model.arch.max_seq_len
    options = {"max_new_tokens": 3, "temperature": 0}
    both = generate_batch(model, [full, PROMPT], generators=[None, None], **options)
    assert list(both) == [(1, token) for token in generate(model, PROMPT, **options)]
    assert list(generate_batch(model, [], generators=[], **options)) == []


def test_sampling_follows_temperature_top_k_and_top_p() -> None:
    logits = torch.tensor([0.1, 0.5, 0.25, 0.15]).log()
    generator = torch.Generator().manual_seed(0)

    def seen(temperature: float, top_k: int | None, top_p: float) -> list[float]:
        how = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        draws = [sample(logits, generator, **how) for _ in range(1000)]
        return [draws.count(token) / len(draws) for token in range(4)]

    assert seen(1.0, None, 1.0) == pytest.approx([0.1, 0.5, 0.25, 0.15], abs=0.05)
    assert seen(1.0, 2, 1.0) == pytest.approx([0, 2 / 3, 1 / 3, 0], abs=0.05)
    assert seen(1.0, None, 0.6) == pytest.approx([0, 2 / 3, 1 / 3, 0], abs=0.05)
    half = [sample(torch.zeros(4), generator, top_p=0.5) for _ in range(100)]
    assert len(set(half)) == 2  # two of four equal tokens reach 0.5 exactly
    assert seen(0.5, 2, 1.0) == pytest.approx([0, 0.8, 0.2, 0], abs=0.05)
    assert seen(1.0, 1, 1.0) == seen(1.0, None, 0.0) == seen(0, None, 1.0) == [0, 1, 0, 0]
    assert seen(1e-40, None, 1.0) == [0, 1, 0, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_non_finite_logits_are_refused(temperature: float, value: float) -> None:
    logits = torch.tensor([0.0, value, -torch.inf])
    with pytest.raises(Diverged, match="logits are not finite"):
        sample(logits, None, temperature=temperature)


@torch.no_grad()
@pytest.mark.usefixtures("order")
def test_a_text_that_outgrows_short_longrope_is_computed_again() -> None:
    scaling = LongRopeScaling(
        short_factor=(1.0,) * 4, long_factor=(5.0,) * 4, original_max_seq_len=6
    )
    cfg = ModelConfig(family="phi3", dim=32, n_layers=2, n_heads=4, rope_scaling=scaling)
    model = Decoder(families.get("phi3").architecture(cfg, 100, 24))
    initialize(model, seed=0)
    options: dict[str, Any] = {"max_new_tokens": 6, "temperature": 0.0, "top_p": 1.0}

    def uncached(ids: list[int]) -> list[int]:
        whole = list(ids)
        for _ in range(6):
            whole.append(int(model(torch.tensor([whole]))[0, -1].argmax()))
        return whole[len(ids) :]

    # Short texts become long, at different times; of two one is long from its beginning.
    prompts = [[1, 2, 3, 4], [5, 6], [7] * 5, [8] * 9]
    answers = [list[int]() for _ in prompts]
    for row, token in generate_batch(model, prompts, generators=[None] * 4, **options):
        answers[row].append(token)
    assert answers == list(map(uncached, prompts))
    cached, random = PrefixCachedGenerator(model), torch.Generator()
    for prompt in ([1, 2, 3, 4], [1, 2, 3], [1, 2, 3, 4, 5, 6, 7, 8]):  # short after a long one
        found = list(cached.generate(prompt, generator=random, top_k=None, **options))
        assert found == uncached(prompt)


@pytest.mark.usefixtures("order")
def test_non_finite_logits_of_a_batch_are_refused(model: Decoder) -> None:
    tokens = generate_batch(model, PROMPTS, max_new_tokens=3, generators=[None] * len(PROMPTS))
    next(tokens)
    with torch.no_grad():
        model.embed.weight.fill_(torch.nan)
    with pytest.raises(Diverged, match="the largest logit is nan"):
        list(tokens)


@pytest.mark.usefixtures("order")
def test_a_state_serves_prompts_of_any_number_and_length_one_after_another(model: Decoder) -> None:
    decoding = StaticDecoding(model)
    for prompts in ([PROMPT], PROMPTS, [[9] * 12], PROMPTS[1:3], [*PROMPTS, PROMPT]):
        for options in ({"temperature": 0}, {"top_k": 5}, {"temperature": 0.5, "top_p": 0.9}):
            found = list[list[tuple[int, int]]]()
            for state in (decoding, None):
                how: dict[str, Any] = {"max_new_tokens": len(prompts[0]), **options}
                how["generators"] = [torch.Generator().manual_seed(i) for i in range(len(prompts))]
                found.append(list(generate_batch(model, prompts, decoding=state, **how)))
            assert found[0] == found[1]


def test_a_step_is_captured_at_its_second_run_and_replayed_from_then_on() -> None:
    graphs, number = RecordingGraphs(), torch.zeros(1)
    for key in ("a", "a", "b", "a"):
        graphs.run(key, lambda: number.add_(1) and None)
    assert (graphs.log, number.item()) == (["capture", "replay", "replay"], 4)
    graphs.clear()
    graphs.run("a", lambda: number.add_(1) and None)
    assert (len(graphs.log), number.item()) == (3, 5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there a step can be captured")
def test_a_step_that_cannot_be_captured_runs_without(caplog: pytest.LogCaptureFixture) -> None:
    graphs, runs = StepGraphs(torch.device("cpu")), list[int]()
    graphs.captures = True
    with caplog.at_level("WARNING", logger="dtt"):
        for run in range(4):
            graphs.run("a", partial(runs.append, run))
    assert runs == [0, 1, 2, 3]
    (warning,) = caplog.messages
    assert warning.startswith("each token is launched kernel by kernel")
