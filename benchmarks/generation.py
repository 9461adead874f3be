"""Compare generation on a CPU by dtt and transformers with the same weights, in tokens/s.

    python benchmarks/generation.py [--new 128] [--rounds 3]

Random models of 8 layers, 512 wide, with a vocabulary of 32,000 (52M parameters), fp32, one thread,
greedy. Prompts are random ids; those of a batch have different lengths. The tokens must be equal.
Rounds alternate between the two; the fastest of each counts. Seconds are CPU time, which other load
on the machine affects less than wall time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from measurement import Table, in_turns

from dtt.config.model import ModelConfig
from dtt.hf.weights import from_hf
from dtt.model import families
from dtt.model.decoder import Decoder
from dtt.model.generate import generate_batch

SHAPE = {"dim": 512, "n_layers": 8, "n_heads": 8, "n_kv_heads": 4, "ffn_dim": 1408}
MODELS = {
    "llama": ModelConfig.model_validate({"family": "llama", **SHAPE}),
    "mistral, window of 64": ModelConfig.model_validate(
        {"family": "mistral", "window": 64, **SHAPE}
    ),
}
PROMPTS = {"one prompt of 64": [64], "one prompt of 512": [512], "8 prompts": range(16, 144, 16)}


def models_with_equal_weights(cfg: ModelConfig) -> tuple[Decoder, Any]:
    """Return a dtt model and a transformers model with the same weights."""
    family = families.get(cfg.family)
    arch = family.architecture(cfg, 32000, 1024)
    config = transformers.AutoConfig.for_model(**family.to_hf_config(arch, 0))
    torch.manual_seed(0)
    make: Any = transformers.AutoModelForCausalLM.from_config
    hf_model = make(config).eval()
    model = Decoder(arch).eval()
    model.load_state_dict(from_hf(hf_model.state_dict(), arch))
    return model, hf_model


def generate_with_dtt(model: Decoder, prompts: list[list[int]], new: int) -> list[list[int]]:
    """Generate `new` tokens for each prompt."""
    answers: list[list[int]] = [[] for _ in prompts]
    for row, token in generate_batch(
        model, prompts, max_new_tokens=new, temperature=0, generators=[None] * len(prompts)
    ):
        answers[row].append(token)
    return answers


def generate_with_transformers(model: Any, prompts: list[list[int]], new: int) -> list[list[int]]:
    """Generate with prompts padded on the left, as the documentation of transformers requires."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    answers: list[list[int]] = out[:, longest:].tolist()
    return answers


def timed(run: Callable[[], list[list[int]]]) -> tuple[float, list[list[int]]]:
    """Return tokens per second of CPU time, and the tokens."""
    start = time.process_time()
    answers = run()
    return sum(map(len, answers)) / (time.process_time() - start), answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("tokens/s", 44, {"transformers": 14, "dtt": 10, "ratio": 8})
    for name, cfg in MODELS.items():
        model, hf_model = models_with_equal_weights(cfg)
        for what, lengths in PROMPTS.items():
            generator = torch.Generator().manual_seed(1)
            prompts = [torch.randint(1, 32000, (n,), generator=generator).tolist() for n in lengths]
            libraries = {
                "transformers": partial(generate_with_transformers, hf_model, prompts, args.new),
                "dtt": partial(generate_with_dtt, model, prompts, args.new),
            }
            runs = {library: partial(timed, generate) for library, generate in libraries.items()}
            results = in_turns(runs, args.rounds, warm_up=0)
            answers = [tokens for rounds in results.values() for _, tokens in rounds]
            assert all(tokens == answers[0] for tokens in answers), "the tokens differ"
            peer, dtt = (max(speed for speed, _ in rounds) for rounds in results.values())
            table.row(f"{name}, {what}", f"{peer:.1f}", f"{dtt:.1f}", f"{dtt / peer:.2f}x")


if __name__ == "__main__":
    main()
