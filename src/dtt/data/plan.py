"""What rank 0 decides before anything is encoded: tokenizer, units, and which are finished."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dtt.artifacts import Record, TokensManifest, fingerprint
from dtt.config.data import GivenTokenizerConfig, TokenizeConfig, TokenizerConfig
from dtt.data.corpus import Corpus, Unit
from dtt.data.sampling import tokenizer_sample
from dtt.data.shards import WORK, is_whole, marker_path, read_marker
from dtt.data.tokenizer import given_tokenizer, train_tokenizer
from dtt.errors import ConfigError, InputError
from dtt.runtime.files import sha256_file, write_atomically
from dtt.runtime.log import log, progress

TOKENIZER = "tokenizer.json"
SPECIAL_TOKENS_IN_TEXT = "encoded as text"


class Begun(Record):
    """What a folder of token files is for; written before the first unit."""

    key_parts: dict[str, Any]
    """What decides the content of the token files."""
    tokenizer_sha256: str

    @property
    def key(self) -> str:
        """Identity of the content, for markers and manifest."""
        return fingerprint([self.key_parts, self.tokenizer_sha256])


@dataclass(frozen=True)
class Plan:
    """Work for any number of ranks."""

    begun: Begun
    units: list[Unit]
    pending: list[Unit]
    """Units that are not finished."""
    complete: bool
    """Whether the manifest is there and all that it names is whole."""

    def share(self, rank: int, size: int) -> list[Unit]:
        """The units of one rank: the longest first, each to the rank with the least so far."""
        shares: list[list[Unit]] = [[] for _ in range(size)]
        loads = [0] * size
        for unit in sorted(self.pending, key=lambda unit: (-unit.text_bytes, unit.index)):
            least = loads.index(min(loads))
            shares[least].append(unit)
            loads[least] += unit.text_bytes
        return shares[rank]


def make_plan(
    cfg: TokenizeConfig,
    tokenizer: TokenizerConfig,
    corpus: Corpus,
    out: Path,
    *,
    overwrite: bool = False,
) -> Plan:
    """Prepare `out`: its tokenizer is there when this returns.

    Raises ConfigError when `out` holds token files of something else, unless `overwrite`, which
    removes them; InputError when the corpus is empty.
    """
    unit_bytes = cfg.unit_bytes or corpus.unit_bytes()
    units = corpus.units(unit_bytes)
    if not units:
        raise InputError("the corpus holds no documents", where=corpus.folder)
    given = given_tokenizer(tokenizer) if isinstance(tokenizer, GivenTokenizerConfig) else None
    key_parts = {
        "corpus": {"content": corpus.manifest.content_key()},
        "tokenizer": _identity(tokenizer, given),
        "tokenize": {
            "validation_fraction": cfg.validation_fraction,
            "unit_bytes": unit_bytes,
            "special_tokens_in_text": SPECIAL_TOKENS_IN_TEXT,
        },
    }
    if overwrite:
        clear(out)
    begun = _read_begun(out)
    if begun is not None and begun.key_parts != key_parts:
        raise _other_content(out, begun.key_parts, key_parts)
    if begun is None or not _holds(out / TOKENIZER, begun.tokenizer_sha256):
        content = given or _trained(tokenizer, corpus, units, cfg.validation_fraction)
        write_atomically(out / TOKENIZER, content)
        digest = hashlib.sha256(content).hexdigest()
        begun = Begun(key_parts=key_parts, tokenizer_sha256=digest)
        write_atomically(_begun_path(out), begun.model_dump_json(indent=1) + "\n")
    if _is_complete(out, begun):
        return Plan(begun, units, [], complete=True)
    for torn in [*out.glob(".*.tmp"), *(out / WORK).glob(".*.tmp")]:  # of a killed process
        torn.unlink()
    pending = [unit for unit in units if read_marker(out, unit.index, begun.key) is None]
    (out / TokensManifest.filename).unlink(missing_ok=True)
    for unit in pending:
        marker_path(out, unit.index).unlink(missing_ok=True)
    return Plan(begun, units, pending, complete=False)


def clear(out: Path) -> None:
    """Remove all that `tokenize` writes, the manifest first."""
    (out / TokensManifest.filename).unlink(missing_ok=True)
    shutil.rmtree(out / WORK, ignore_errors=True)
    for pattern in (
        "train-*.bin",
        "train-*.idx",
        "validation-*.bin",
        "validation-*.idx",
        TOKENIZER,
    ):
        for path in out.glob(pattern):
            path.unlink()


def _identity(tokenizer: TokenizerConfig, given: bytes | None) -> dict[str, Any]:
    """What decides the tokenizer: the options of its training, or its content."""
    facts = tokenizer.model_dump(mode="json")
    if given is not None:
        del facts["path"], facts["revision"]
        facts["sha256"] = hashlib.sha256(given).hexdigest()
    return facts


def _begun_path(out: Path) -> Path:
    return out / WORK / "begun.json"


def _read_begun(out: Path) -> Begun | None:
    if TokensManifest.exists(out):
        manifest = TokensManifest.read(out)
        return Begun(key_parts=manifest.key_parts, tokenizer_sha256=manifest.tokenizer_sha256)
    try:
        return Begun.model_validate_json(_begun_path(out).read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def _holds(path: Path, sha256: str) -> bool:
    return path.is_file() and sha256_file(path) == sha256


def _is_complete(out: Path, begun: Begun) -> bool:
    if not TokensManifest.exists(out):
        return False
    manifest = TokensManifest.read(out)
    broken = [shard.stem for shard in manifest.shards if not is_whole(out, shard)]
    for stem in broken:
        log.info("%s is missing or damaged and is made anew", out / stem)
    return manifest.key == begun.key and not broken


def _trained(
    tokenizer: TokenizerConfig, corpus: Corpus, units: list[Unit], validation_fraction: float
) -> bytes:
    assert not isinstance(tokenizer, GivenTokenizerConfig)
    text_bytes = sum(unit.text_bytes for unit in units)
    total = min(tokenizer.train_bytes, text_bytes)
    log.info("learning a tokenizer of %d entries from %.1f MB", tokenizer.vocab_size, total / 1e6)
    with progress("reading for the tokenizer", total) as advance:
        sample = tokenizer_sample(
            corpus, units, tokenizer.train_bytes, validation_fraction, advance
        )
        return train_tokenizer(tokenizer, sample).encode()


def _other_content(out: Path, there: dict[str, Any], asked: dict[str, Any]) -> ConfigError:
    old, new = dict(_flat(there)), dict(_flat(asked))
    differences = [
        f"{key} is {old.get(key)!r} there, {new.get(key)!r} now"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]
    return ConfigError(
        "the folder holds token files of something else",
        where=out,
        why="; ".join(differences).replace("corpus.content is", "the corpus' sha256 is"),
        next="name another folder: tokenize.out=FOLDER, or replace what is there: --overwrite",
    )


def _flat(parts: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in parts.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
