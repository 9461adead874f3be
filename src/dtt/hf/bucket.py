"""Upload of an export to a folder in a bucket, or on another disk."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path

from dtt.artifacts.manifests import ExportManifest
from dtt.base import object_store
from dtt.base.errors import ConfigError, DamagedError, EnvironmentUnfit
from dtt.base.log import log
from dtt.base.object_store import ObjectStore
from dtt.base.reading import parse
from dtt.base.remote_folder import RemoteFolder
from dtt.hf.publish import LOADED

PARALLEL_FILES = 4
"""Files in flight; each holds up to 50 MB of host memory."""
MARKER = ExportManifest.filename


def prepare(url: str, job: str) -> None:
    """Check that the folder at `url` can be read, and holds no export of another job.

    An export takes minutes, so this asks before. Raises EnvironmentUnfit if the library is not
    installed, or access is refused, and ConfigError.
    """
    if url.partition("://")[0] in ("http", "https", "hf"):
        raise ConfigError(
            f"dtt cannot upload to {ObjectStore(url).shown(url)}",
            why="it writes to s3://, gs://, abfs:// and file:// folders, and to Hub repositories",
            next="--upload ORG/NAME for the Hub",
        )
    content = RemoteFolder(url).content(MARKER)
    found = parse(content) if content is not None else None
    other = found.get("job") if isinstance(found, dict) else None
    if other is not None and other != job:
        raise ConfigError(
            f"{url} holds the export of another job: {other}",
            next="name another folder with --upload",
        )


def upload(folder: Path, names: Sequence[str], url: str) -> str:
    """Upload the files `names` of the export in `folder` to `url`, and verify each by its sha256.

    dtt_export.json is deleted first and uploaded last, so a folder that has it is complete. Files
    of an earlier export that `transformers` would load are deleted. Returns the URL. Raises
    EnvironmentUnfit if the store refuses, or fails again and again, and DamagedError if a file
    that was read back differs.
    """
    remote = RemoteFolder(url)
    stale = [
        name
        for name in remote.sizes()
        if name not in names and any(fnmatch(name, pattern) for pattern in LOADED)
    ]
    remote.delete([MARKER, *stale])

    def put(name: str) -> None:
        for delay in (*object_store.DELAYS, None):
            try:
                remote.put(folder / name, name)
                remote.verify(folder / name, name)
                return
            except (EnvironmentUnfit, DamagedError) as error:
                if delay is None:
                    raise
                log.warning("%s; it is uploaded again", error)
                time.sleep(delay)

    with ThreadPoolExecutor(PARALLEL_FILES) as pool:
        futures = [pool.submit(put, name) for name in names if name != MARKER]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    put(MARKER)
    return remote.url
