"""Documents of your own, from `datasets`: `dtt download -c examples/hf_dataset.yaml`."""

from collections.abc import Iterator
from typing import Any

import datasets

import dtt


class Saved(dtt.Documents):
    """Questions and answers in a folder that `datasets.save_to_disk` wrote."""

    folder: str
    """The folder of one split."""
    shards: int = 1
    """Number of files to write."""

    def parts(self) -> int:
        """Return the number of files."""
        return self.shards

    def rows(self, part: int) -> Iterator[dict[str, Any]]:
        """Yield the conversations of a part."""
        rows = datasets.load_from_disk(self.folder).shard(self.shards, part, contiguous=True)
        yield from map(self.conversation, rows)

    def version(self) -> str:
        """Return what `datasets` knows the rows by."""
        return str(datasets.load_from_disk(self.folder)._fingerprint)

    def conversation(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return a row as dtt reads it: the map function."""
        return {
            "messages": [
                {"role": "user", "content": row["question"]},
                {"role": "assistant", "content": row["answer"]},
            ]
        }
