"""Opening of the sources of a run: token files, a kind with samples of its own, and classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dtt.artifacts.manifest import fingerprint
from dtt.artifacts.manifests import TokensManifest
from dtt.base.errors import ConfigError
from dtt.config.run import RunConfig
from dtt.config.sources import AnySource, OneSource, Rows, Source, SourceConfig
from dtt.data.corpus.described import check_tokens
from dtt.data.samples import compatibility
from dtt.data.samples.named_tokenizer import read_vocabulary
from dtt.data.samples.own_rows import encoded, row_numbers
from dtt.data.samples.own_source import open_own
from dtt.data.samples.protocol import OpenedSource, SampleSource, Vocabulary
from dtt.data.samples.token_source import TokenSource, open_tokens


def open_sources(cfg: RunConfig, sources: Sequence[AnySource]) -> list[OpenedSource]:
    """Open all `sources` of a run, or else the one that `cfg.data` is."""
    if isinstance(cfg.data, Source):
        return [_open_one(cfg, cfg.data, None, cfg.data.label)]
    if isinstance(cfg.data, OneSource):
        return [cfg.data.open_samples(cfg)]
    path = cfg.data.tokenizer
    given = None if path is None else read_vocabulary(path)
    opened = [_open_source(cfg, source, given) for source in sources]
    named = [] if given is None else [("data.tokenizer", given)]
    named += [(source.train.name, source.vocabulary) for source in opened]
    # All sources of a run need the same ids for the same text.
    compatibility.check_one_tokenizer([(name, its.tokenizer, its.sha256) for name, its in named])
    return opened


def _open_source(cfg: RunConfig, source: AnySource, given: Vocabulary | None) -> OpenedSource:
    """Open a source of a mixture; `given` is the vocabulary of `data.tokenizer`."""
    held_out, name = source.validation, source.label
    opened = _open_one(cfg, source, given, name)
    if isinstance(held_out, Source):
        other = _open_one(cfg, held_out, given, name)
        validation: SampleSource | None = other.train
    elif held_out is not None and not isinstance(source, SourceConfig):
        files = SourceConfig(path=held_out, validation=held_out, name=name)
        other = _open_token_files(cfg, files, given)
        validation = other.validation
    else:
        return opened
    named = [(name, opened.vocabulary), ("its validation", other.vocabulary)]
    compatibility.check_one_tokenizer([(name, its.tokenizer, its.sha256) for name, its in named])
    return replace(opened, validation=validation)


def _open_one(
    cfg: RunConfig, source: AnySource | Source, given: Vocabulary | None, name: str
) -> OpenedSource:
    """Open a source without its key `validation`."""
    if isinstance(source, SourceConfig):
        return _open_token_files(cfg, source, given)
    if not isinstance(source, Rows):
        return open_own(source, cfg, name)
    folder = encoded(source, cfg)
    opened = _open_token_files(cfg, SourceConfig(path=folder, name=name), given)
    assert isinstance(opened.train, TokenSource)
    return replace(opened, train=opened.train.made_from(name, row_numbers(folder)))


def _open_token_files(
    cfg: RunConfig, source: SourceConfig, given: Vocabulary | None
) -> OpenedSource:
    """Open the token files of one source.

    `given` is the vocabulary of `data.tokenizer`. It is needed for token files without a dtt
    manifest, as they do not name their tokenizer.
    """
    options: dict[str, Any] = {
        "seq_len": cfg.train.seq_len,
        "seed": cfg.seed,
        "packing": cfg.data.packing,
        "too_long": cfg.chat.too_long,
        "vocab_size": given and given.size,
        "end_of_document": given and given.end_of_document,
        "doc_ids": cfg.separates_documents,
        "eod_mask_loss": cfg.data.eod_mask_loss,
    }
    found = TokensManifest.read(source.path) if TokensManifest.is_in(source.path) else None
    if found is not None:
        check_tokens(cfg, source.path, found)
    chat, pairs = (None, False) if found is None else (found.chat, found.pairs)
    train = open_tokens(source, "train", **options)
    # After opening: missing files are another mistake.
    compatibility.check_conversations(source.label, source.path, chat, cfg, pairs=pairs)
    validation = open_tokens(source, "validation", **options)
    manifest, key = train.files.manifest, train.files.key
    if manifest is not None:
        vocabulary = Vocabulary(
            source.path / "tokenizer.json",
            manifest.tokenizer_sha256,
            manifest.vocab_size,
            manifest.end_of_document,
            manifest.begin_of_document,
        )
    elif given is not None:
        # Such files do not name their tokenizer, so its hash joins their key: the same ids with
        # another tokenizer are other data.
        vocabulary, key = given, fingerprint([key, given.sha256])
    else:
        raise ConfigError(
            f"it is unknown which tokenizer created the token files of {train.name}",
            where=source.path,
            why="token files that dtt did not create do not record it",
            next="data.tokenizer=PATH/tokenizer.json",
        )
    return OpenedSource(
        train,
        validation if len(validation) else None,
        key,
        vocabulary,
        None if manifest is None else manifest.corpus,
        chat,
    )
