"""The `python-stdlib` corpus: the sources of Python's standard library, which need no download."""

from __future__ import annotations

import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dtt.base.errors import EnvironmentUnfit
from dtt.base.files import fsync_file
from dtt.base.log import log

NAME = "python-stdlib"
FILE = "python-stdlib.parquet"
ROW_GROUP_BYTES = 2**19
SCHEMA = pa.schema([("id", pa.string()), ("text", pa.string())])

LEFT_OUT = frozenset(
    {
        "__pycache__",
        "dist-packages",  # installed packages
        "encodings",  # tables of characters
        "ensurepip",
        "idlelib",
        "lib2to3",
        "pydoc_data",  # one string literal of 700 kB
        "site-packages",
        "test",
        "tests",
        "turtledemo",
    }
)


def revision() -> str:
    """Return the running Python, which determines the content, such as `CPython 3.11.7`."""
    return f"{platform.python_implementation()} {platform.python_version()}"


def write_stdlib(folder: Path) -> Path:
    """Write the sources of the standard library into `folder` as one Parquet file; return its path.

    The columns are `id` (the module name) and `text`. There is one row per module, sorted by name.
    The same Python produces the same bytes. Raises EnvironmentUnfit if Python has no sources.
    """
    aside, skipped = folder / f".{FILE}.tmp", 0
    group: list[dict[str, str]] = []
    group_bytes = 0
    with pq.ParquetWriter(aside, SCHEMA, compression="zstd") as writer:
        for name, path in source_files():
            try:
                group.append({"id": name, "text": path.read_text(encoding="utf-8")})
            except UnicodeDecodeError:
                skipped += 1
                continue
            group_bytes += path.stat().st_size
            if group_bytes >= ROW_GROUP_BYTES:
                writer.write_table(pa.Table.from_pylist(group, SCHEMA))
                group, group_bytes = [], 0
        if group:
            writer.write_table(pa.Table.from_pylist(group, SCHEMA))
    if skipped:
        log.info("left out %d modules that are not UTF-8", skipped)
    fsync_file(aside)
    return aside.replace(folder / FILE)


def source_files() -> list[tuple[str, Path]]:
    """Return the name and source file of each module of the standard library, sorted by name.

    Raises EnvironmentUnfit if Python has no sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    modules = sorted(_modules(root))
    if not modules:
        raise EnvironmentUnfit(
            "this Python comes without the sources of its standard library",
            where=root,
            next="use another dataset, or use another Python",
        )
    return modules


def _modules(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield the name and file of each module, except tests, data tables and build configuration."""
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        if not LEFT_OUT.intersection(parts) and not parts[-1].startswith("_sysconfigdata"):
            yield ".".join(parts), path
