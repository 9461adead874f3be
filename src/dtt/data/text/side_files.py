"""Tokenizers as `transformers` reads their folders: tokenizer.json and the files beside it.

Tokens may be declared, and options that change ids set, in tokenizer_config.json,
special_tokens_map.json and added_tokens.json alone. Without them, a token such as `<|step|>` is
split into text, and the model never sees the id that it was trained with.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer

from dtt.base.errors import InputError
from dtt.base.log import log
from dtt.base.reading import LARGE, check_regular, read_object, read_whole

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
CHANGES_IDS = (
    "add_bos_token", "add_eos_token", "add_prefix_space", "do_lower_case", "split_special_tokens",
)  # fmt: skip
"""Options of tokenizer_config.json with which `transformers` may yield other ids."""
PLAIN_CLASSES = (None, "PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes that take tokenizer.json as it is; LlamaTokenizer and others rebuild parts of it."""
READ_WHOLE = (".json", ".txt", ".jinja", ".model")
"""Suffixes of files that `transformers` reads whole; others may be weights."""
FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")
PROBES = ("a b", "Hello, world!  two\n\nlines", " x", "ÀÉ 12", "e\u0301", "")


def tokenizer_content(path: Path) -> bytes:
    """Return the content of a tokenizer.json that yields the ids of AutoTokenizer for its folder.

    This is the file itself, unless the files beside it change ids. To find out, `transformers` is
    imported (1.3 s), but only if they declare something that tokenizer.json lacks, or set an option
    that can change ids. Raises InputError if they do and `transformers` cannot read the folder.
    """
    content = read_whole(path)
    folder = path.parent
    config = object_beside(folder / CONFIG)
    if isinstance(code := config.get("auto_map"), dict) and "AutoTokenizer" in code:
        _name_code(folder, json.dumps(code["AutoTokenizer"])[:100])
    if not any((folder / name).is_file() for name in (CONFIG, MAP, ADDED)):
        return content
    try:
        own = Tokenizer.from_buffer(content)
    except Exception:  # noqa: BLE001 - it raises nothing more specific; the caller reports it
        return content
    added = own.get_added_tokens_decoder()
    known = {token.content for token in added.values()}
    facts = {name: object_beside(folder / name) for name in (MAP, ADDED)}
    declared = {
        token
        for one in (config, facts[MAP])
        for key, value in one.items()
        if "_token" in key
        for token in _texts(value)
    }
    missing = sorted((declared | facts[ADDED].keys()) - known)
    changes = (
        any(config.get(name) is not None for name in CHANGES_IDS)
        or config.get("tokenizer_class") not in PLAIN_CLASSES
        or _other_flags(config, added)
    )
    if not missing and not changes:
        return content
    found = _as_transformers(folder, missing)
    if found is None:
        return content
    texts = [*PROBES]
    for token in {*missing, *known}:
        texts += [token, f"go{token}on", f"a {token} b", f"{token}{token} "]
    if all(
        own.encode(text, add_special_tokens=special).ids
        == found.encode(text, add_special_tokens=special).ids
        for text in texts
        for special in (True, False)
    ):
        return content
    log.info(
        "%s: the files beside tokenizer.json change its ids, as in transformers: %s",
        folder,
        ", ".join(missing[:5]) or "by their options",
    )
    return found.to_str().encode()


def check_special_tokens(path: Path, content: bytes) -> None:
    """Raise InputError if `content` has special tokens that the tokenizer.json at `path` lacks.

    dtt encodes the strings of special tokens in documents as text, so that no document can end
    another. Where a token is declared beside the file only, it is not clear that this is meant:
    `transformers` would encode its string as the token.
    """
    own, merged = map(Tokenizer.from_buffer, (read_whole(path), content))
    known = {token.content for token in own.get_added_tokens_decoder().values()}
    added = merged.get_added_tokens_decoder().values()
    hidden = sorted(t.content for t in added if t.special and t.content not in known)
    if hidden:
        raise InputError(
            "special tokens are declared beside tokenizer.json only",
            where=path.parent,
            why=f"{', '.join(hidden[:5])}: in documents, dtt would encode their strings as text, "
            "and transformers as these tokens",
            next="declare them in tokenizer.json, as special if documents do not use them; "
            "AutoTokenizer…save_pretrained(NEW) writes such a file",
        )


def _as_transformers(folder: Path, missing: list[str]) -> Tokenizer | None:
    """Return AutoTokenizer's tokenizer for a folder; None if it has nothing to add."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    for path in folder.iterdir():  # it might wait for a pipe, or read a device without an end
        if path.exists() and not path.is_dir():
            check_regular(path, LARGE if path.suffix in READ_WHOLE else sys.maxsize)
    readers: tuple[Any, ...] = (AutoTokenizer, PreTrainedTokenizerFast)
    problem = ""
    for reader in readers:
        try:
            found: PreTrainedTokenizerBase = reader.from_pretrained(folder, trust_remote_code=False)
            backend = getattr(found, "backend_tokenizer", None)
            if isinstance(backend, Tokenizer):
                for text in PROBES:  # a class may build a tokenizer that lacks its unknown token
                    backend.encode(text)
        except Exception as error:  # noqa: BLE001 - its readers raise anything
            problem = problem or " ".join(str(error).split())[:200]
            continue
        if isinstance(backend, Tokenizer):
            tokenizer = Tokenizer.from_str(backend.to_str())
            tokenizer.no_truncation()
            tokenizer.no_padding()
            return tokenizer
    if not missing:
        return None
    raise InputError(
        "tokens are declared beside tokenizer.json only, and transformers cannot read the folder",
        where=folder,
        why=f"{', '.join(missing[:5])}: {problem}",
        next="save it with all tokens in tokenizer.json: AutoTokenizer…save_pretrained(NEW)",
    )


def _texts(value: object) -> Iterator[str]:
    """Yield the tokens in a value of a side file: text, objects with `content`, several of them."""
    if isinstance(value, str):
        yield from [value] if value else []
    elif isinstance(value, dict):
        yield from _texts(value["content"] if "content" in value else [*value.values()])
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)


def _other_flags(config: dict[str, Any], added: dict[int, AddedToken]) -> bool:
    """Return whether tokenizer_config.json matches a token of tokenizer.json in another way."""
    decoder = config.get("added_tokens_decoder")
    return any(
        isinstance(token, dict)
        and any(flag in token and token[flag] != getattr(known, flag) for flag in FLAGS)
        for i, known in added.items()
        for token in ((decoder.get(str(i)),) if isinstance(decoder, dict) else ())
    )


def object_beside(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file beside a tokenizer; empty if there is no file.

    Raises DamagedError if it contains anything else.
    """
    try:
        return read_object(path)
    except FileNotFoundError:
        return {}


@cache  # the folder is read several times
def _name_code(folder: Path, code: str) -> None:
    log.warning(
        "%s names Python code of its own (%s), which dtt never runs: its JSON files alone are used",
        folder,
        code,
    )
