"""The job, or the jobs of the stages, that a configuration and arguments describe.

Imports neither torch nor what a training needs, for `dtt submit`.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dtt.artifacts.jobdir import JobDir
from dtt.artifacts.manifests import CheckpointManifest
from dtt.base.errors import ConfigError, DttError
from dtt.checkpoint import store
from dtt.config import explain
from dtt.config.init import HF
from dtt.config.layers import Layer
from dtt.config.load import changes_on_resume, load_job, resolve, stage_names
from dtt.config.merging import Resolved, with_both_lengths
from dtt.config.own import own_keys, trained_files
from dtt.config.run import RunConfig
from dtt.jobs.job_paths import enter
from dtt.jobs.stages import Stage, remedy


def _job_to_resume(
    folder: str, overrides: Sequence[str], stage: str | None
) -> tuple[JobDir, list[str]]:
    """Return the job in `folder`, and the overrides as seen from its home."""
    if stage is not None:
        raise ConfigError(
            f"--stage {stage} and {folder} are mutually exclusive",
            next=f"dtt train {Path(folder).parent / stage} resumes the job of a stage",
        )
    checkpoints, step = store.parse(folder)
    if step is not None:
        raise ConfigError(
            f"{folder} is a checkpoint, and dtt train resumes a job",
            next=f"--branch {folder} for a new job from there, or dtt train "
            f"{checkpoints.parent} --from-step {step} to drop the later ones",
        )
    root, overrides = enter(checkpoints.parent, overrides)
    load_job(root)  # InputError if it is not a job
    return JobDir(root), overrides


def _check_keys_have_values(arguments: Sequence[str]) -> None:
    """Raise ConfigError for a key that was typed apart from its value, as in `train.steps = 5`."""
    for name in (argument.rstrip(":") for argument in arguments):
        if "." in name and explain.explain(name, RunConfig(), {}) is not None:
            raise ConfigError(
                f"the key {name} has no value",
                why="a key and its value are one argument, without spaces",
                next=f"{name}=VALUE",
            )


def find_job(
    config: str | Layer | None,
    arguments: Sequence[str],
    allow_change: Sequence[str],
    stage: str | None = None,
) -> tuple[Resolved, JobDir]:
    """Return the validated configuration, or that of a `stage` of it, and the job it belongs to.

    If the job has a checkpoint, `config` and `arguments` override the job's own configuration.
    Raises ConfigError if they change a key that determines the training and `allow_change` does not
    name that key.
    """
    folders = [argument for argument in arguments if "=" not in argument]
    overrides = [argument for argument in arguments if "=" in argument]
    _check_keys_have_values(folders)
    named = len(folders) + (config is not None)
    if named > 1 or not (named or overrides):
        raise ConfigError(
            "train requires either a config (-c FILE) or one job directory to resume",
            why=f"got {' and '.join([*folders, *(f'-c {c}' for c in [config] if c)]) or 'neither'}",
            next="run dtt train -c quickstart, or dtt train jobs/quickstart",
        )
    if folders:
        job, overrides = _job_to_resume(folders[0], overrides, stage)
    else:
        job = JobDir(resolve(config, overrides, stage=stage).config.job_dir)
    for key in allow_change:
        close = explain.nearest(key)
        if close != key:
            raise ConfigError(
                f"--allow-change {key}: no such key", next=f"use --allow-change {close}"
            )
    started = job.newest_checkpoint_name() is not None
    if not folders and not (started and job.exists):
        return resolve(config, overrides, model_of=model_of, stage=stage), job
    # A job with a checkpoint has recorded its `model` section: the weights that `init.from` names
    # may have been deleted since.
    of_source = partial(own_model, job) if started else model_of
    kept = not own_keys().intersection(allow_change)
    of_job: dict[str, Any] = {"job_config": job.config, "stage": stage, "kept_code": kept}
    resolved = resolve(config, overrides, model_of=of_source, **of_job)
    if not started:
        return resolved, job
    check_edited(job, allow_change)
    check_code(job, resolved.config, allow_change)
    changed = changes_on_resume(load_job(job.root, run_code=True), resolved.config)
    refused = [key for key in changed if key not in with_both_lengths(allow_change)]
    if refused:
        again = "start a new job with name=ANOTHER"
        if stage:
            again = remedy(job, stage_names(config, overrides))
        raise ConfigError(
            f"{job.root} was started with different values of: {', '.join(refused)}",
            where=", ".join(resolved.origin(key) for key in refused),
            why="changing them on resume would change what is trained",
            next=f"{again}, or use " + " ".join(f"--allow-change {key}" for key in refused),
        )
    return resolved, job


def find_stages(config: str | Layer | None, arguments: Sequence[str]) -> list[Stage]:
    """Return the stages that a configuration describes, in order; none for any other.

    Raises ConfigError if the job of a stage has started with other values.
    """
    if config is None and any("=" not in argument for argument in arguments):
        return []
    names = stage_names(config, arguments)
    found = (find_job(config, arguments, (), name) for name in names)
    return [Stage(job, names, resolved) for resolved, job in found]


def own_model(job: JobDir, source: str) -> Mapping[str, Any]:
    """Return the `model` section of a job, as `model_of` would for the `source` of its weights."""
    section = load_job(job.root).model.model_dump(mode="json")
    return {key: value for key, value in section.items() if key not in ("init_std", "dropout")}


def model_of(source: str) -> Mapping[str, Any]:
    """Return the `model` section that describes released weights; `source` is as in `init.from`.

    Reads only their config.json. Raises ConfigError if no `model` section can describe them.
    """
    from dtt.config.model import ModelConfig
    from dtt.hf.library_folder import section_of
    from dtt.hf.model_source import find_model
    from dtt.hf.read import read_hf_architecture
    from dtt.model import families
    from dtt.model.architecture import Architecture
    from dtt.model.families.base import model_section

    folder = find_model(source.removeprefix(HF), ["config.json"])
    arch = read_hf_architecture(folder)
    if not isinstance(arch, Architecture):
        return section_of(arch)
    section = model_section(arch) | {"max_seq_len": arch.max_seq_len}
    family = families.get(arch.family)
    ours = family.architecture(ModelConfig.model_validate(section), arch.vocab_size, 1)
    if (ours.windows, ours.rope_layers) != (arch.windows, arch.rope_layers):
        raise ConfigError(
            f"the model in {folder} cannot be trained",
            where="init.from",
            why="no key of the model section describes which of its layers have a window or a "
            "rotary embedding",
            next="use another model; dtt generate can run this one",
        )
    return section


def check_edited(job: JobDir, allow_change: Sequence[str]) -> None:
    """Raise ConfigError if `config.yaml` has other values than the run, of keys that must stay."""
    copies = [job.trained_config(number) for number in reversed(job.attempts())]
    copy = next(filter(Path.is_file, copies), None)
    if copy is None:  # the job of an earlier version
        return
    trained = resolve(env={}, job_config=copy, run_code=False).config
    edited = changes_on_resume(trained, load_job(job.root))
    # A copy of a job has a folder and a name of its own, which nothing that is trained depends on.
    allowed = {"name", *with_both_lengths(allow_change)}
    refused = [key for key in edited if key not in allowed]
    if refused:
        raise ConfigError(
            f"{job.config} was edited: another {', '.join(refused)} than the job has trained with",
            where=job.config,
            why="changing them on resume would change what is trained",
            next=f"cp {shlex.quote(str(copy))} {shlex.quote(str(job.config))}, or use "
            + " ".join(f"--allow-change {key}" for key in refused),
        )


def check_code(job: JobDir, cfg: RunConfig, allow_change: Sequence[str]) -> None:
    """Raise ConfigError if the user's own code is not that of the newest checkpoint."""
    steps = store.steps(job.checkpoints)
    files = trained_files(cfg)
    if not files or not steps or own_keys().intersection(allow_change):
        return
    try:
        trained = CheckpointManifest.read(store.folder_of(job.checkpoints, steps[-1])).code
    except DttError:
        return  # it is damaged: an older one may be used, or training says so
    for name, (key, file) in files.items():
        if trained.get(name) != file.sha256:
            raise ConfigError(
                f"{name} is not the file that the job has trained with",
                where=file.path,
                why="another class of the same name may train something else",
                next="restore it, start a new job with name=ANOTHER, or use --allow-change " + key,
            )
