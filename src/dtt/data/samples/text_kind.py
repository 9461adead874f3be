"""Training straight from text as a variant of the section `data`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dtt.config.sources import OneSource

if TYPE_CHECKING:
    from dtt.config.run import RunConfig
    from dtt.data.samples.protocol import OpenedSource


class TextDataConfig(OneSource):
    """Training straight from text, without token files, with an existing tokenizer.

    Every process encodes the text of the whole run, at about 20M tokens per second and core: enough
    for dozens of fast GPUs. The shuffle buffer spans 16 MB of text. For larger needs, run
    `dtt tokenize` first.
    """

    reads_text = True

    type: Literal["text"] = "text"
    mask_documents: bool = False
    """Restrict attention to tokens of the same document, and restart positions at its start."""
    eod_mask_loss: bool = False
    """Exclude from the loss the targets that are the first token of a document, predicted from the
    end of the preceding one (Megatron's `--eod-mask-loss`)."""

    def open_samples(self, run: RunConfig) -> OpenedSource:
        """Open the corpus with the tokenizer that the run names."""
        from dtt.data.samples.text_source import open_text

        return open_text(run)

    def input_paths(self, run: RunConfig) -> tuple[Path, ...]:
        """Return the folder of the corpus."""
        return (run.corpus_dir,)

    def run_problems(self, run: RunConfig) -> Iterator[tuple[str, str]]:
        """Yield an error for several corpora, and for a tokenizer that is yet to be trained."""
        if run.download.datasets:
            why = f"data.type={self.type} reads one corpus: run dtt tokenize on several"
            yield "download.datasets", why
        if run.tokenizer.type != "file":
            yield "tokenizer.type", f"data.type={self.type} needs a given tokenizer: file"
