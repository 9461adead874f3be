"""Characters without a token are counted, and a tokenizer that loses much is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from dtt.artifacts.manifests import LostText
from dtt.base.errors import InputError
from dtt.data.corpus.bad_documents import BadDocuments
from dtt.data.text.encoder import Encoder
from dtt.data.text.unencodable import Unencodable, check_lost
from dtt.data.text.unit_encoder import TextUnitEncoder

END = "<|endoftext|>"
LETTERS = "abcdefghijklmnopqrstuvwxyz "
TEXTS = [b"the cat", "the caf\u00e9 \u65e5\u672c \U0001f642".encode(), b"tea, \xc3\xa9"]
"""Six characters of two documents are neither letters nor spaces: é 日 本 🙂 , é."""


def bytes_of(alphabet: list[str], **options: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, [], **options))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def words(model: str, unknown: str | None) -> Tokenizer:
    pieces = [*([unknown] if unknown else []), "the", "cat", "tea", "##x"]
    if model == "unigram":
        scored = [(piece, -1.0) for piece in [*([unknown] if unknown else []), *LETTERS]]
        return Tokenizer(models.Unigram(scored, 0 if unknown else None))
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    if model == "bpe":
        letters = {c: i for i, c in enumerate([*([unknown] if unknown else []), *LETTERS])}
        return Tokenizer(models.BPE(letters, [], unk_token=unknown))
    kind: Any = models.WordPiece if model == "wordpiece" else models.WordLevel
    tokenizer = Tokenizer(kind(vocabulary, unk_token=unknown or "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


ALL = sorted(pre_tokenizers.ByteLevel.alphabet())
ASCII = [letter for letter in ALL if ord(letter) < 127 or letter in "\u0120\u010a"]
CASES: dict[str, tuple[Tokenizer, tuple[int, int] | None]] = {
    "all bytes": (bytes_of(ALL), None),
    "ASCII bytes": (bytes_of(ASCII), (2, 5)),
    "bpe": (words("bpe", None), (2, 6)),
    "bpe with unk": (words("bpe", "<unk>"), (2, 6)),
    "unigram": (words("unigram", "<unk>"), (2, 6)),
    "wordpiece": (words("wordpiece", "[UNK]"), (2, 9)),  # a word is lost as a whole: café 日本 🙂
    "wordlevel": (words("wordlevel", "[UNK]"), (2, 9)),
}


def opened(tokenizer: Tokenizer) -> Encoder:
    tokenizer.add_special_tokens([END])
    return Encoder(tokenizer.to_str().encode(), END, "tok.json")


@pytest.mark.parametrize(("tokenizer", "expected"), CASES.values(), ids=CASES)
def test_lost_characters_are_counted(
    tokenizer: Tokenizer, expected: tuple[int, int] | None
) -> None:
    encoder = opened(tokenizer)
    lost = TextUnitEncoder(encoder).encode(TEXTS, BadDocuments()).lost
    if expected is None:
        assert lost is None
        return
    assert lost is not None
    assert (lost.documents, lost.characters) == expected
    assert lost.of == sum(len(text.decode()) for text in TEXTS)
    assert "\u00e9" in "".join(lost.such_as)
    with pytest.raises(InputError, match="has no tokens for"):
        check_lost(lost, "tok.json")
    check_lost(LostText(documents=1, characters=1, of=1000), "tok.json")


def test_what_a_normalizer_removes_on_purpose_is_not_lost() -> None:
    tokenizer = words("bpe", None)
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])
    lost = opened(tokenizer).lost.count(["caf\u00e9".encode()], opened(tokenizer).encode([b""]).ids)
    assert lost is not None
    assert lost.characters == 0


@pytest.mark.parametrize("model", ["unigram", "wordpiece", "wordlevel"])
def test_documents_that_cannot_be_encoded_are_refused_one_by_one(model: str) -> None:
    encoder = opened(words(model, None))
    refused = BadDocuments()
    part = TextUnitEncoder(encoder).encode([b"the cat", TEXTS[1], b"cat", TEXTS[2]], refused)
    assert len(part.lengths) == 2
    assert part.text_bytes == len(b"the catcat")
    assert refused.count == 2
    assert "the caf\u00e9" in refused.examples[0]
    with pytest.raises(Unencodable, match=r"tok\.json"):
        encoder.encode([TEXTS[1]])


def test_a_pattern_without_end_refuses_one_document_and_prints_no_panic(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    facts = json.loads(bytes_of(ALL).to_str())
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$|((a|a)*)*b"}, "behavior": "Isolated",
             "invert": False}  # fmt: skip
    parts = [split, facts["pre_tokenizer"] | {"use_regex": False}]
    facts["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": parts}
    encoder = opened(Tokenizer.from_str(json.dumps(facts)))
    refused = BadDocuments()
    part = TextUnitEncoder(encoder).encode([b"once", b"a" * 60 + b"c", b"upon"], refused)
    assert part.lengths.tolist() == [5, 5]
    assert "its pattern failed" in refused.examples[0]
    assert "panicked" not in capfd.readouterr().err
