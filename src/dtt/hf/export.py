"""`dtt export`: convert a checkpoint to a verified Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtt.artifacts.jobdir import JobDir
from dtt.artifacts.manifests import DataManifest, ExportManifest
from dtt.base.errors import ConfigError
from dtt.base.files import sha256_file
from dtt.base.log import log
from dtt.checkpoint import store
from dtt.config.load import changes_on_resume, load_job, resolve
from dtt.config.run import RunConfig
from dtt.track import jsonl
from dtt.track.base import Record

if TYPE_CHECKING:
    from dtt.checkpoint.store import Checkpoint
    from dtt.hf.peft import Adapter
    from dtt.hf.publish import ExportSource


WHOLE = ("export.dtype=", "export.max_shard_size=")
"""Arguments that only an export of a complete model has a use for."""


def run(
    source: str, overrides: Sequence[str], *, as_json: bool = False, **options: Any
) -> ExportManifest:
    """Export a checkpoint as `export` does, and print its result.

    Prints the folder and the largest difference between the logits of dtt and of `transformers`, or
    PEFT, or the manifest if `as_json` is set.
    """
    show = (lambda line: None) if as_json else print
    folder, manifest, url = export(source, overrides, show=show, **options)
    if as_json:
        print(json.dumps({"folder": str(folder), "url": url} | manifest.model_dump(mode="json")))
    elif url is not None:
        print(url)
    return manifest


def export(
    source: str,
    overrides: Sequence[str],
    *,
    out: Path | None,
    upload: str | None = None,
    private: bool = False,
    revision: str | None = None,
    ema: bool = False,
    adapter: bool = False,
    show: Callable[[str], None] = lambda line: None,
) -> tuple[Path, ExportManifest, str | None]:
    """Export a checkpoint, unless it is exported already; return the folder, and its address.

    `source` is `JOB`, whose newest checkpoint is exported, or `JOB@STEP`.
    With `ema`, exports the exponential moving average of the weights; with `adapter`, only the
    adapter of the job, in the format of PEFT, to `exports/<name>-adapter` by default. Replaces an
    earlier export of the same job. `upload` names a Hub repository, or the URL of a folder in a
    bucket, `revision` a branch of the repository; a new repository is created `private` if asked.
    `show` is called with the result before the upload, which takes long.
    """
    in_bucket = upload is not None and "://" in upload
    of_repository = (revision, private) if upload is None or in_bucket else None
    _check_options(overrides if adapter else (), of_repository)
    checkpoints, step = store.parse(source)
    job = checkpoints.parent
    cfg = _configuration(job, overrides)
    from dtt.hf import bucket, publish
    from dtt.hf import upload as hub
    from dtt.hf.read_checkpoint import find_checkpoint, read_adapter

    folder = out or Path("exports") / f"{cfg.name}{'-adapter' if adapter else ''}"
    checkpoint = find_checkpoint(checkpoints, step)
    identity = sha256_file(checkpoint.path / checkpoint.manifest.filename)
    part = read_adapter(cfg, checkpoint, average=ema) if adapter else None
    kept = {"license"} if adapter else {"license", "max_shard_size"}
    options = cfg.export.model_dump(include=kept)
    base = part.base if part else None
    origin = publish.ExportSource(cfg.name, checkpoint.step, identity, ema, base, options)
    dtype = "fp32" if adapter else cfg.export.dtype
    publish.already_done(folder, origin, dtype)  # before a repository is created
    if upload is not None and in_bucket:
        bucket.prepare(upload, cfg.name)
    elif upload is not None:
        hub.prepare(upload, revision, private=private)
    url = None
    with publish.claimed(folder):  # also while it is uploaded
        if manifest := publish.already_done(folder, origin, dtype):
            log.info("export: already done, %s contains this checkpoint", folder)
        else:
            manifest = _export(cfg, JobDir(job), checkpoint, origin, part, folder)
        show(f"{folder}: {_described(manifest)}")
        if upload is not None:
            names = [manifest.filename, *manifest.names()]
            if in_bucket:
                url = bucket.upload(folder, names, upload)
            else:
                message = f"{cfg.name}, step {manifest.step}"
                url = hub.upload(folder, names, upload, revision, message=message)
    return folder, manifest, url


def _described(manifest: ExportManifest) -> str:
    averaged = ", averaged weights" if manifest.ema else ""
    oracle = "transformers" if manifest.base is None else "PEFT"
    rounded = ""
    if manifest.max_rounding_difference is not None:
        by = manifest.max_rounding_difference
        rounded = f", rounded from what was trained, which moves logits by at most {by:.1e}"
    return (
        f"step {manifest.step}{averaged}, {manifest.parameters:,} parameters, "
        f"{manifest.dtype}{rounded}; "
        f"logits differ from those of {oracle} by at most {manifest.max_logit_difference:.1e}"
    )


def _export(
    cfg: RunConfig,
    job: JobDir,
    checkpoint: Checkpoint,
    origin: ExportSource,
    adapter: Adapter | None,
    folder: Path,
) -> ExportManifest:
    """Write the folder with its model card, and verify it."""
    from dtt.hf import write_folder
    from dtt.hf.card import model_card
    from dtt.hf.chat_format import job_chat_format
    from dtt.hf.read_checkpoint import read_checkpoint
    from dtt.hf.released import Released

    replaced = ", replacing an earlier export" if ExportManifest.exists(folder) else ""
    log.info("export: writing and verifying step %d: %s%s", checkpoint.step, folder, replaced)
    trained = read_checkpoint(cfg, job, checkpoint, ema=origin.ema)
    write_folder.check_exportable(trained.arch)
    chat, released = job_chat_format(job, cfg.chat), Released.of_job(job)
    card = model_card(
        cfg,
        trained.arch,
        DataManifest.read(job.root),
        checkpoint.step,
        checkpoint.position()["tokens"],
        evaluation=_evaluation(job, checkpoint.step),
        ema=origin.ema,
        adapter_of=origin.base,
    )
    if adapter is not None:
        return write_folder.export_adapter(
            trained, adapter, origin, folder, card=card, chat=chat, released=released
        )
    return write_folder.export(
        trained,
        origin,
        folder,
        dtype=cfg.export.dtype,
        max_shard_size=cfg.export.max_shard_size,
        card=card,
        chat=chat,
        released=released,
    )


def _evaluation(job: JobDir, step: int) -> Record | None:
    """Return the last recorded evaluation up to `step`, or None."""
    evaluations = (r for r in jsonl.read(job.metrics, "eval") if r["step"] <= step)
    return max(evaluations, key=lambda record: int(record["step"]), default=None)


def _check_options(
    of_adapter: Sequence[str], of_repository: tuple[str | None, bool] | None
) -> None:
    """Raise ConfigError for options that have no meaning in this export.

    They are the arguments of an export of an `adapter`, and `--revision` and `--private` of one
    that goes to no Hub repository.
    """
    for given in of_adapter:
        if given.startswith(WHOLE):
            raise ConfigError(
                f"{given} does not apply to an adapter, which is one file in fp32",
                next="omit it, or omit --adapter to export the merged model",
            )
    revision, private = of_repository or (None, False)
    if revision is not None:
        raise ConfigError("--revision is a branch of the Hub repository that --upload names")
    if private:  # a folder of a bucket is as public as the bucket: never promise otherwise
        raise ConfigError("--private creates the Hub repository that --upload names as private")


def _configuration(job: Path, overrides: Sequence[str]) -> RunConfig:
    """Return the job's configuration with `overrides`, which may change `export`.

    Raises ConfigError if they change keys that determined the training.
    """
    trained = load_job(job)
    cfg = resolve(None, overrides, job_config=JobDir(job).config, run_code=False).config
    changed = changes_on_resume(trained, cfg)
    if changed:
        raise ConfigError(
            f"{job} was trained with different values of: {', '.join(changed)}",
            why="an export contains the model as it was trained",
            next="omit these arguments; `dtt config explain export` lists the keys that may change",
        )
    return cfg
