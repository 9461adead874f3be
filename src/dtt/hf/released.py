"""Settings of generation and of the tokenizer that a release has beside its weights.

A job that starts from released weights keeps them, so that its export carries over what training
did not change, also when the folder of the release is gone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import InputError
from dtt.base.files import write_atomically
from dtt.base.log import log
from dtt.base.reading import read_json, read_whole
from dtt.checkpoint import store
from dtt.config.init import HF
from dtt.data.conversations.template import resolve_template, special_tokens_beside
from dtt.data.text.side_files import CHANGES_IDS, CONFIG, MAP, object_beside
from dtt.data.text.tokenizer import open_tokenizer
from dtt.hf.chat_format import MAX_CONFIG_BYTES, eos_token_ids, read_config
from dtt.hf.model_source import find_model
from dtt.model.families import multimodal

TOKENIZER, SENTENCEPIECE = "tokenizer.json", "tokenizer.model"
REPLACED = (
    *CHANGES_IDS, "tokenizer_class", "auto_map", "added_tokens_decoder", "chat_template",
    "name_or_path", "tokenizer_file", "special_tokens_map_file", "processor_class",
    "transformers_version", "backend", "is_local",
)  # fmt: skip
"""Keys of tokenizer_config.json that an export decides itself: `tokenizer.json` has the ids."""
TOKENS = ("_token_id", "suppress_tokens", "_words_ids", "sequence_bias")
"""Ends of keys of generation_config.json that name tokens by id."""


@dataclass(frozen=True)
class Released:
    """The settings of a released model; those of a model from scratch are empty."""

    source: str | None = None
    generation: dict[str, Any] = field(default_factory=dict)
    """generation_config.json."""
    ids: dict[str, int | None] = field(default_factory=dict)
    """`bos_token_id` and `pad_token_id` of config.json; empty if the job has other tokens."""
    stops: tuple[int, ...] = ()
    """Ids that end generation."""
    context: int | None = None
    """Number of positions in config.json."""
    tokenizer: dict[str, Any] = field(default_factory=dict)
    """tokenizer_config.json, without what an export decides itself."""
    special: dict[str, str] = field(default_factory=dict)
    """Special tokens such as `pad_token`, by name."""
    template: str | None = None
    """The chat template."""
    sentencepiece: Path | None = None
    """A SentencePiece model with the same tokens."""
    multimodal: str | None = None
    """The multimodal model to which the text model belongs: a folder, or a model on the Hub."""

    @classmethod
    def of_job(cls, job: JobDir) -> Released:
        """Return the settings that a job keeps."""
        if not job.released.is_file():
            return FROM_SCRATCH
        found = read_json(job.released, MAX_CONFIG_BYTES)
        model = job.sentencepiece if job.sentencepiece.is_file() else None
        return cls(**found | {"stops": tuple(found["stops"]), "sentencepiece": model})

    @classmethod
    def of_folder(cls, folder: Path) -> Released:
        """Return the settings of a Hugging Face folder."""
        whole = read_config(folder / "config.json")
        config = multimodal.text_config(whole)
        path = folder / "generation_config.json"
        generation = read_config(path) if path.is_file() else {}
        try:
            template = resolve_template("tokenizer", folder / TOKENIZER)
        except InputError:
            template = None
        settings = object_beside(folder / MAP) | object_beside(folder / CONFIG)
        special = special_tokens_beside(folder / TOKENIZER)
        model = folder / SENTENCEPIECE
        return cls(
            str(folder),
            {k: v for k, v in generation.items() if k != "_from_model_config"},
            {key: _token_id(key, generation, config) for key in ("bos_token_id", "pad_token_id")},
            eos_token_ids(folder),
            config.get("max_position_embeddings", config.get("n_positions")),
            {k: v for k, v in settings.items() if k not in REPLACED and k not in special},
            special,
            template,
            model if model.is_file() else None,
            str(folder.absolute()) if multimodal.is_multimodal(whole) else None,
        )

    def without_tokens(self) -> Released:
        """Return the settings that hold with another tokenizer; log which ones do not."""
        kept = {k: v for k, v in self.generation.items() if not k.endswith(TOKENS)}
        lost = sorted(key for key in self.generation.keys() - kept.keys() if self.generation[key])
        log.warning(
            "the tokenizer of the data is not that of %s: exports do not have its stop tokens, "
            "chat template and tokenizer settings%s%s",
            self.source,
            ", and are the text model alone" if self.multimodal else "",
            f", and of its generation_config.json not: {', '.join(lost)}" if lost else "",
        )
        return Released(self.source, kept, context=self.context)


def _token_id(key: str, *configs: Mapping[str, Any]) -> int | None:
    """Return the id of a token from the first configuration that has one number for it."""
    for config in configs:
        value = config.get(key)
        if type(value) is int:
            return value
    return None


FROM_SCRATCH = Released()


def keep(source: str, job: JobDir, tokenizer: Path) -> None:
    """Keep in `job` what the weights of `source`, as in `init.from`, bring with them.

    `tokenizer` is that of the data. Another job hands on what it keeps itself.
    """
    if source.startswith(HF):
        from dtt.data.corpus.hub import MODEL_FILES  # slow to import

        files = [name for name in MODEL_FILES if "safetensors" not in name]
        folder = find_model(source.removeprefix(HF), files)
        found, theirs = Released.of_folder(folder), folder / TOKENIZER
        name = source.removeprefix(HF)
        if found.multimodal and folder != Path(name).expanduser():
            # So that another machine finds it, too: the folder in the cache is named by the commit.
            found = replace(found, multimodal=f"{name.partition('@')[0]}@{folder.name}")
    else:
        other = JobDir(store.parse(source)[0].parent)
        found, theirs = Released.of_job(other), other.tokenizer
    if found is FROM_SCRATCH:
        return
    known, tokens = (open_tokenizer(path).get_vocab() for path in (tokenizer, theirs))
    if any(known.get(token) != i for token, i in tokens.items()):
        found = found.without_tokens()
    if found.sentencepiece is not None:
        write_atomically(job.sentencepiece, read_whole(found.sentencepiece))
    facts = asdict(replace(found, sentencepiece=None))
    write_atomically(job.released, json.dumps(facts, indent=1, ensure_ascii=False) + "\n")
