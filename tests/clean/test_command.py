"""`dtt clean` as a user runs it: what it prints, and what it refuses."""

from __future__ import annotations

import json
import random
import re
from contextlib import chdir
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.running import Dtt

from dtt.artifacts.jobdir import JobDir
from dtt.config.load import resolve
from dtt.launch import checks

ROWS = [
    {"text": "one two three", "score": 3, "lang": "en"},
    {"text": "one  two three", "score": 5, "lang": "en"},
    {"text": "four five six", "score": 1, "lang": "en"},
    {"text": "seven", "score": 4, "lang": "de"},
    {"text": "eight", "lang": "fr"},
    {"text": "", "score": None, "lang": "en"},
]


def write_rows(folder: Path, kind: str) -> str:
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), folder / "rows.parquet")
    elif kind == "csv":
        lines = [f"{row.get('score')},{row['text']},{row['lang']}" for row in ROWS]
        (folder / "rows.csv").write_text("\n".join(["score,text,lang", *lines]) + "\n")
    elif kind == "txt":
        (folder / "rows.txt").write_text("one\n")
    else:
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return f"rows.{kind}"


def test_documents_that_stay_or_go_in_great_numbers_are_named(dtt: Dtt, tmp_path: Path) -> None:
    """A question in more documents than count, and rules for English on another language."""
    rng, question = random.Random(0), "vor dem Tor steht ein Esel mit sieben Körben voller Pflaumen"
    words = [f"wort{i}" for i in range(500)]
    texts = [f"{question} {' '.join(rng.choices(words, k=60))}" for _ in range(11)]
    texts += [" ".join(rng.choices(words, k=60)) for _ in range(9)]
    (tmp_path / "q.jsonl").write_text(json.dumps({"q": question, "a": "ja"}))
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    (tmp_path / "t.yaml").write_text(
        'type: cloze\ndata: {file: q.jsonl}\nprompt: "{q}"\nanswer: "{a}"\n'
    )
    dtt("download", "-q", "-d", "d.jsonl")
    tasks = "clean.decontaminate={tasks: [t.yaml], ngram: 8}"
    seen = dtt("clean", "-d", "d.jsonl", tasks).stderr
    assert "11 documents share n-grams with tasks and stay" in seen
    assert "t 0 (11)" in seen
    strict = dtt("clean", "-d", "d.jsonl", "clean.rules=[gopher]").stderr
    assert "quality rules remove 20 of 20 documents: gopher.min_stop_words (20)" in strict
    limit = re.search(r"such as (clean.limits=\S+ \S+ \S+)", strict)
    assert limit is not None
    kept = dtt("clean", "-d", "d.jsonl", "clean.rules=[gopher]", limit[1])
    assert "(20 of 20 documents kept" in kept.stdout


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv"])
def test_conditions_on_columns_and_duplicates_are_counted(
    dtt: Dtt, tmp_path: Path, kind: str
) -> None:
    name = write_rows(tmp_path, kind)
    dtt("download", "-q", "-d", name)
    where = "clean.where=[{column: score, min: 3}, {column: lang, values: [en, de]}]"
    facts = json.loads(dtt("clean", "-d", name, where, "--json").stdout)
    assert facts["documents"] == 6
    assert facts["kept_documents"] == 2
    assert facts["removed"] == {"exact": 1, "where": 3}
    assert facts["text_bytes"] == sum(len(row["text"]) for row in ROWS)
    assert facts["kept_bytes"] == len("one two threeseven")
    again = dtt("clean", "-d", name, where)
    assert "already done" in again.stderr
    assert "(2 of 6 documents kept" in again.stdout
    assert "  exact duplicates           1   16.67%" in again.stdout
    assert "  conditions                 3   50.00%" in again.stdout


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv", "txt"])
def test_a_missing_column_is_named(dtt: Dtt, tmp_path: Path, kind: str) -> None:
    name = write_rows(tmp_path, kind)
    dtt("download", "-q", "-d", name)
    done = dtt("clean", "-d", name, "clean.where=[{column: scores, min: 3}]", expect=66)
    assert "no column scores" in done.stderr
    assert kind == "txt" or "score" in done.stderr.replace("scores", "")


def test_without_a_section_nothing_is_read(dtt: Dtt) -> None:
    assert "no section `clean`" in dtt("clean", "-d", "missing.jsonl", expect=2).stderr


def test_a_corpus_that_is_missing_or_contains_conversations_is_refused(
    dtt: Dtt, tmp_path: Path
) -> None:
    assert "no corpus" in dtt("clean", "-d", "no.jsonl", "clean.exact=true", expect=66).stderr
    line = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (tmp_path / "chat.jsonl").write_text(json.dumps(line) + "\n")
    dtt("download", "-q", "-d", "chat.jsonl", "data.type=chat")
    done = dtt("clean", "-d", "chat.jsonl", "clean.exact=true", expect=66)
    assert "conversations, not text" in done.stderr
    done = dtt("clean", "-d", "chat.jsonl", "data.type=chat", "clean.exact=true", expect=2)
    assert "dtt clean selects documents of text, not conversations" in done.stderr
    assert "set data.type=chat" not in done.stderr


def test_unreadable_documents_are_skipped_and_have_no_number(dtt: Dtt, tmp_path: Path) -> None:
    lines = ['{"text": "a b"}', "broken", '{"text": null}', '{"text": "c d"}', '{"text": "a  b"}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    dtt("download", "-q", "-d", "a.jsonl")
    done = dtt("clean", "-d", "a.jsonl", "clean.exact=true", "--json")
    assert "a.jsonl:2" in done.stderr
    facts = json.loads(done.stdout)
    assert facts["documents"] == 3
    rows = pq.read_table(tmp_path / facts["selection"] / "00000.removed.parquet").to_pylist()
    twin = {"document": 2, "reason": "exact", "rule": "", "twin_unit": 0, "twin": 0, "score": None}
    assert rows == [twin]
    # Of another selection, and of the one that is finished.
    for stop in (("clean.near.threshold=0.9",), ("clean.exact=true",)):
        options = (*stop, "tokenize.on_bad_document=stop")
        assert "a.jsonl:2" in dtt("clean", "-d", "a.jsonl", *options, expect=65).stderr


def test_a_job_without_a_section_is_not_submitted(dtt: Dtt, tmp_path: Path) -> None:
    name = write_rows(tmp_path, "jsonl")
    dtt("download", "-q", "-d", name)
    for settings, expected in (
        ([], ["the configuration has no section `clean`"]),
        (["clean.exact=true"], []),
    ):
        given = [f"download.dataset={name}", f"download.out={tmp_path}/data/corpus/rows", *settings]
        with chdir(tmp_path):
            found = checks.problems(
                "clean", resolve(None, given, {}).config, JobDir(Path("jobs/a"))
            )
            assert [str(problem).splitlines()[0] for problem in found] == expected


def test_every_document_has_one_reason(dtt: Dtt, tmp_path: Path) -> None:
    draw = random.Random(1)
    names = ["".join(draw.choices("abcdefghijklm", k=7)) for _ in range(500)]

    def text() -> str:
        some = draw.sample(names, 100)
        pairs = zip(some[::2], some[1::2], strict=True)
        return " ".join(f"the {a} of {b}," for a, b in pairs)

    question, idiom = text()[:150], text()[:150]
    rows = [{"question": question, "answer": "yes"}, {"question": idiom, "answer": "no"}]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "t.yaml").write_text(
        'data: {file: t.jsonl}\ntype: cloze\nprompt: "{question}"\nanswer: "{answer}"\n'
    )
    first, leak = text(), f"{text()} {question} {text()}"
    documents = {
        first: None,
        leak: ("contaminated", "t 0", None),
        leak.replace(", ", ",  "): ("contaminated", "t 0", None),
        first + " ": ("exact", "", 0),
        first.replace(names[3], "x").replace(first[4:11], "y"): ("near", "jaccard", 0),
        "the <b>few</b>": ("rules", "gopher.min_words", None),
        **{f"{text()} {idiom} {text()}": None for _ in range(11)},
    }
    lines = "".join(json.dumps({"text": one}) + "\n" for one in documents)
    (tmp_path / "web.jsonl").write_text(lines)
    keys = (
        "clean.rules=[gopher]",
        "clean.near.threshold=0.7",
        "clean.decontaminate.tasks=[t.yaml]",
    )
    dtt("download", "-q", "-d", "web.jsonl")
    facts = json.loads(dtt("clean", "-d", "web.jsonl", *keys, "--json").stdout)
    [file] = Path(tmp_path / facts["selection"]).glob("*.parquet")
    found = {row["document"]: row for row in pq.read_table(file).to_pylist()}
    removed = {i: why for i, why in enumerate(documents.values()) if why is not None}
    assert {i: (row["reason"], row["rule"], row["twin"]) for i, row in found.items()} == removed
    page = (tmp_path / facts["selection"] / "report.html").read_text()
    assert "5 of 17 documents removed" in page
    assert "<pre>the &lt;b&gt;few&lt;/b&gt;</pre>" in page
    assert page.count(f"<pre>{first[:100]}") == 3  # an exact copy, its twin, and that of another
    # Tokenizing leaves them out, and an unchanged selection is not made again.
    options = (
        "-d",
        "web.jsonl",
        *keys,
        "tokenize.validation_fraction=0",
        "tokenizer.vocab_size=300",
    )
    done = dtt("tokenize", *options, "--json")
    assert json.loads(done.stdout)["splits"]["train"]["documents"] == len(documents) - len(removed)
    assert "already done" in dtt("clean", *options).stderr
    (tmp_path / "more.jsonl").write_text(json.dumps({"text": text()}) + "\n")
    without = [option.replace("web", "more") for option in options]  # no document has an n-gram
    dtt("download", "-q", *without)
    assert json.loads(dtt("clean", *without, "--json").stdout)["removed"] == {}
