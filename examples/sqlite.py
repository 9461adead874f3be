"""Documents of your own, from a database: `dtt download -c examples/sqlite.yaml`."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import dtt


class Sqlite(dtt.Documents):
    """The rows of a table of an SQLite database."""

    database: Path
    """The file of the database."""
    table: str = "documents"
    """The table."""
    column: str = "text"
    """The column of the text."""
    rows_per_part: int = 100_000
    """Number of rows that become one file; an interrupted download goes on with the next one."""

    def parts(self) -> int:
        """Return the number of files."""
        [(last,)] = self._query(f'SELECT coalesce(max(rowid), 0) FROM "{self.table}"')
        return -(-int(last) // self.rows_per_part)

    def rows(self, part: int) -> Iterator[str]:
        """Yield the texts of a part, in the order of the table."""
        # A range of row ids, which an index finds: OFFSET would count from the start each time.
        first = part * self.rows_per_part
        for (text,) in self._query(
            f'SELECT "{self.column}" FROM "{self.table}" WHERE rowid > ? AND rowid <= ? '
            f'AND "{self.column}" IS NOT NULL ORDER BY rowid',
            first,
            first + self.rows_per_part,
        ):
            yield text

    def version(self) -> str:
        """Return the time of the last change of the file."""
        return str(self.database.stat().st_mtime_ns)

    def _query(self, text: str, *values: int) -> Iterator[tuple[str]]:
        uri = f"{self.database.resolve().as_uri()}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True)) as connection:
            yield from connection.execute(text, values)
