"""report.html of a selection: how many documents were removed and why, with examples and twins."""

from __future__ import annotations

from collections import Counter
from html import escape
from itertools import islice
from pathlib import Path

from dtt.artifacts.selection_manifest import SelectionManifest, removals_name
from dtt.base.files import write_atomically
from dtt.clean.removals import RemovedRow, decode
from dtt.data.corpus.bad_documents import BadDocuments
from dtt.data.corpus.documents import read_unit
from dtt.data.corpus.units import Corpus

FILENAME = "report.html"
EXAMPLES = 5
"""Examples of each rule; a rule with parameters, such as a question of a task, counts as one."""
UNITS = 4
"""Units that examples are taken from. To show them, these and those of their twins are read again,
which at 64 units for a corpus takes a sixteenth to an eighth of the time of pass 1."""
CHARACTERS = 400
HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 72em; margin: 2em auto; padding: 0 1em; }}
table {{ border-collapse: collapse; }} td, th {{ padding: .2em 1em .2em 0; text-align: left; }}
td.n {{ text-align: right; font-variant-numeric: tabular-nums; }}
div.pair {{ display: grid; grid-template-columns: 1fr 1fr; gap: 1em; margin: .8em 0; }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; background: #8881; padding: .6em; }}
</style></head><body><h1>{title}</h1>
"""

Examples = dict[tuple[str, str], list[tuple[int, RemovedRow]]]
"""Units and rows of some removed documents, by reason and rule."""
Texts = dict[tuple[int, int], str]
"""The starts of documents, by unit and number."""


def write_page(corpus: Corpus, folder: Path, manifest: SelectionManifest) -> Path:
    """Write the report into the folder of the selection and return its path."""
    counts, examples = _look(folder, manifest)
    texts = _texts(corpus, manifest, examples)
    documents = sum(unit.documents for unit in manifest.units)
    title = f"{folder.parent.name}: {counts.total():,} of {documents:,} documents removed"
    parts = [
        HEAD.format(title=escape(title)),
        "<table><tr><th>reason<th>rule<th>documents<th>share",
    ]
    for (reason, rule), count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        share = f"{count / max(documents, 1):.2%}"
        cells = f"<td>{escape(reason)}<td>{escape(rule)}<td class=n>{count:,}<td class=n>{share}"
        parts.append(f"<tr>{cells}")
    parts.append("</table>")
    for kind, some in sorted(examples.items()):
        parts.append(f"<h2>{escape(' '.join(filter(None, kind)))}</h2>")
        parts.extend(_shown(unit, row, texts) for unit, row in some)
    path = folder / FILENAME
    write_atomically(path, "\n".join([*parts, "</body></html>", ""]))
    return path


def _look(folder: Path, manifest: SelectionManifest) -> tuple[Counter[tuple[str, str]], Examples]:
    """Count the documents of each rule, and choose examples from a few units."""
    with_file = [i for i, unit in enumerate(manifest.units) if unit.sha256 is not None]
    shown = set(with_file[:: max(1, len(with_file) // UNITS)][:UNITS])
    counts: Counter[tuple[str, str]] = Counter()
    found: Examples = {}
    for unit in with_file:
        for row in decode(folder / removals_name(unit)):
            kind = row.reason, row.rule
            if row.reason == "contaminated":  # the task without its questions
                kind = row.reason, row.rule.split(",")[0].rpartition(" ")[0]
            counts[kind] += 1
            if unit in shown and len(found.get(kind, ())) < EXAMPLES:
                found.setdefault(kind, []).append((unit, row))
    return counts, found


def _texts(corpus: Corpus, manifest: SelectionManifest, examples: Examples) -> Texts:
    """Return the starts of the examples and of their twins."""
    wanted: dict[int, set[int]] = {}
    for unit, row in (one for some in examples.values() for one in some):
        wanted.setdefault(unit, set()).add(row.document)
        # A document of another corpus (`near.against`) is named, and not shown.
        if row.twin is not None and row.twin_unit is not None and row.twin_unit >= 0:
            wanted.setdefault(row.twin_unit, set()).add(row.twin)
    units, texts = corpus.units(manifest.unit_bytes), {}
    for unit, numbers in wanted.items():
        documents = read_unit(corpus, units[unit], BadDocuments())
        for number, content in enumerate(islice(documents, max(numbers) + 1)):
            if number in numbers:
                text = content.decode()
                texts[unit, number] = text[:CHARACTERS] + "…" * (len(text) > CHARACTERS)
    return texts


def _shown(unit: int, row: RemovedRow, texts: Texts) -> str:
    facts = [f"document {row.document} of unit {unit}", row.rule]
    if row.score is not None:
        facts.append(f"{row.score:.3g}")
    shown = [texts.get((unit, row.document))]
    if row.twin is not None and row.twin_unit is not None:
        where = f"unit {row.twin_unit}" if row.twin_unit >= 0 else f"against[{-1 - row.twin_unit}]"
        facts.append(f"stays: document {row.twin} of {where}")
        shown.append(texts.get((row.twin_unit, row.twin)))
    blocks = "".join(f"<pre>{escape(text)}</pre>" for text in shown if text)
    return f"<p>{escape(', '.join(filter(None, facts)))}</p><div class=pair>{blocks}</div>"
