"""`dtt export`: a checkpoint becomes a verified Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from dtt.artifacts import DataManifest, ExportManifest
from dtt.commands.home import home
from dtt.config.load import changes_on_resume, load_job, resolve
from dtt.config.run import RunConfig
from dtt.errors import ConfigError
from dtt.runtime.files import sha256_file
from dtt.runtime.jobdir import JobDir
from dtt.runtime.log import log


def run(
    job: Path,
    overrides: Sequence[str],
    *,
    step: int | None,
    out: Path | None,
    upload: str | None,
    private: bool,
    ema: bool = False,
) -> ExportManifest:
    """Export the checkpoint of `step` (default: the newest), unless it is exported already; with
    `ema` the moving average of its weights.

    Replaces an earlier export of the same job. Prints where it lies and how far `transformers` was
    from our logits; `upload` names a Hub repository to send it to, made `private` if it is new.
    """
    cfg = _configuration(job, overrides, {} if out is None else {"export.out": str(out)})

    from dtt.export import hf
    from dtt.export.card import model_card
    from dtt.export.read import find_checkpoint, read_checkpoint

    folder = cfg.export.out or Path("exports") / cfg.name
    own = load_job(job).export.out
    if own is not None and cfg.export.out == own:  # not one that was given here
        folder = home(job) / own
    places = JobDir(job)
    checkpoint = find_checkpoint(places.checkpoints, step)
    identity = sha256_file(checkpoint.path / checkpoint.manifest.filename)
    origin = hf.Origin(cfg.name, checkpoint.step, identity, ema)
    manifest = hf.already_done(folder, origin, cfg.export.dtype)
    if manifest is not None:
        log.info("export: done before, %s is of this checkpoint", folder)
    else:
        replaced = ", in place of an earlier export" if ExportManifest.exists(folder) else ""
        log.info("export: writing and verifying step %d: %s%s", checkpoint.step, folder, replaced)
        trained = read_checkpoint(cfg, places, checkpoint, ema=ema)
        manifest = hf.export(
            trained,
            origin,
            folder,
            dtype=cfg.export.dtype,
            max_shard_size=cfg.export.max_shard_size,
            card=model_card(
                cfg, trained.arch, DataManifest.read(job), checkpoint.position()["tokens"], ema=ema
            ),
        )
    averaged = ", average of the weights" if ema else ""
    print(
        f"{folder}: step {manifest.step}{averaged}, {manifest.parameters:,} parameters, "
        f"{manifest.dtype}; "
        f"transformers' logits differ by at most {manifest.max_logit_difference:.1e}"
    )
    if upload is not None:
        from dtt.export.upload import upload as send

        message = f"{cfg.name}, step {manifest.step}"
        print(send(folder, upload, private=private, message=message))
    return manifest


def _configuration(job: Path, overrides: Sequence[str], options: Mapping[str, str]) -> RunConfig:
    """The job's own, with other export options; ConfigError for anything else."""
    trained = load_job(job)
    cfg = resolve(None, overrides, options, job_config=JobDir(job).config).config
    changed = changes_on_resume(trained, cfg)
    if changed:
        raise ConfigError(
            f"{job} was trained with other values of: {', '.join(changed)}",
            why="an export is of the model as it was trained",
            next="leave those arguments out; `dtt config explain export` lists what can be set",
        )
    return cfg
