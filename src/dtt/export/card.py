"""The model card: README.md of an export."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from dtt import __version__
from dtt.artifacts import DataManifest, SourceFacts
from dtt.config.run import RunConfig
from dtt.model import count, families
from dtt.model.architecture import Architecture


def model_card(
    cfg: RunConfig,
    arch: Architecture,
    data: DataManifest,
    tokens: int,
    *,
    evaluation: Mapping[str, Any] | None,
    ema: bool,
) -> str:
    """Return Markdown with the Hub's metadata: facts on the model and its data, and how to use it.

    `tokens` is the number of training tokens, `evaluation` the last `eval` record if there is one.
    """
    corpora = [source.corpus for source in data.sources if source.corpus is not None]
    facts = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        license=cfg.export.license,
        datasets=[corpus.id for corpus in corpora if corpus.kind == "hub"] or None,
        tags=["dtt", arch.family],
    )
    rows = {
        "Architecture": families.get(arch.family).hf_class,
        "Parameters": f"{count.parameters(arch):,}",
        "Layers, width, heads": f"{arch.n_layers}, {arch.dim}, {arch.n_heads} "
        f"({arch.n_kv_heads} for keys and values)",
        "Vocabulary, context": f"{arch.vocab_size:,}, {arch.max_seq_len:,} tokens",
        "Trained on": ", ".join(
            f"{_public_name(source)} ({source.tokens:,} tokens)" for source in data.sources
        ),
        "Training": f"{tokens:,} tokens, {cfg.train.global_batch_tokens:,} a step",
        "Optimizer, schedule": f"{cfg.optim.type}, {cfg.schedule.type}",
    }
    if evaluation is not None:
        rows["Validation loss"] = _validation(evaluation, ema=ema)
    if ema:
        rows["Weights"] = f"exponential moving average, decay {cfg.train.ema_decay}"
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    return str(
        ModelCard(
            f"""---
{facts.to_yaml()}
---

# {cfg.name}

A base language model: it continues text, and was not taught to follow instructions.

| | |
|---|---|
{table}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
inputs = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))
```

Trained and exported with dtt {__version__}; `transformers` was seen to compute the same logits.
"""
        )
    )


def _public_name(source: SourceFacts) -> str:
    """Return the name of a source without the local folders that contain it."""
    if source.corpus is None:
        return source.name
    return Path(source.corpus.id).name if source.corpus.kind == "local" else source.corpus.id


def _validation(evaluation: Mapping[str, Any], *, ema: bool) -> str:
    """Describe the last evaluation in nats per token and, if known, bits per byte."""
    loss, bits = evaluation["loss"], evaluation.get("bits_per_byte")
    if ema and evaluation.get("ema_loss") is not None:
        loss, bits = evaluation["ema_loss"], None
    if loss is None:
        return "not a finite number"
    per_byte = f", {bits:.4f} bits per byte" if bits is not None else ""
    return f"{loss:.4f} nats per token{per_byte}, after step {evaluation['step']:,}"
