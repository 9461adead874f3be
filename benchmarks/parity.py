"""Compare dtt with transformers for each model family: the largest absolute difference.

    python benchmarks/parity.py

Tiny models with random weights, fp32, on a CPU; two sequences of 96 tokens; attention windows are
16 tokens. Each family has one model with tied embeddings and one without.

`logits`, `gradients`: the logits, and the gradients of the mean cross-entropy over all parameters.
`documents`: the same with four documents of 7 to 45 tokens in each sequence; transformers gets each
document alone. `import`: logits of dtt from a folder written by `save_pretrained`. `export`: logits
of transformers from a folder written by dtt, without missing or unexpected tensors. `cache`: logits
of dtt one token at a time with its KV cache against those of transformers without one. `largest`:
the largest logit and gradient.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor

from dtt.config.model import LinearRopeScaling, Llama3RopeScaling, ModelConfig
from dtt.hf import hf
from dtt.hf.read import Trained, read_hf_folder
from dtt.hf.weights import from_hf, to_hf
from dtt.model import families
from dtt.model.architecture import Architecture
from dtt.model.decoder import Decoder
from dtt.model.kv_cache import KVCache

SIZES: dict[str, Any] = {"dim": 64, "n_layers": 4, "n_heads": 4}
GROUPED = SIZES | {"n_kv_heads": 2}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"family": "gpt2", **SIZES},
    "llama": {"family": "llama", **GROUPED},
    "llama 3.1": {
        "family": "llama",
        **GROUPED,
        "rope_theta": 5e5,
        "rope_scaling": Llama3RopeScaling(original_max_seq_len=32),
    },
    "mistral": {"family": "mistral", **GROUPED, "window": 16},
    "qwen3": {"family": "qwen3", **GROUPED, "head_dim": 32, "rope_theta": 1e6},
    "gemma3": {
        "family": "gemma3",
        **GROUPED,
        "head_dim": 32,
        "window": 16,
        "window_pattern": 2,
        "rope_theta": 1e6,
        "rope_scaling": LinearRopeScaling(),
        "query_pre_attn_scalar": 24,
    },
}
VOCAB, LENGTH, PROMPT = 512, 96, 30
TOKENS = torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(0))
TARGETS = TOKENS.roll(-1, 1)
DOCUMENTS = [[20, 45, 7, 24], [33, 9, 40, 14]]
NUMBERS = torch.tensor([[n for n, k in enumerate(row) for _ in range(k)] for row in DOCUMENTS])
HEADER = (
    "                              documents\n"
    "family     head      logits gradients   logits gradients   import   export    cache"
    "     largest"
)


def main() -> None:
    """Print a row for each family and head."""
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    print(f"torch {torch.__version__}, transformers {transformers.__version__}\n{HEADER}")
    for name, keys in MODELS.items():
        for tied in (True, False):
            cfg = ModelConfig(**keys, tie_embeddings=tied)
            arch = families.get(cfg.family).architecture(cfg, VOCAB, LENGTH)
            print(f"{name:10} {'tied' if tied else 'untied':7}{row(arch)}", flush=True)


def row(arch: Architecture) -> str:
    """Return the columns of one model."""
    hf_model = random_model(arch)
    model = Decoder(arch)
    model.load_state_dict(from_hf(hf_model.state_dict(), arch))
    logits, gradients = logits_and_gradients(hf_model, lambda: hf_model(TOKENS).logits)
    document_logits, document_gradients = logits_and_gradients(
        hf_model, lambda: logits_by_document(hf_model)
    )
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        cells = (
            (max_difference(model(TOKENS), logits), 9),
            (max_difference_of_all(dtt_gradients(model, None), gradients), 10),
            (max_difference(model(TOKENS, doc_ids_BT=NUMBERS), document_logits), 9),
            (max_difference_of_all(dtt_gradients(model, NUMBERS), document_gradients), 10),
            (max_difference(imported(hf_model, Path(folder)), logits), 9),
            (max_difference(exported(model, Path(folder)), model(TOKENS)), 9),
            (max_difference(step_by_step(model), logits[:, PROMPT - 1 :]), 9),
        )
    largest = max(gradient.abs().max().item() for gradient in gradients.values())
    shown = "".join(f"{value:{width}.1e}" for value, width in cells)
    return f"{shown}   {logits.abs().max():.2f} {largest:.2f}"


def random_model(arch: Architecture) -> Any:
    """Return the model of transformers, with weights perturbed so that they are not small."""
    torch.manual_seed(0)
    config: Any = transformers.AutoConfig.for_model(
        **families.get(arch.family).to_hf_config(arch, 0)
    )
    make: Any = transformers.AutoModelForCausalLM.from_config
    model = make(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def logits_and_gradients(
    hf_model: Any, forward: Callable[[], Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the logits and the gradients of the mean cross-entropy of transformers."""
    hf_model.zero_grad()
    logits = forward()
    loss: Any = F.cross_entropy(logits.flatten(0, 1), TARGETS.flatten())
    loss.backward()
    return logits.detach(), {name: p.grad for name, p in hf_model.named_parameters()}


@torch.enable_grad()
def dtt_gradients(model: Decoder, documents: Tensor | None) -> dict[str, Tensor]:
    """Return dtt's gradients of the same loss, under the names of transformers."""
    model.zero_grad()
    (model(TOKENS, TARGETS, doc_ids_BT=documents) / TARGETS.numel()).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return dict(to_hf(grads, model.arch))


def logits_by_document(hf_model: Any) -> Tensor:
    """Return the logits of transformers for each document alone, concatenated to sequences."""
    parts = [tokens.split(lengths) for tokens, lengths in zip(TOKENS, DOCUMENTS, strict=True)]
    return torch.stack(
        [torch.cat([hf_model(part[None]).logits[0] for part in one]) for one in parts]
    )


def imported(hf_model: Any, folder: Path) -> Tensor:
    """Return the logits of dtt from a folder that transformers saved."""
    hf_model.save_pretrained(folder / "hf")
    tokenizer(folder / "hf" / "tokenizer.json")
    weights = read_hf_folder(folder / "hf")
    model = Decoder(weights.arch)
    model.load_state_dict(dict(weights.state))
    logits: Tensor = model(TOKENS)
    return logits


def exported(model: Decoder, folder: Path) -> Tensor:
    """Return the logits of transformers from a folder that dtt exported."""
    trained = Trained(model.arch, model.state_dict(), tokenizer(folder / "tokenizer.json"), 0, (0,))
    out, origin = folder / "dtt", hf.Origin("parity", 0, "")
    hf.export(trained, origin, out, dtype="fp32", max_shard_size="5GB", card="")
    logits: Tensor = transformers.AutoModelForCausalLM.from_pretrained(out)(TOKENS).logits
    return logits


def step_by_step(model: Decoder) -> Tensor:
    """Return the logits of dtt with a KV cache: of the prompt's last token, then token by token."""
    cache = KVCache(model.arch, len(TOKENS), LENGTH, TOKENS.device, torch.float32)
    steps = TOKENS[:, :PROMPT], *(TOKENS[:, i : i + 1] for i in range(PROMPT, LENGTH))
    return torch.cat([model(tokens, cache=cache) for tokens in steps], dim=1)


def tokenizer(path: Path) -> Path:
    """Write a byte-level BPE tokenizer, which every export requires."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        [""],
        trainers.BpeTrainer(
            special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
        ),
    )
    bpe.save(str(path))
    return path


def max_difference(actual: Tensor, expected: Tensor) -> float:
    """Return the largest absolute difference."""
    return (actual - expected).abs().max().item()


def max_difference_of_all(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest absolute difference over all tensors."""
    return max(max_difference(actual[name], expected[name]) for name in expected)


if __name__ == "__main__":
    main()
