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
from dtt.data.samples.own_source import encoded, open_own, row_numbers
from dtt.data.samples.protocol import OpenedSource, SampleSource, Vocabulary
from dtt.data.samples.token_source import TokenSource


def open_sources(cfg: RunConfig, sources: Sequence[AnySource]) -> list[OpenedSource]:
    """Open all `sources` of a run, or else the one that `cfg.data` is."""
    if isinstance(cfg.data, Source):
        return [_open_one(cfg, cfg.data, None, cfg.data.label)]
    if isinstance(cfg.data, OneSource):
        return [cfg.data.open_samples(cfg)]
    path = cfg.data.tokenizer
    given = None if path is None else Vocabulary.read(path)
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
    if TokensManifest.is_in(source.path):
        check_tokens(cfg, source.path, TokensManifest.read(source.path))
    train = TokenSource(source, "train", **options)
    manifest, key = train.files.manifest, train.files.key
    # After opening: missing files are another mistake.
    _check_conversations(cfg, source, manifest)
    validation = TokenSource(source, "validation", **options)
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
        None if manifest is None else manifest.chat,
    )


def _check_conversations(
    cfg: RunConfig, source: SourceConfig, manifest: TokensManifest | None
) -> None:
    """Raise ConfigError if a source has conversations and the run is not for them, or vice versa.

    Attention, positions and packing must respect conversations; `data.type: tokens` can do so, too,
    for mixtures of conversations and text.
    """
    data, name, where = cfg.data, source.label, source.path
    pairs = manifest is not None and manifest.pairs
    if pairs != data.has_pairs:
        held = "preference pairs" if pairs else "no preference pairs"
        raise ConfigError(
            f"the token files of {name} hold {held}, but data.type={data.type}",
            where=where,
            next="data.type=preference objective.type=dpo"
            if pairs
            else "create them from rows with chosen and rejected: "
            "dtt tokenize data.type=preference",
        )
    if manifest is None or manifest.chat is None:
        if data.has_conversations:
            raise ConfigError(
                f"the token files of {name} hold text, not conversations",
                where=where,
                why="they have no loss masks",
                next="create them with dtt tokenize data.type=chat; or, to mix both: "
                "data.type=tokens data.packing=best-fit data.mask_documents=true",
            )
        return
    if data.packing == "concat" or not data.mask_documents:
        raise ConfigError(
            f"{name} holds conversations, which data.type=tokens would cut or mix",
            where=where,
            why=f"data.packing is {data.packing}, data.mask_documents {data.mask_documents}",
            next="data.type=chat; or, to mix them with text: data.packing=best-fit"
            " data.mask_documents=true",
        )
    if cfg.train.context_schedule:
        raise ConfigError(
            "train.context_schedule would cut conversations",
            where=where,
            why="a shorter context divides samples, and packed conversations with them",
            next="omit train.context_schedule",
        )
