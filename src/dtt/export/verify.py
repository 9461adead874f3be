"""Proof that `transformers` reads an export as the model that was trained.

Shapes: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from dtt.data.tokenizer import open_tokenizer
from dtt.errors import DamagedError
from dtt.model import families
from dtt.model.architecture import Architecture
from dtt.model.decoder import Decoder

TOLERANCE = 1e-4
"""Largest difference of fp32 logits that is still rounding, as a share of the largest logit."""
TEXT = """def mean(numbers: list[float]) -> float:
\treturn sum(numbers) / len(numbers)   # 3.14e-10, "naïve" café

It's 12,345 words — Übergröße, Привет, 你好世界, नमस्ते, 🙂👩‍🚀.
"""


@torch.inference_mode()
def check(folder: Path, state: Mapping[str, Tensor], arch: Architecture, tokenizer: Path) -> float:
    """Load `folder` with the Auto classes; compare with a Decoder that holds `state`.

    Class, tensor names, tying, token ids of real text, and fp32 logits of random ids and of that
    text must agree: DamagedError names the first that does not. Returns the largest absolute
    difference of a logit. Works on the CPU, in memory for two fp32 models.
    """
    theirs = _load(folder, arch)
    text_ids = _token_ids(folder, tokenizer)[: arch.max_seq_len]
    with torch.device("meta"):
        ours = Decoder(arch)
    ours.load_state_dict({name: tensor.float() for name, tensor in state.items()}, assign=True)
    ours.eval()
    generator = torch.Generator().manual_seed(0)
    length = min(128, arch.max_seq_len)
    random_T = torch.randint(arch.vocab_size, (length,), generator=generator)
    worst = 0.0
    for ids_T, what in ((random_T, "random ids"), (torch.tensor(text_ids), "text")):
        expected_TV, got_TV = ours(ids_T[None])[0], theirs(ids_T[None]).logits[0]
        difference = (expected_TV - got_TV).abs().max().item()
        if not difference <= TOLERANCE * max(1.0, expected_TV.abs().max().item()):
            raise _refused(folder, f"logits of {what} differ by up to {difference:.3g}")
        worst = max(worst, difference)
    return worst


def _load(folder: Path, arch: Architecture) -> Any:
    """The model as transformers builds it, in fp32."""
    settings: Any = transformers.utils.logging
    settings.disable_progress_bar()
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    model, report = load(folder, dtype=torch.float32, output_loading_info=True)
    wrong = {kind: names for kind, names in report.items() if names}
    if wrong:
        raise _refused(folder, f"transformers reports {wrong}")
    expected = families.get(arch.family).hf_class
    if type(model).__name__ != expected:
        raise _refused(folder, f"transformers builds a {type(model).__name__}, not a {expected}")
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    if tied != arch.tie_embeddings:
        raise _refused(folder, f"the head is {'tied' if tied else 'not tied'} to the embedding")
    return model.eval()


def _token_ids(folder: Path, tokenizer: Path) -> list[int]:
    """Ids of a text as in the token files, which AutoTokenizer must make of the folder too."""
    expected: list[int] = open_tokenizer(tokenizer).encode(TEXT, add_special_tokens=False).ids
    loaded = transformers.AutoTokenizer.from_pretrained(folder)
    loaded.model_max_length = len(expected)  # a shorter context would be warned of
    got = loaded(TEXT)["input_ids"]
    if got != expected:
        raise _refused(folder, f"AutoTokenizer gives other ids: {got[:8]}…, not {expected[:8]}…")
    return expected


def _refused(folder: Path, why: str) -> DamagedError:
    return DamagedError(
        "the export is not the model that was trained; nothing was published",
        where=folder,
        why=why,
        next="this is a fault of dtt or of this version of transformers "
        f"({transformers.__version__}): please report it",
    )
