"""`dtt export`: a checkpoint becomes a verified Hugging Face folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dtt.artifacts import ExportManifest


def run(
    job: Path,
    overrides: Sequence[str] = (),
    *,
    step: int | None = None,
    out: Path | None = None,
    upload: str | None = None,
    private: bool = False,
) -> ExportManifest:
    """Export the checkpoint of `step` (default: the newest), unless it is exported already.

    Prints where it lies and how far `transformers` was from our logits; `upload` names a Hub
    repository to send it to, made `private` if it is new.
    """
    from dtt.artifacts import TokensManifest
    from dtt.config.load import load_job, resolve
    from dtt.export import hf
    from dtt.export.card import model_card
    from dtt.export.read import find_checkpoint, read_checkpoint
    from dtt.runtime.files import sha256_file
    from dtt.runtime.jobdir import JobDir
    from dtt.runtime.log import log

    load_job(job)
    places = JobDir(job)
    options = {} if out is None else {"export.out": str(out)}
    cfg = resolve(None, overrides, options, job_config=places.config).config
    folder = cfg.export.out or Path("exports") / cfg.name
    checkpoint = find_checkpoint(places.checkpoints, step)
    identity = sha256_file(checkpoint.path / checkpoint.manifest.filename)
    origin = hf.Origin(cfg.name, checkpoint.step, identity)
    manifest = hf.already_done(folder, origin, cfg.export.dtype)
    if manifest is not None:
        log.info("export: done before, %s is of this checkpoint", folder)
    else:
        log.info("export: writing step %d to %s and verifying it", checkpoint.step, folder)
        trained = read_checkpoint(cfg, checkpoint)
        manifest = hf.export(
            trained,
            origin,
            folder,
            dtype=cfg.export.dtype,
            max_shard_size=cfg.export.max_shard_size,
            card=model_card(
                cfg, trained.arch, TokensManifest.read(cfg.tokens_dir), checkpoint.step
            ),
        )
    print(
        f"{folder}: step {manifest.step}, {manifest.parameters:,} parameters, {manifest.dtype}; "
        f"transformers' logits differ by at most {manifest.max_logit_difference:.1e}"
    )
    if upload is not None:
        from dtt.export.upload import upload as send

        message = f"{cfg.name}, step {manifest.step}"
        print(send(folder, upload, private=private, message=message))
    return manifest
