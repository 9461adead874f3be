"""`init.from`: initialise a new model from another job's checkpoint or from released weights."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from dtt.artifacts.jobdir import JobDir
from dtt.artifacts.manifests import CHAT_TEMPLATE, DataManifest
from dtt.base.errors import ConfigError, DttError
from dtt.base.files import in_size
from dtt.base.log import log
from dtt.base.reading import read_whole
from dtt.checkpoint import store
from dtt.config.init import HF, MAY_DIFFER
from dtt.config.load import load_job
from dtt.hf.model_source import find_model

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from dtt.checkpoint.store import Checkpoint
    from dtt.hf.read import LoadedModel
    from dtt.mesh.dist import World
    from dtt.mesh.sharding import FullTensor
    from dtt.model.architecture import AnyArchitecture
    from dtt.model.contract import Model
    from dtt.params.table import Params
    from dtt.train.warm_start import NewTokens

OTHER_SCALING = "the scaling multipliers differ"


def initialise_from(
    source: str, model: Model, tokenizer: Path | None, world: World, *, average: bool = False
) -> Checkpoint | None:
    """Initialise `model` from `source`, the value of `init.from`; return the checkpoint, if any.

    Rank 0 finds and verifies the weights for all ranks. Logs which weights were loaded. With
    `average`, takes the moving average of a checkpoint's weights. Raises ConfigError if the
    checkpoint has none, or if a Hugging Face model has a different architecture.

    Warns if another job's architecture differs, or if ids of `tokenizer` (that of the data) stood
    for different text in the source. These are not errors, because more layers, renamed special
    tokens, or the body of a model for another vocabulary may be intended. The validation loss
    before the first step shows the effect. `tokenizer` is None for data whose ids stand for no
    text: they add no token, and nothing is compared.

    For conversations, tokens that only they contain start from the mean of the others, if the
    source was not trained on conversations; see `new_tokens`. The frozen weights below an
    adapter must all be in the source, with the same shapes.
    """
    from dtt.train.warm_start import NewTokens, take_weights

    state: Mapping[str, FullTensor]
    checkpoint: Checkpoint | None = None
    if source.startswith(HF):
        from dtt.hf.read import read_hf_folder
        from dtt.model.architecture import Architecture

        folder = world.from_first(find_model(source.removeprefix(HF)) if world.first else None)
        assert folder is not None
        trained = read_hf_folder(folder)
        check_architecture(model.arch, trained.arch, folder)
        if world.first and isinstance(trained.arch, Architecture):
            compare(folder, trained)
        state, theirs, where, differences = trained.state, trained.tokenizer, folder, ""
        rows = trained.arch.vocab_size
    else:
        from dtt.hf.read_checkpoint import architecture, checkpoint_weights

        checkpoint = world.from_first(store.find(source) if world.first else None)
        assert checkpoint is not None
        state = checkpoint_weights(checkpoint, average=average, check=world.first)
        where = checkpoint.path
        job = JobDir(where.parents[1])
        theirs = job.tokenizer
        arch = architecture(job)
        differences, rows = difference(model.arch, arch), arch.vocab_size
    new = None
    if world.first and tokenizer is not None:
        new = new_tokens(source, tokenizer, theirs, rows)
    new = world.from_first(new) or NewTokens()
    log.info("%s", take_weights(model, state, str(where), new))
    if differences:
        log.warning("the architecture of %s differs: %s", where, differences)
    if world.first and tokenizer is not None:
        warn_of_other_vocabulary(tokenizer, theirs)
    return checkpoint


def carry_optimizers(
    optimizers: Mapping[str, Optimizer], params: Params, checkpoint: Checkpoint
) -> None:
    """Load the state of the optimizers from the checkpoint of another job (`init.optimizer`).

    Raises ConfigError unless that job has the same parameters and optimizers.
    """
    from dtt.train.state import difference, load_optimizers

    if why := difference(params, checkpoint.stored(store.MODEL)):
        raise ConfigError(
            f"the optimizer state of {checkpoint.path} is for other parameters",
            where="init.optimizer",
            why=why,
            next="init.optimizer=fresh",
        )
    load_optimizers(optimizers, checkpoint.stored(store.STATE), params.mesh.gather)
    log.info("optimizer state from %s", checkpoint.path)


def new_tokens(source: str, tokenizer: Path, theirs: Path, rows: int) -> NewTokens:
    """Return which tokens of `tokenizer`, that of the data, start afresh.

    `theirs` is the tokenizer of `source`, whose embedding has `rows` rows: often more than it has
    tokens, so that a token that only the data has can fall into a row that nothing ever trained.
    """
    from dtt.train.warm_start import NewTokens

    untrained = untrained_tokens(source, tokenizer)
    if not theirs.is_file():
        return NewTokens(untrained=untrained)
    used = _texts(theirs).keys()
    added = {i: t for i, t in _texts(tokenizer).items() if i < rows and i not in used}
    untrained = {i: token for i, token in untrained.items() if i not in added}
    return NewTokens(added, untrained, frozenset(range(rows)) - used)


def untrained_tokens(source: str, tokenizer: Path) -> dict[int, str]:
    """Return the special tokens, by id, of the data's chat template that `source` never trained.

    dtt encodes the strings of special tokens in documents as text, so plain text trains none but
    those that begin and end documents. The result is empty if `tokenizer` has no template next to
    it, and if the source was trained on conversations or this is not known.
    """
    template = tokenizer.with_name(CHAT_TEMPLATE)
    if not template.is_file() or trained_on_conversations(source):
        return {}
    from dtt.data.text.encoder import Encoder
    from dtt.data.text.tokenizer import open_tokenizer

    text, trained = read_whole(template).decode(), marks_of_documents(source)
    end = Encoder(read_whole(tokenizer), None, tokenizer).end_of_document
    added = open_tokenizer(tokenizer).get_added_tokens_decoder()
    return {
        i: token.content
        for i, token in added.items()
        if token.special and i not in (end, *trained) and token.content in text
    }


def marks_of_documents(source: str) -> set[int]:
    """Return the tokens that began or ended documents in the training of `source`, by id."""
    if not source.startswith(HF):
        root = store.parse(source)[0].parent
        data, start = DataManifest.read(root), load_job(root).init.source
        own = {i for i in (data.end_of_document, data.begin_of_document) if i is not None}
        return own | (marks_of_documents(start) if start is not None else set())
    from dtt.data.text.tokenizer import begin_of_document, open_tokenizer
    from dtt.hf.chat_format import eos_token_ids, read_config
    from dtt.model.families import multimodal

    folder = find_model(source.removeprefix(HF))
    marks = {*eos_token_ids(folder)}
    begin = multimodal.text_config(read_config(folder / "config.json")).get("bos_token_id")
    with suppress(ConfigError):  # it adds other tokens than one before a text
        begin = begin_of_document(open_tokenizer(folder / "tokenizer.json"), folder) or begin
    return marks | ({begin} if isinstance(begin, int) else set())


def trained_on_conversations(source: str) -> bool:
    """Return True if the weights of `source` were trained on conversations, or if it is not known.

    Released weights count as such if they come with a chat template. Another job counts if its data
    had conversations, or the weights from which it started itself.
    """
    from dtt.data.text.side_files import CONFIG, object_beside

    if source.startswith(HF):
        folder = find_model(source.removeprefix(HF))
        named = "chat_template" in object_beside(folder / CONFIG)
        return named or (folder / CHAT_TEMPLATE).is_file()
    root = store.parse(source)[0].parent
    try:
        start, data = load_job(root).init.source, DataManifest.read(root)
        # Token files of other tools, which name no corpus, may contain special tokens.
        if data.chat is not None or any(part.corpus is None for part in data.sources):
            return True
        return start is not None and trained_on_conversations(start)
    except DttError:  # for example, the weights that it started from were deleted
        return True


def check_source(source: str) -> None:
    """Raise InputError unless `source` names a job with checkpoints or a model that exists."""
    if source.startswith(HF):
        find_model(source.removeprefix(HF))
    else:
        store.locate(source)


def compare(folder: Path, trained: LoadedModel) -> None:
    """Compare the logits of the model read from `folder` with those of `transformers`.

    Skips the comparison, with a warning, if an fp32 model does not fit into free memory.
    """
    from dtt.base import host_memory
    from dtt.hf.verify import check_import
    from dtt.model import count

    needed, free = 4 * count.parameters(trained.arch), host_memory.free()
    if needed > free:
        log.warning(
            "skipped comparing the logits of %s with transformers: "
            "it needs %s of memory, and %s are free",
            *(folder, in_size(needed), in_size(free)),
        )
        return
    difference = check_import(folder, trained)
    log.info("the logits of %s differ from those of transformers by %.1e", folder, difference)


def check_architecture(ours: AnyArchitecture, theirs: AnyArchitecture, where: Path) -> None:
    """Raise ConfigError, with the `model` section to use, if the architectures differ."""
    from dtt.hf.library_folder import section_of
    from dtt.model.architecture import Architecture
    from dtt.model.families.base import model_section

    why = difference(ours, theirs)
    if not why:
        return
    keys = model_section(theirs) if isinstance(theirs, Architecture) else section_of(theirs)
    section = yaml.safe_dump({"model": keys}, sort_keys=False)
    raise ConfigError(
        f"the model of this run differs from the one in {where}",
        where="init.from",
        why=why,
        next="scaling.type=standard"
        if why == OTHER_SCALING
        else f"use its model section:\n\n{section}",
    )


def difference(ours: AnyArchitecture, theirs: AnyArchitecture) -> str:
    """Return a description of the keys that make two models with equal weights compute differently.

    Returns an empty string if there are none. Comparing shapes is not enough: the number of heads,
    attention windows and RoPE settings do not change any shape.
    """
    from dtt.model.architecture import Architecture
    from dtt.model.families.base import model_section

    def keys(arch: AnyArchitecture) -> Mapping[str, object]:
        if isinstance(arch, Architecture):
            return model_section(arch)
        return arch.section.model_dump(mode="json")

    plain = isinstance(ours, Architecture) and isinstance(theirs, Architecture)
    if not plain and ours.family != theirs.family:
        return f"the family is {ours.family} here, {theirs.family} there"
    if plain and ours == replace(theirs, **{name: getattr(ours, name) for name in MAY_DIFFER}):
        return ""
    here, there = keys(ours), keys(theirs)
    others = [k for k in {**here, **there} if k not in MAY_DIFFER and here.get(k) != there.get(k)]
    listed = "; ".join(f"{k} {here.get(k)} here, {there.get(k)} there" for k in others)
    return listed or (OTHER_SCALING if plain else "")


def _texts(tokenizer: Path) -> dict[int, str]:
    """Return the text of each id of a tokenizer."""
    from dtt.data.text.tokenizer import open_tokenizer

    return {i: token for token, i in open_tokenizer(tokenizer).get_vocab().items()}


def check_vocabulary_of_stage(ours: Path, theirs: Path) -> None:
    """Raise ConfigError if a token id decodes to different text than in the previous stage.

    `ours` and `theirs` are tokenizers. More tokens, and other names of special tokens, are allowed.
    """
    from dtt.data.text.tokenizer import open_tokenizer

    if not theirs.is_file():
        return
    special = [
        {i for i, token in open_tokenizer(t).get_added_tokens_decoder().items() if token.special}
        for t in (ours, theirs)
    ]
    now, before = _texts(ours), _texts(theirs)
    others = sorted(
        i
        for i, token in before.items()
        if now.get(i) != token and not (i in special[0] and i in special[1])
    )
    if others:
        i = others[0]
        raise ConfigError(
            f"{len(others)} of {len(before)} token ids decode to different text than in the "
            "previous stage",
            where=ours,
            why=f"{i} is {repr(now[i]) if i in now else 'unknown'} here, {before[i]!r} in {theirs}",
            next=f"tokenize this text with tokenizer.type=file tokenizer.path={theirs}",
        )


def warn_of_other_vocabulary(ours: Path, theirs: Path) -> None:
    """Warn if ids of the tokenizer `ours` decode to different text with `theirs`.

    Does nothing if the file `theirs` does not exist.
    """
    if not theirs.is_file():
        return
    now, before = _texts(ours), _texts(theirs)
    others = sorted(i for i in now if now[i] != before.get(i))
    if others:
        i = others[0]
        there = repr(before[i]) if i in before else "unknown"
        log.warning(
            "%d of the %d token ids of the data decode to other text than with the model of the "
            "weights: %d is %r here, %s there",
            *(len(others), len(now), i, now[i], there),
        )
