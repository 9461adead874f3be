"""Stages of training: one configuration that describes several jobs, each starting from the last.

Each entry of the list `stages` overlays the rest of the configuration, the common part.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dtt.base.errors import ConfigError
from dtt.config.data import TrainedTokenizerConfig
from dtt.config.init import MAY_DIFFER
from dtt.config.key_types import STAGES, Key
from dtt.config.layers import Layer, Leaf, from_mapping, shown
from dtt.config.merging import Resolved
from dtt.config.run import NAME

INIT_FROM: Key = ("init", "from")
CARRIED = ("model", "scaling", "tokenizer")
"""Sections that later stages take from the first stage, unless they set their keys."""
RESERVED = frozenset({"attempts", "checkpoints", "code", "control", "logs"})
"""Names of folders that `jobs/<name>/` may hold besides the stages."""
EXAMPLE = "for example - {name: sft, train: {steps: 500}}"


@dataclass(frozen=True)
class Entry:
    """A stage as the configuration describes it."""

    name: str
    overlay: tuple[Layer, ...]
    """Its entry of the list, and the keys `stages.NAME.KEY` of each layer, lowest first."""


def take(layers: Sequence[Layer]) -> tuple[list[Layer], list[Entry]]:
    """Return the layers without `stages`, and the stages in order; none for a plain configuration.

    The list of the highest layer that has one defines the stages. Keys `stages.NAME.KEY` of any
    layer override single keys of them. Raises ConfigError, with file and line, for a list that
    describes no stages.
    """
    lists = [layer[STAGES] for layer in layers if STAGES in layer]
    # The highest list wins as a whole. Merging lists by position would combine unrelated stages.
    entries = _entries(lists[-1]) if lists else {}
    overlays = {name: [entry] for name, entry in entries.items()}
    common: list[Layer] = []
    for layer in layers:
        own: dict[str, Layer] = {}
        # Dotted keys of a stage stay in their layer, so that their precedence is that of the layer.
        for key, leaf in layer.items():
            if key[:1] == STAGES and len(key) > 1:
                if not entries and leaf.origin.startswith("environment"):
                    continue  # it also reaches commands that read a job's own configuration
                _check_name(key, leaf, entries)
                own.setdefault(key[1], {})[key[2:]] = leaf
        for name, overlay in own.items():
            overlays[name].append(overlay)
        common.append({key: leaf for key, leaf in layer.items() if key[:1] != STAGES})
    return common, [Entry(name, tuple(overlay)) for name, overlay in overlays.items()]


def _entries(leaf: Leaf) -> dict[str, Layer]:
    """Return the entries of the list by name, without the name."""
    # A dict keeps the order, in which the stages train.
    entries: dict[str, Layer] = {}
    if not isinstance(leaf.value, list) or not leaf.value:
        raise ConfigError(
            "stages must be a list with at least one stage",
            where=leaf.origin,
            why=f"got {shown(leaf.value)}",
            next=f"omit it, or define a stage, {EXAMPLE}",
        )
    for entry in leaf.value:
        # The origin of the first key of the entry stands for the entry, which has no line of its
        # own.
        first = next((inner.origin for inner in entry.values()), leaf.origin)
        name = entry.get(("name",), Leaf(None, first))
        if not isinstance(name.value, str) or not re.fullmatch(NAME, name.value):
            given = "it has none" if name.value is None else f"got {shown(name.value)}"
            raise ConfigError(
                "a stage needs a name of letters, digits and . _ -",
                where=name.origin,
                why=given,
                next=EXAMPLE,
            )
        # The name becomes a folder below that of the job.
        if name.value in entries or name.value in RESERVED:
            taken = "two stages have it" if name.value in entries else "a job uses that folder"
            raise ConfigError(f"no stage can be named {name.value}", where=name.origin, why=taken)
        # Nested stages have no meaning, and a file can be extended at the top only.
        for key, inner in entry.items():
            if key[0] in ("stages", "extends"):
                raise ConfigError(
                    f"{key[0]} cannot be part of a stage",
                    where=inner.origin,
                    next="write it at the top of the file",
                )
        entries[name.value] = {key: inner for key, inner in entry.items() if key != ("name",)}
    return entries


def _check_name(key: Key, leaf: Leaf, entries: Mapping[str, Layer]) -> None:
    """Raise ConfigError unless a key `stages.NAME.KEY` names a stage and a key."""
    if not entries:
        why = "stages is a list, and the configuration has none"
        raise ConfigError(
            f"{'.'.join(key)}: no such stage", where=leaf.origin, why=why, next=EXAMPLE
        )
    if key[1] not in entries:
        raise unknown(key[1], list(entries), leaf.origin)
    if len(key) == 2 or key[2:] == ("name",):
        raise ConfigError(
            f"{'.'.join(key)} does not name a key of a stage",
            where=leaf.origin,
            next=f"for example stages.{key[1]}.train.steps=500",
        )


def unknown(name: str, names: Sequence[str], origin: str) -> ConfigError:
    """Return the error for the name of a stage that does not exist."""
    close = difflib.get_close_matches(name, names, n=1)
    return ConfigError(
        f"no stage {name!r}",
        where=origin,
        why=f"the stages are {', '.join(names)}",
        next=f"did you mean {close[0]}?" if close else f"use {names[0]}",
    )


def layers_of(
    entry: Entry, common: Sequence[Layer], name: Leaf, first: Resolved | None, previous: Path
) -> list[Layer]:
    """Return the layers of a stage, lowest first; `common` are those of the common part.

    `name` is that of the configuration. `first` is the first stage, None for that stage itself. A
    later stage has the model and the tokenizer of the first one unless it sets their keys, and
    starts from the job `previous`. Raises ConfigError if it sets `init.from` to another source.
    """
    if not isinstance(name.value, str) or "/" in name.value:
        # A slash in a name is the folder of a sweep, and the stage would add a second level.
        raise ConfigError(
            f"a configuration with stages cannot be named {shown(name.value)}",
            where=name.origin,
            why="the job of a stage is NAME/STAGE, and a trial of a sweep has no stages",
            next="set name=ANOTHER",
        )
    own: Layer = {("name",): Leaf(f"{name.value}/{entry.name}", name.origin)}
    if first is None:
        return [*common, *entry.overlay, own]
    for layer in entry.overlay:
        leaf = layer.get(INIT_FROM, Leaf(None, ""))
        # Writing out the value that is set below is no mistake.
        if leaf.value not in (None, str(previous)):
            raise ConfigError(
                f"init.from of stage {entry.name} cannot be {leaf.value}",
                where=leaf.origin,
                why=f"a stage starts from the one before it, {previous}",
                next="omit it, or set it in the common part, where it applies to the first stage",
            )
    carried = {key: leaf for key, leaf in first.layer.items() if key[0] in CARRIED}
    # `init.from` of the common part is for the first stage.
    before = [{k: v for k, v in layer.items() if k != INIT_FROM} for layer in common]
    own[INIT_FROM] = Leaf(str(previous), "the previous stage")
    return [*before, carried, *entry.overlay, own]


def trained_tokenizer(first: Resolved, stage: Resolved) -> Layer | None:
    """Return the tokenizer that the first stage trains, for a stage that tokenizes other text.

    None if that stage has its own tokenizer, or the first one a given tokenizer.
    """
    cfg = first.config
    ours, theirs = (
        {key: leaf for key, leaf in r.layer.items() if key[0] == "tokenizer"}
        for r in (stage, first)
    )
    same_folder = stage.config.tokenize_dir == cfg.tokenize_dir
    if not isinstance(cfg.tokenizer, TrainedTokenizerConfig) or not cfg.token_sources:
        return None
    if same_folder or ours != theirs:
        return None
    source = cfg.token_sources[0]
    # All folders of a pattern have one tokenizer, but which of them will exist is not known here.
    folder = cfg.tokenize_dir if source.is_pattern else source.path
    section = {
        "type": "file",
        "path": str(folder / "tokenizer.json"),
        "end_of_document": cfg.tokenizer.special_tokens[0],
    }
    return from_mapping({"tokenizer": section}, f"trained in {cfg.name}")


def problems(stage: Resolved, first: Resolved) -> Iterator[tuple[Key, str]]:
    """Yield each key of a stage that does not fit the model or the folders of the first stage."""
    where = f"in stage {first.config.name.rpartition('/')[2]}"
    ours, theirs = (r.config.model_dump(mode="json") for r in (stage, first))
    for section in ("model", "scaling"):
        # Dumped values are compared, so that different spellings of one value are equal.
        for name, value in ours[section].items():
            other = theirs[section].get(name)
            if value != other and not (section == "model" and name in MAY_DIFFER):
                yield (
                    (section, name),
                    f"{shown(value)} here, {shown(other)} {where}: all stages train the same model",
                )
    same_folder = stage.config.tokenize_dir == first.config.tokenize_dir
    places = [(r.config.corpus_dir, r.config.clean) for r in (stage, first)]
    if same_folder and places[0] != places[1]:
        folder = stage.config.tokenize_dir
        yield ("tokenize", "out"), f"{folder} contains the tokens of other text {where}"
