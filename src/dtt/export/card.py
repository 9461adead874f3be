"""The model card: README.md of an export."""

from __future__ import annotations

from huggingface_hub import ModelCard, ModelCardData

from dtt import __version__
from dtt.artifacts import DataManifest
from dtt.config.run import RunConfig
from dtt.model import count, families
from dtt.model.architecture import Architecture


def model_card(
    cfg: RunConfig, arch: Architecture, data: DataManifest, tokens: int, *, ema: bool
) -> str:
    """Markdown with the Hub's metadata: what the model is, what it saw, how to use it."""
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
            f"{source.corpus.id if source.corpus else source.name} ({source.tokens:,} tokens)"
            for source in data.sources
        ),
        "Training": f"{tokens:,} tokens, {cfg.train.global_batch_tokens:,} a step",
        "Optimizer, schedule": f"{cfg.optim.type}, {cfg.schedule.type}",
    }
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
