"""Random token ids in place of data, as a variant of the section `data`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from dtt.config.sources import OneSource

if TYPE_CHECKING:  # keeps numpy out of the check of a configuration
    from dtt.config.run import RunConfig
    from dtt.data.samples.protocol import OpenedSource


class SyntheticDataConfig(OneSource):
    """Random token ids in place of data, to measure speed and memory: nothing is learned."""

    has_text = False
    mask_documents: ClassVar[bool] = False
    eod_mask_loss: ClassVar[bool] = False

    type: Literal["synthetic"] = "synthetic"
    vocab_size: int = Field(default=50257, ge=2, le=2**22)
    """Number of different ids."""

    def open_samples(self, run: RunConfig) -> OpenedSource:
        """Return random ids, with a tokenizer that shows them as numbers."""
        from dtt.artifacts.manifest import fingerprint
        from dtt.base.files import sha256_file
        from dtt.data.samples.protocol import OpenedSource, Vocabulary
        from dtt.data.samples.synthetic_source import NAME, SyntheticSource, numbers_tokenizer

        path = numbers_tokenizer(self.vocab_size)
        return OpenedSource(
            SyntheticSource(self.vocab_size, run.train.seq_len, run.seed),
            None,
            fingerprint([NAME, self.vocab_size, run.seed]),
            Vocabulary(path, sha256_file(path), self.vocab_size, 0),
            None,
        )

    def run_problems(self, run: RunConfig) -> Iterator[tuple[str, str]]:
        """Yield an error for more ids than a model has rows, such as that of `init.from`."""
        rows = run.model.vocab_size
        if rows is not None and rows < self.vocab_size:
            why = f"{self.vocab_size} ids are more than model.vocab_size = {rows}: "
            yield "data.vocab_size", f"{why}set data.vocab_size={rows}"

    def known_vocab_size(self) -> int:
        """See Data."""
        return self.vocab_size
