"""`dtt data at-step`: the samples of a training step, and the documents in them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dtt.artifacts.jobdir import JobDir
from dtt.artifacts.manifests import DataManifest
from dtt.base.errors import ConfigError, DamagedError
from dtt.base.reading import read_json
from dtt.checkpoint import store
from dtt.config.load import load_job
from dtt.data.corpus.described import removed_of_run
from dtt.data.samples.dataset import NUMBER_MASK, Dataset, open_dataset
from dtt.data.samples.protocol import SampleNumbers
from dtt.data.samples.shuffle import EMPTY_DATA_HASH, extend_data_hash
from dtt.data.text.tokenizer import open_tokenizer
from dtt.jobs.job_paths import enter
from dtt.track import jsonl

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SHORT = 200
"""Number of characters of a document's text to show, unless `full` is set."""


SAMPLE_HASH = re.compile(r"(?:[0-9a-f]{2})+")
"""Pattern of a sample hash in metrics.jsonl, in hexadecimal digits."""


def at_step(
    source: str,
    step: int | None,
    *,
    rank: int | None,
    ranks: int | None,
    limit: int | None,
    full: bool,
    as_json: bool,
) -> None:
    """Print the samples of a step (from 1) and the documents in them.

    The step is that of `JOB@STEP`, or `step` if `source` is `JOB`. With `rank` and `ranks`, prints
    the samples of one rank out of `ranks`. Raises DamagedError if metrics.jsonl records that the
    step was trained on different samples.
    """
    if (rank is None) != (ranks is None) or (rank is not None and not 0 <= rank < (ranks or 0)):
        raise ConfigError("--rank R and --of N require each other, with R from 0 to N - 1")
    checkpoints, step = store.parse(source, step)
    job, _ = enter(checkpoints.parent)
    if step is None:
        raise ConfigError("at-step needs a step", next=f"dtt data at-step {job}@1")
    cfg = load_job(job, run_code=True)  # a class of the user's own reads its samples again
    dataset = open_dataset(cfg)
    if not 1 <= step <= dataset.steps:
        raise ConfigError(f"{job} has no step {step}", why=f"its steps are 1 to {dataset.steps}")
    places = JobDir(job)
    # A checkpoint holds the state of streamed sources from one step earlier. Without a usable
    # checkpoint they start at the beginning, which only takes longer. A checkpoint that does not
    # belong to these samples is detected afterwards, by the data hash in `_check_samples`.
    with suppress(IndexError, OSError, ValueError, KeyError, TypeError, DamagedError):
        saved = [saved for saved in store.steps(places.checkpoints) if saved <= step]
        path = store.folder_of(places.checkpoints, saved[-1]) / store.POSITION
        dataset.restore(read_json(path)["sources"])
    first = dataset.first_sample(step - 1)
    numbers = dataset.order(first, dataset.first_sample(step) - first)
    agrees = _check_samples(numbers, dataset, places, step)
    rows, removed = range(rank or 0, len(numbers), ranks or 1), removed_of_run(cfg)
    tokenizer = open_tokenizer(dataset.tokenizer)
    samples = (
        _read(dataset, first + row, numbers[row : row + 1], tokenizer) for row in rows[:limit]
    )
    if as_json:
        facts = {"step": step, "samples_of_step": len(numbers), "ledger_agrees": agrees}
        counts = {name: selection.removed for name, selection in removed.items()}
        print(json.dumps(facts | {"removed": counts, "samples": [*samples]}, indent=1))
        return
    print(f"step {step} of {job}: {len(numbers)} samples, ", end="")
    print("the same as in metrics.jsonl" if agrees else "not trained yet")
    for name, selection in removed.items():
        print(f"{name} is without {selection.describe()}; report.html of the selection shows some")
    for sample in samples:
        print("\n".join(_sample(sample, full=full)))
    if len(rows[:limit]) < len(rows):
        print(f"\n… and {len(rows) - len(rows[:limit])} more")


def _check_samples(numbers: SampleNumbers, dataset: Dataset, job: JobDir, step: int) -> bool | None:
    """Compare the samples of a step, of all ranks, with the sample hash chain in metrics.jsonl.

    Returns True if the step was trained on exactly these samples, and None if it has not been
    trained yet. Raises DamagedError if it was trained on different samples.
    """
    wanted = (step - 1, step)
    records = (r for r in jsonl.read(job.metrics, "train") if r["step"] in wanted)
    valid = (r for r in records if SAMPLE_HASH.fullmatch(str(r.get("ledger"))))
    hashes = {0: EMPTY_DATA_HASH} | {r["step"]: bytes.fromhex(r["ledger"]) for r in valid}
    if not all(one in hashes for one in wanted):
        return None
    if extend_data_hash(hashes[step - 1], numbers) == hashes[step]:
        return True
    now = {source.name: source.key for source in dataset.manifest.sources}
    then = {source.name: source.key for source in DataManifest.read(job.root).sources}
    changed = sorted(name for name in now | then if now.get(name) != then.get(name))
    raise DamagedError(
        f"step {step} was trained on other samples than the current data yields",
        where=job.metrics,
        why=f"the files of {', '.join(changed)} have changed since"
        if changed
        else "seed, weights or sizes were changed with --allow-change, or metrics.jsonl was edited",
        next="restore the token files and the configuration that the job had at that step",
    )


def _read(
    dataset: Dataset, position: int, number: SampleNumbers, tokenizer: Tokenizer
) -> dict[str, Any]:
    """Return a sample, the one at a position of the run, with the text of its documents.

    Its `sample` is its number in the source. Its `epoch`, from 1, is an estimate for a source that
    is tokenized on the fly.
    """
    _, places = dataset.mixture.places(position, 1)
    source, spans = dataset.origin(int(number[0]))
    ids = dataset.read(number).ids[0].tolist()
    return {
        "position": position,
        "source": source.name,
        "sample": int((number & NUMBER_MASK)[0]),
        "epoch": int(places[0]) // len(source) + 1,
        "documents": [
            {
                "file": str(span.file),
                "document": span.document,
                "offset": span.offset,
                "tokens": span.stop - span.start,
                "text": tokenizer.decode(ids[span.start : span.stop], skip_special_tokens=False),
            }
            for span in spans
        ],
    }


def _sample(sample: dict[str, Any], *, full: bool) -> Iterator[str]:
    yield f"\nsample {sample['sample']:,} of {sample['source']}, epoch {sample['epoch']}"
    for part in sample["documents"]:
        where = f", from token {part['offset']:,}" if part["offset"] else ""
        yield f"  {part['file']}, document {part['document']:,}{where}: {part['tokens']:,} tokens"
        text = part["text"]
        text = text if full or len(text) <= SHORT else f"{text[:SHORT]} …"
        yield from (f"    | {line}" for line in text.splitlines())
