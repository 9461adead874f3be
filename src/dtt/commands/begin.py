"""`init.from`: initialise a new model from another job's checkpoint or from released weights."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from dtt.artifacts import DataManifest
from dtt.config.init import HF, MAY_DIFFER
from dtt.config.load import Resolved, load_job
from dtt.config.model import ModelConfig
from dtt.errors import ConfigError, InputError
from dtt.runtime.jobdir import JobDir
from dtt.runtime.log import log

if TYPE_CHECKING:
    from dtt.export.read import Trained
    from dtt.model.architecture import Architecture
    from dtt.model.decoder import Decoder
    from dtt.runtime.dist import World
    from dtt.runtime.sharding import Whole

HUB_ID = re.compile(r"(?P<repo>[\w-][\w.-]*(?:/[\w.-]+)?)(?:@(?P<revision>[\w./-]+))?")
OTHER_SCALING = "scaling gives this one other multipliers"


def begin_with(source: str, model: Decoder, tokenizer: Path, world: World) -> None:
    """Initialise `model` from `source`, the value of `init.from`.

    Rank 0 finds and verifies the weights for all ranks. Logs which weights were loaded. Raises
    ConfigError if a Hugging Face model has another architecture.

    Warns if another job's architecture differs, or if ids of `tokenizer` (that of the data) stood
    for other text in the source. These are no errors, since more layers, renamed special tokens, or
    the body of a model for another vocabulary may be intended. The validation loss before the first
    step shows the effect.
    """
    from dtt.checkpoint import store
    from dtt.train.begin import take_weights

    state: Mapping[str, Whole]
    if source.startswith(HF):
        from dtt.export.read import read_hf_folder

        found = world.from_first(find_model(source.removeprefix(HF)) if world.first else None)
        assert found is not None
        trained = read_hf_folder(found)
        check_architecture(model.arch, trained.arch, found)
        if world.first:
            compare(found, trained)
        state, theirs, where, otherwise = trained.state, trained.tokenizer, found, ""
    else:
        from dtt.model.scaling import scaled

        checkpoint = world.from_first(store.find(source) if world.first else None)
        assert checkpoint is not None
        state, where = checkpoint.stored(store.MODEL), checkpoint.path
        job = JobDir(where.parents[1])
        theirs = job.tokenizer
        arch = scaled(load_job(job.root), DataManifest.read(job.root).vocab_size).arch
        otherwise = difference(model.arch, arch)
    report = take_weights(model, state, str(where))
    log.info("%s", report)
    if otherwise:
        log.warning("the model of %s computes otherwise: %s", where, otherwise)
    if world.first:
        warn_of_other_text(tokenizer, theirs)


def model_of(source: str) -> Mapping[str, Any]:
    """Return the `model` section that describes released weights; `source` is as in `init.from`.

    Reads only their config.json. Raises ConfigError if no `model` section can describe them.
    """
    from dtt.export.read import read_hf_architecture
    from dtt.model import families
    from dtt.model.section import model_section

    folder = find_model(source.removeprefix(HF), ["config.json"])
    arch = read_hf_architecture(folder)
    section = model_section(arch) | {"max_seq_len": arch.max_seq_len}
    family = families.get(arch.family)
    ours = family.architecture(ModelConfig.model_validate(section), arch.vocab_size, 1)
    if ours.windows != arch.windows:
        raise ConfigError(
            f"the model in {folder} cannot be trained",
            where="init.from",
            why="its layers have windows in an order that no model.window_pattern makes",
            next="use another model; dtt generate reads this one",
        )
    return section


def describe_adopted(resolved: Resolved) -> str | None:
    """Return a log line with the `model` keys that `init.from` set, or None if it set none."""
    origin = f"init.from={resolved.config.init.source}"
    keys = [
        f"{'.'.join(key[1:])} {leaf.value}"
        for key, leaf in resolved.layer.items()
        if key[0] == "model" and leaf.origin == origin
    ]
    if not keys:
        return None
    return f"{origin}: the model section is that of these weights: {', '.join(keys)}"


def check_source(source: str) -> None:
    """Raise InputError unless `source` names a job with checkpoints or a model that exists."""
    from dtt.checkpoint import store

    if source.startswith(HF):
        find_model(source.removeprefix(HF))
    else:
        store.locate(source)


def find_model(name: str, files: Sequence[str] | None = None) -> Path:
    """Return the folder of a model, given as a local path or as a model on the Hub.

    A model on the Hub is `ORG/NAME` or `ORG/NAME@REVISION`; only `files` are fetched from it (None:
    all that training needs). Raises InputError if `name` is neither.
    """
    folder = Path(name).expanduser()
    if (folder / "config.json").is_file():
        return folder
    hub_id = HUB_ID.fullmatch(name)
    if folder.exists() or hub_id is None:
        raise InputError(
            f"no model in {folder}",
            where=f"init.from={HF}{name}",
            why="it holds no config.json" if folder.exists() else "there is no such folder",
            next="name a folder that `dtt export` or save_pretrained made, or a model on the Hub",
        )
    from dtt.data.hub import MODEL_FILES, fetch_model

    if files is None:
        log.info("init.from: %s on the Hub", name)
    return fetch_model(hub_id["repo"], hub_id["revision"], files or MODEL_FILES)


def compare(folder: Path, trained: Trained) -> None:
    """Compare the logits of the model read from `folder` with those of `transformers`.

    Skips the comparison, with a warning, if an fp32 model does not fit into free memory.
    """
    from dtt.export.verify import check_import
    from dtt.model import count

    needed, free = 4 * count.parameters(trained.arch), _free_memory()
    if needed > free:
        log.warning(
            "the logits of %s are not compared with those of transformers: "
            "it takes %.0f GB of memory, and %.0f GB are free",
            folder,
            needed / 1e9,
            free / 1e9,
        )
        return
    difference = check_import(folder, trained)
    log.info("the logits of %s differ from those of transformers by %.1e", folder, difference)


def _free_memory() -> int:
    """Return the bytes of host memory that are free here, below the limits of all cgroups (v2).

    A Slurm job or a container may use much less than the machine has.
    """
    import psutil

    free, root = psutil.virtual_memory().available, Path("/sys/fs/cgroup")
    try:
        own = Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip().lstrip("/")
    except OSError:  # no Linux
        return free
    for folder in (root / own, *(root / own).parents):
        with suppress(OSError, ValueError):  # no limit, or outside of the cgroups
            limit = int((folder / "memory.max").read_text())
            free = min(free, limit - int((folder / "memory.current").read_text()))
    return free


def check_architecture(ours: Architecture, theirs: Architecture, where: Path) -> None:
    """Raise ConfigError, with the `model` section to use, if the architectures differ."""
    from dtt.model.section import model_section

    why = difference(ours, theirs)
    if not why:
        return
    section = yaml.safe_dump({"model": model_section(theirs)}, sort_keys=False)
    raise ConfigError(
        f"the model of this run is not the one in {where}",
        where="init.from",
        why=why,
        next="scaling.type=standard" if why == OTHER_SCALING else f"use its sizes:\n\n{section}",
    )


def difference(ours: Architecture, theirs: Architecture) -> str:
    """Return a description of the keys that make two models with equal weights compute differently.

    Returns an empty string if there are none. Comparing shapes is not enough: the number of heads,
    attention windows and RoPE settings do not change any shape.
    """
    from dtt.model.section import model_section

    if ours == replace(theirs, **{name: getattr(ours, name) for name in MAY_DIFFER}):
        return ""
    here, there = model_section(ours), model_section(theirs)
    keys = [k for k in here | there if k not in MAY_DIFFER and here.get(k) != there.get(k)]
    told = "; ".join(f"{k} {here.get(k)} here, {there.get(k)} there" for k in keys)
    return told or OTHER_SCALING


def warn_of_other_text(ours: Path, theirs: Path) -> None:
    """Warn if ids of the tokenizer `ours` stand for other text in `theirs`.

    Does nothing if the file `theirs` does not exist.
    """
    from dtt.data.tokenizer import open_tokenizer

    if not theirs.is_file():
        return
    before = {i: token for token, i in open_tokenizer(theirs).get_vocab().items()}
    now = {i: token for token, i in open_tokenizer(ours).get_vocab().items()}
    others = sorted(i for i in now if now[i] != before.get(i))
    if others:
        i = others[0]
        log.warning(
            "%d of the %d token ids of the data are other text than those of the weights: "
            "%d is %r here, %s there",
            len(others),
            len(now),
            i,
            now[i],
            repr(before[i]) if i in before else "unknown",
        )
