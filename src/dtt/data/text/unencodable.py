"""What a tokenizer cannot encode: texts that raise errors, and characters without a token.

Characters become an unknown token, or vanish. Patterns panic in the Rust code of `tokenizers`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, pre_tokenizers

from dtt.artifacts.manifests import LostText
from dtt.base.errors import InputError
from dtt.data.text.tokenizer import sections

MOST = 0.1
"""Share of lost characters above which a tokenizer is refused: it was made for other text. Texts
with some emoji or foreign names lose below 1 %, another script loses nearly everything."""
EXAMPLES = 5


class LostCharacters:
    """A counter of the characters that a tokenizer loses.

    Nearly all tokenizers have a token for each byte and lose nothing; for them it does nothing.
    """

    def __init__(self, tokenizer: Tokenizer, facts: dict[str, Any]) -> None:
        """Take a tokenizer and the decoded content of its tokenizer.json."""
        model, vocabulary = facts["model"], facts["model"]["vocab"]
        is_bpe, is_unigram = "merges" in model, isinstance(vocabulary, list)
        names = {token for token, _ in vocabulary} if is_unigram else {*vocabulary}
        parts = [*sections(facts.get("pre_tokenizer")), *sections(facts.get("normalizer"))]
        self._byte_level = any(part["type"] == "ByteLevel" for part in parts)
        if self._byte_level:
            alphabet = set(pre_tokenizers.ByteLevel.alphabet())
        else:
            alphabet = {f"<0x{byte:02X}>" for byte in range(256)}
        has_bytes = self._byte_level or bool(model.get("byte_fallback"))
        self._tokenizer = tokenizer
        self._unknown: int | None = model.get("unk_id")
        if model.get("unk_token") is not None:
            self._unknown = tokenizer.token_to_id(model["unk_token"])
        # Without an unknown token, BPE drops characters, and all others raise an error.
        raises = self._unknown is None and not is_bpe
        complete = (is_bpe or is_unigram) and has_bytes and alphabet <= names
        self.possible = not raises and not complete
        """False if no character can be lost."""
        added = facts.get("added_tokens") or ()
        self._special = [token["content"] for token in added if token["special"]]
        self._lost: dict[str, bool] = {}
        """Whether each character that was met is lost, without an unknown token."""

    def count(self, texts: list[bytes], ids: npt.NDArray[Any]) -> LostText | None:
        """Return what is lost of `texts`, whose tokens are `ids`; None if nothing can be."""
        if not self.possible:
            return None
        decoded = [text.decode() for text in texts]
        found = LostText(of=sum(map(len, decoded)))
        if self._unknown is not None and not (ids == self._unknown).any():
            return found
        for text in decoded:
            if self._unknown is None:
                characters = set(text)
                for character in characters - self._lost.keys():
                    self._lost[character] = self._vanishes(character)
                # Most texts lose nothing: they are not gone through again.
                vanished = {character for character in characters if self._lost[character]}
                lost = [one for one in text if one in vanished] if vanished else []
            else:
                encoding = self._tokenizer.encode(text, add_special_tokens=False)
                places = np.flatnonzero(np.array(encoding.ids) == self._unknown).tolist()
                lost = [text[slice(*encoding.offsets[place])] for place in places]
            found += LostText(
                documents=bool(lost), characters=sum(map(len, lost)), such_as=(*lost[:EXAMPLES],)
            )
        return found

    def in_conversation(self, text: str, ids: npt.NDArray[Any]) -> LostText | None:
        """Return what is lost of a rendered conversation, apart from its special tokens."""
        for token in self._special if self.possible else ():
            text = text.replace(token, "")
        return self.count([text.encode()], ids)

    def _vanishes(self, character: str) -> bool:
        """Return True if a character has no token, or only some of its bytes have."""
        normalizer = self._tokenizer.normalizer
        if normalizer is not None and not normalizer.normalize_str(character).strip():
            return False  # the tokenizer removes it on purpose
        tokens = self._tokenizer.encode(character, add_special_tokens=False).tokens
        if self._byte_level and normalizer is None:
            return sum(map(len, tokens)) < len(character.encode())
        return not tokens and not character.isspace()


def check_lost(lost: LostText | None, where: object) -> None:
    """Raise InputError if a tokenizer, that of `where`, loses more than MOST of the text."""
    if lost is not None and lost.characters > MOST * lost.of:
        raise InputError(
            f"the tokenizer has no tokens for {lost.characters / lost.of:.0%} of the text",
            where=where,
            why=lost.describe(),
            next="use a tokenizer that was made for such text, or one with a token for each byte: "
            "tokenizer.type=bpe trains one",
        )


class Unencodable(InputError):
    """A text that a tokenizer cannot encode."""

    def __init__(self, where: object, why: str) -> None:
        """Name the tokenizer by `where` it is."""
        super().__init__(
            "the tokenizer cannot encode a text",
            where=where,
            why=why,
            next="use a tokenizer that was made for such text, or remove the text",
        )
        self.why = why


_lock = Lock()
_inside: list[Any] = []
"""What the calls inside of `encoding` share: their number, and the descriptors of stderr."""


@contextmanager
def encoding(where: object, *, patterns: bool = True) -> Iterator[None]:
    """Raise Unencodable for errors of `tokenizers`, whose tokenizer.json is at `where`.

    They are of no specific class: an Exception for a missing unknown token, and for a pattern that
    takes too many steps a panic, which is a BaseException. Without `patterns`, there is none.
    """
    try:
        with _without_panics() if patterns else nullcontext():
            yield
    except BaseException as error:
        panic = type(error).__name__ == "PanicException"
        if not panic and type(error) is not Exception:
            raise
        why = " ".join(str(error).split())[:200]
        raise Unencodable(where, f"its pattern failed: {why}" if panic else why) from None


@contextmanager
def _without_panics() -> Iterator[None]:
    """Discard what Rust prints about a panic, which `encoding` reports; keep all other lines.

    Rust writes to the descriptor of stderr itself, so that is replaced meanwhile: 10 µs a call.
    """
    with _lock:
        if not _inside:
            aside = tempfile.TemporaryFile()  # noqa: SIM115  closed by the last one
            _inside[:] = [0, os.dup(2), aside]
            os.dup2(aside.fileno(), 2)
        _inside[0] += 1
    try:
        yield
    finally:
        with _lock:
            _inside[0] -= 1
            if not _inside[0]:
                _, stderr, aside = _inside
                _inside.clear()
                os.dup2(stderr, 2)
                os.close(stderr)
                with aside:
                    aside.seek(0)
                    panic = False
                    for line in aside:
                        panic = b"panicked at" in line or (panic and not line[:1].isdigit())
                        if not panic:
                            os.write(2, line)
