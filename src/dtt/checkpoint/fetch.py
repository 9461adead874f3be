"""`dtt ckpt fetch`: bring a checkpoint back from `checkpoint.mirror`."""

from __future__ import annotations

import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Lock

from dtt.artifacts.jobdir import JobDir
from dtt.artifacts.manifest import FileRecord
from dtt.artifacts.manifests import CheckpointManifest
from dtt.base.errors import ConfigError, DamagedError, DttError, InputError
from dtt.base.files import (
    check_space,
    exclusive,
    fsync_file,
    fsync_folder,
    remove,
    sha256_file,
    write_atomically,
)
from dtt.base.log import log, progress
from dtt.base.reading import read_whole
from dtt.base.remote_folder import RemoteFolder
from dtt.base.safe_names import checked_name
from dtt.checkpoint import store
from dtt.checkpoint.mirror import JOB, MARKER, RUN_ID, copies, mirror_url
from dtt.config.load import load_job

PARALLEL_FILES = 8
SUFFIX = "fetched"
"""End of the name of the folder into which a checkpoint is fetched."""


def run(source: str, step: int | None) -> None:
    """Fetch the checkpoint of `step`, or the newest, and print where it is.

    `source` is a job, whose configuration names the mirror, `JOB@STEP`, or the job's folder in the
    mirror. Raises InputError if there is no complete copy, ConfigError if the job's folder has
    another run, InUse if the job runs, DamagedError if the copy differs from its manifest.
    """
    if "://" in source or not JobDir(store.parse(source)[0].parent).exists:
        if "://" not in source and not source.startswith("/"):
            raise InputError(
                f"{source} is not a job directory",
                next="of a job whose folder is lost, name its folder in the mirror, such as "
                "s3://bucket/prefix/run",
            )
        remote = RemoteFolder(source)
        job, lost = _job_of(remote)
    else:
        folder, step = store.parse(source, step)
        cfg, job, lost = load_job(folder.parent), JobDir(folder.parent), {}
        if cfg.checkpoint.mirror is None:
            raise ConfigError(
                f"{job.root} has no mirror",
                where=f"checkpoint.mirror in {job.config}",
                next="name the folder in the mirror: dtt ckpt fetch s3://bucket/prefix/run",
            )
        remote = RemoteFolder(mirror_url(cfg.checkpoint.mirror, cfg.name))
        _check_run(remote, job)
    whole, _ = copies(remote.sizes())
    step = max(whole, default=None) if step is None else step
    if step not in whole or step is None:
        raise InputError(
            f"no complete copy of {'a checkpoint' if step is None else f'step {step}'}",
            where=remote.url,
            why=f"there are: {', '.join(map(str, whole)) or 'none'}",
        )
    with exclusive(job.root, "dtt train"):
        checkpoint = _fetch(remote, job, step)
        for name, content in lost.items():  # config.yaml is the last, and makes it a job
            write_atomically(job.root / name, content)
    newer = [s for s in store.steps(job.checkpoints) if s > step]
    print(f"{checkpoint.path}: verified, {len(checkpoint.manifest.files)} files")
    print(f"resume with: dtt train {job.root}" + (f" --from-step {step}" if newer else ""))


def _job_of(remote: RemoteFolder) -> tuple[JobDir, dict[str, bytes]]:
    """Return the job of a mirror, and the files that its folder lacks: none if it is a job."""
    below = f"{JOB}/"
    names = [name.removeprefix(below) for name in remote.sizes() if name.startswith(below)]
    found = {checked_name(name, Path(remote.url)): remote.content(below + name) for name in names}
    files = {name: content for name, content in found.items() if content is not None}
    config = files.pop("config.yaml", None)
    if config is None:
        raise InputError(
            f"{remote.url} is not the mirror of a job",
            why=f"{JOB}/config.yaml is missing there",
            next="name the folder of the job, below checkpoint.mirror: s3://bucket/prefix/run",
        )
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.yaml").write_bytes(config)
        job = JobDir(load_job(Path(folder)).job_dir)
    if job.exists:
        _check_run(remote, job)
        return job, {}
    return job, files | {"config.yaml": config}


def _check_run(remote: RemoteFolder, job: JobDir) -> None:
    """Raise ConfigError if the mirror has the checkpoints of another run than the job."""
    there, here = remote.content(RUN_ID), job.run_id()
    if there is not None and there.decode(errors="replace").strip() != here:
        raise ConfigError(
            f"{remote.url} holds the checkpoints of another run than {job.root}",
            why=f"its run_id is {there.decode(errors='replace').strip()}, not {here}",
            next=f"move {job.root} away, then fetch again by the URL",
        )


def _fetch(remote: RemoteFolder, job: JobDir, step: int) -> store.Checkpoint:
    """Fetch the checkpoint of a step and commit it; what is there and intact stays."""
    final = store.folder_of(job.checkpoints, step)
    content = remote.content(f"{final.name}/{MARKER}")
    if content is None:
        raise InputError(f"{remote.url}/{final.name} was deleted meanwhile")
    if (final / MARKER).is_file() and read_whole(final / MARKER) == content:
        try:
            return store.verify(final)
        except DamagedError as error:
            log.warning("%s is replaced: %s", final, error)
    staging = job.checkpoints / f"{store.staging_name(step, 0)}-{SUFFIX}"
    staging.mkdir(parents=True, exist_ok=True)
    (staging / MARKER).write_bytes(content)
    try:
        manifest = CheckpointManifest.read(staging)
        if manifest.step != step or any("/" in name for name in manifest.names()):
            raise DamagedError(f"{remote.url}/{final.name} is not the checkpoint of step {step}")
        _fetch_files(remote, manifest, staging)
    except DamagedError:
        remove(staging)
        raise
    with ExitStack() as stack:
        if final.exists():
            aside = job.checkpoints / f"{staging.name}{store.REJECTED_SUFFIX}"
            final.rename(aside)
            stack.callback(shutil.rmtree, aside, ignore_errors=True)
        staging.rename(final)
        fsync_folder(job.checkpoints)
    return store.verify(final)


def _fetch_files(remote: RemoteFolder, manifest: CheckpointManifest, staging: Path) -> None:
    """Fetch the files of a checkpoint in parallel; continue those that an interruption left."""
    there = sum(path.stat().st_size for path in staging.iterdir() if path.name != MARKER)
    needed = max(0, sum(file.bytes for file in manifest.files) - there)
    check_space(staging, needed + 2**20, f"the checkpoint of step {manifest.step}")
    folder, lock = f"step-{manifest.step:06d}", Lock()
    with progress(f"fetching {folder}", needed) as advance:

        def bring(record: FileRecord) -> None:
            part = staging / checked_name(record.path, staging / MARKER)
            for again in (True, False):
                one = remote.stored(f"{folder}/{record.path}")
                if one.bytes != record.bytes:
                    break
                for count in remote.download(one, part):
                    with lock:
                        advance(count)
                if sha256_file(part) == record.sha256:
                    fsync_file(part)
                    return
                # What an interruption left may be of another copy: once more, from the start.
                part.unlink()
                if not again:
                    break
            raise DamagedError(
                "a file in the mirror differs from the manifest of its checkpoint",
                where=f"{remote.url}/{folder}/{record.path}",
                why="its size or its sha256 is another",
                next=f"fetch another step: dtt ckpt fetch {remote.url} STEP",
            )

        with ThreadPoolExecutor(PARALLEL_FILES) as pool:
            futures = [pool.submit(bring, record) for record in manifest.files]
            try:
                for future in futures:
                    future.result()
            except (DttError, OSError):
                pool.shutdown(cancel_futures=True)
                raise
    fsync_folder(staging)
