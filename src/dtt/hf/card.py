"""The model card: README.md of an export."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from dtt import __version__
from dtt.artifacts.manifests import ChatFacts, DataManifest
from dtt.config.run import RunConfig
from dtt.model import count, families
from dtt.model.architecture import AnyArchitecture, Architecture

BASE = "A base language model: it continues text, and was not taught to follow instructions."
CHAT = (
    "A chat model: it was trained on conversations, in the form of `chat_template.jinja`. It ends "
    "an answer with the `eos_token`."
)
FOLDER = """\
folder = "."  # where these files are, or the name of their repository on the Hub
"""
LOAD = f"""\
from transformers import AutoModelForCausalLM, AutoTokenizer

{FOLDER}model = AutoModelForCausalLM.from_pretrained(folder)"""
LOAD_ADAPTER = f"""\
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

{FOLDER}model = AutoPeftModelForCausalLM.from_pretrained(folder)"""
BASE_USE = """\
inputs = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))"""


def _chat_use(chat: ChatFacts) -> str:
    """Return Python code that asks the model a question."""
    variables = "".join(f", {name}={value!r}" for name, value in chat.kwargs.items())
    return f"""\
messages = [{{"role": "user", "content": "Hello!"}}]
inputs = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_tensors="pt"{variables}
)
answer = model.generate(**inputs, max_new_tokens=50)[0, inputs["input_ids"].shape[1] :]
print(tokenizer.decode(answer, skip_special_tokens=True))"""


def model_card(
    cfg: RunConfig,
    arch: AnyArchitecture,
    data: DataManifest,
    step: int,
    tokens: int,
    *,
    evaluation: Mapping[str, Any] | None,
    ema: bool,
    adapter_of: str | None = None,
) -> str:
    """Return Markdown with the Hub's metadata: facts on the model and its data, and how to use it.

    `step` and `tokens` are the numbers of training steps and tokens, `evaluation` is the last
    `eval` record if there is one. `adapter_of` is the model that an adapter is for.
    """
    corpora = [source.corpus for source in data.sources if source.corpus is not None]
    facts = ModelCardData(
        library_name="transformers" if adapter_of is None else "peft",
        # A folder of this machine says nothing to others.
        base_model=None if adapter_of is None or Path(adapter_of).is_absolute() else adapter_of,
        pipeline_tag="text-generation",
        license=cfg.export.license,
        datasets=[corpus.id for corpus in corpora if corpus.kind == "hub"] or None,
        tags=["dtt", arch.family],
    )
    oracle = "`transformers`" if adapter_of is None else "PEFT"
    rows = _facts(cfg, arch, data, step, tokens, evaluation, ema=ema)
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    return str(
        ModelCard(
            f"""---
{facts.to_yaml()}
---

# {cfg.name}

{BASE if data.chat is None else CHAT}

| | |
|---|---|
{table}

```python
{LOAD if adapter_of is None else LOAD_ADAPTER}
tokenizer = AutoTokenizer.from_pretrained(folder)
{BASE_USE if data.chat is None else _chat_use(data.chat)}
```

Trained and exported with dtt {__version__}; {oracle} computes the same logits.
"""
        )
    )


def _facts(
    cfg: RunConfig,
    arch: AnyArchitecture,
    data: DataManifest,
    step: int,
    tokens: int,
    evaluation: Mapping[str, Any] | None,
    *,
    ema: bool,
) -> dict[str, str]:
    """Return the rows of the table of facts, by title."""
    if isinstance(arch, Architecture):
        of_transformers = families.get(arch.family).hf_class
        heads = f"{arch.n_heads} ({arch.n_kv_heads} for keys and values)"
        sizes = {"Layers, width, heads": f"{arch.n_layers}, {arch.dim}, {heads}"}
    else:  # of the library, whose classes have sizes of many names
        of_transformers = type(arch.skeleton.library).__name__
        sizes = {"Layers": str(arch.n_layers)}
    trained_on = []
    for source in data.sources:
        name = source.name
        if source.corpus is not None:
            name = source.corpus.id
            if source.corpus.kind in ("local", "own"):  # a card is published, without local folders
                name = Path(name).name
        trained_on.append(f"{name} ({source.tokens:,} tokens)")
    rows = {
        "Architecture": of_transformers,
        "Parameters": f"{count.parameters(arch):,}",
        **sizes,
        "Vocabulary, context": f"{arch.vocab_size:,}, {arch.max_seq_len:,} tokens",
        "Trained on": ", ".join(trained_on),
        "Training": f"{step:,} steps, {tokens:,} tokens, {cfg.train.global_batch_tokens:,} a step",
        "Optimizer, schedule": f"{cfg.optim.type}, {cfg.schedule.type}",
    }
    if evaluation is not None:
        rows["Validation loss"] = _validation(evaluation, ema=ema)
    if ema:
        rows["Weights"] = f"exponential moving average, decay {cfg.train.ema_decay}"
    return rows


def _validation(evaluation: Mapping[str, Any], *, ema: bool) -> str:
    """Describe the last evaluation: nats per token and, if known, bits per byte; or DPO's loss."""
    loss, bits = evaluation["loss"], evaluation.get("bits_per_byte")
    if ema and evaluation.get("ema_loss") is not None:
        loss, bits = evaluation["ema_loss"], None
    if loss is None:
        return "not a finite number"
    if (accuracy := evaluation.get("reward_accuracy")) is not None:
        right = f"{accuracy:.1%} of the preference pairs correct"
        return f"{loss:.4f} nats per pair (DPO), {right}, after step {evaluation['step']:,}"
    per_byte = f", {bits:.4f} bits per byte" if bits is not None else ""
    return f"{loss:.4f} nats per token{per_byte}, after step {evaluation['step']:,}"
