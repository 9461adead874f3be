"""The vocabulary of a tokenizer.json that the configuration names."""

from __future__ import annotations

from pathlib import Path

from dtt.base.errors import InputError
from dtt.base.files import sha256_file
from dtt.base.reading import read_whole
from dtt.data.samples.protocol import Vocabulary
from dtt.data.text.encoder import Encoder


def read_vocabulary(path: Path) -> Vocabulary:
    """Return the vocabulary of a tokenizer.json.

    Raises InputError if the file does not exist, and ConfigError if it has no end-of-document
    token.
    """
    try:
        encoder = Encoder(read_whole(path), None, path)
    except FileNotFoundError:
        raise InputError(
            "there is no tokenizer", where=path.absolute(), next="data.tokenizer=FILE"
        ) from None
    return Vocabulary(path, sha256_file(path), encoder.vocab_size, encoder.end_of_document)
