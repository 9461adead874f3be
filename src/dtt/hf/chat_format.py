"""The conversation format of a model: its template, variables and stop tokens."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from dtt.artifacts.jobdir import JobDir
from dtt.artifacts.manifests import ChatFacts, DataManifest, ExportManifest
from dtt.base.errors import DamagedError, InputError
from dtt.base.reading import read_json, read_whole
from dtt.config.data import ChatConfig
from dtt.data.conversations.chat_encoder import ChatEncoder
from dtt.data.conversations.template import resolve_template, special_tokens_beside
from dtt.data.text.side_files import tokenizer_content

MAX_CONFIG_BYTES = 2**28
"""Maximum bytes of a config.json or an index; enough for a million tensors."""
FETCH_AGAIN = "export it again with `dtt export JOB`, or fetch the folder again"


@dataclass(frozen=True)
class ChatFormat:
    """The conversation format of a model."""

    template: str
    """Text of the chat template."""
    name: str
    """Name or path of the template, for messages."""
    facts: ChatFacts
    tokenizer: Path
    """A tokenizer.json."""
    control_text: Literal["text", "token"] = "text"
    """See `chat.control_text`."""

    def encoder(self) -> ChatEncoder:
        """Return the encoder of conversations, the same as for training."""
        return ChatEncoder(
            tokenizer_content(self.tokenizer),
            ChatConfig(
                template=self.name,
                kwargs=dict(self.facts.kwargs),
                control_text=self.control_text,
            ),
            where=self.tokenizer,
            template_text=self.template,
            special_tokens=self.facts.special_tokens,
        )


def job_chat_format(job: JobDir, cfg: ChatConfig) -> ChatFormat | None:
    """Return the format of a job that trains on conversations; None for one on plain text."""
    facts = DataManifest.read(job.root).chat
    if facts is None:
        return None
    path = job.chat_template
    try:
        content = read_whole(path)
    except FileNotFoundError:
        content = b""
    if sha256(content).hexdigest() != facts.template_sha256:
        raise DamagedError(
            "the chat template is missing"
            if not content
            else "the chat template has changed since the job was trained",
            where=path,
            next=f"run dtt train {job.root}, which writes it again; or specify one with --template",
        )
    template = content.decode()
    control_text: Literal["text", "token"] = "token" if cfg.control_text == "token" else "text"
    return ChatFormat(template, str(path), facts, job.tokenizer, control_text)


def folder_chat_format(folder: Path) -> ChatFormat | None:
    """Return the format of a Hugging Face folder; None if it has no chat template.

    The variables that the template was rendered with are known for folders of `dtt export` only.
    """
    tokenizer = folder / "tokenizer.json"
    try:
        template = resolve_template("tokenizer", tokenizer)
    except InputError:
        return None
    exported = ExportManifest.read(folder).chat if ExportManifest.exists(folder) else None
    kwargs = {} if exported is None else exported.kwargs
    return _found(template, str(folder), tokenizer, eos_token_ids(folder), kwargs)


def chosen_chat_format(name: str, tokenizer: Path, stop_tokens: tuple[int, ...]) -> ChatFormat:
    """Return the format with a template that the user names, as in `chat.template`.

    `stop_tokens` are those of the model; the template's own come from the encoder. Raises
    InputError if there is no such template, ConfigError if it is malformed.
    """
    return _found(resolve_template(name, tokenizer), name, tokenizer, stop_tokens, {})


def _found(
    template: str, name: str, tokenizer: Path, stop_tokens: tuple[int, ...], kwargs: dict[str, Any]
) -> ChatFormat:
    facts = ChatFacts(
        template_sha256=sha256(template.encode()).hexdigest(),
        kwargs=kwargs,
        stop_tokens=stop_tokens,
        special_tokens=special_tokens_beside(tokenizer),
    )
    return ChatFormat(template, name, facts, tokenizer)


def eos_token_ids(folder: Path) -> tuple[int, ...]:
    """Return the ids that end generation: of generation_config.json, else of config.json.

    Returns an empty tuple if neither names one, as in a Qwen3 model that transformers created.
    """
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        match read_config(path).get("eos_token_id") if path.is_file() else None:
            case int(end):
                return (end,)
            case [*ends] if ends and all(isinstance(end, int) for end in ends):
                return tuple(ends)
    return ()


def read_config(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file of a Hugging Face folder; DamagedError if it is not an
    object."""
    try:
        return read_json(path, MAX_CONFIG_BYTES)
    except ValueError as error:
        raise DamagedError(f"{path} is not JSON", why=str(error), next=FETCH_AGAIN) from None
