"""Documents that share n-grams with the questions and answers of evaluation tasks are found."""

from __future__ import annotations

import json
import random
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from support.cleaned_corpus import CleanedCorpus, numbered
from support.corpora import json_lines

from dtt.base.errors import ConfigError
from dtt.clean.contamination import (
    MAX_DOCUMENTS,
    MAX_NAMES,
    TaskNgrams,
    fields_only,
    normalized_words,
    open_task_ngrams,
)
from dtt.clean.filters import Removal
from dtt.config.clean import DecontaminateConfig
from dtt.data.corpus.units import Corpus
from dtt.evaluate.tasks.definition import load_tasks, shipped_tasks

CLOZE = 'type: cloze\nprompt: "Question: {question}\\nAnswer:"\nanswer: "{answer}"\n'
CHOICES = (
    'type: multiple_choice\nprompt: "{question}"\nchoices: "{choices}"\n'
    'gold: "{gold}"\ngold_is: letter\n'
)
GENERATION = 'type: generation\nprompt: "Q: {question}\\nA:"\nanswer: "{answers}"\n'
SCHEMA = 'type: schema\nchoices: ["{left}", "{right}"]\nanswer: "{end}"\ngold: 1\n'
ROLLING = 'type: rolling\nanswer: "{text}"\n'
YES_NO = 'type: multiple_choice\nprompt: "{question}"\nchoices: ["no", "yes"]\ngold: 0\n'
LONG = (
    "Whoever builds a bridge over the river Drina must ask the old ferryman, "
    "who doesn't sleep, for the depth of its bed"
)
END = "the old ferryman, who doesn't sleep, for the depth of its bed?"
SNOW = "夜の底が白くなった。信号所に汽車が止まった"
SUN = {"question": "The sun is good for", "answer": "us all"}
TWO, TWICE = ["are five", "a pair"], "so two and two: a pair!"


def ngrams_of(
    folder: Path, definition: str, rows: Sequence[dict[str, Any]], n: int = 13
) -> TaskNgrams:
    """Return the n-grams of a task `t` in local files."""
    folder.mkdir(exist_ok=True)
    (folder / "t.yaml").write_text(f"data: {{file: t.jsonl}}\n{definition}")
    (folder / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return open_task_ngrams(
        DecontaminateConfig(tasks=(str(folder / "t.yaml"),), ngram=n), folder / "data"
    )


def verdicts(tasks: TaskNgrams, documents: Sequence[str]) -> list[Removal | None]:
    """Return the verdict of each document of a corpus, by both passes."""
    hits = [tasks.hits(document) for document in documents]
    counts = np.bincount(np.concatenate(hits), minlength=len(tasks))
    return [tasks.removal(found, counts) for found in hits]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Don't—DON’T, don't!", ["dont", "dont", "dont"]),
        ("_Well-known_\tfacts: 3.14", ["well", "known", "facts", "3", "14"]),
        ("Straße STRASSE cafe\u0301 Café", ["strasse", "strasse", "café", "café"]),
        ("हिन्दी में, पढ़ो।", ["हिन्दी", "में", "पढ़ो"]),
        ("日本語 text ไทย", ["日", "本", "語", "text", "ไ", "ท", "ย"]),
        ("", []),
    ],
)
def test_words_are_casefolded_and_without_punctuation(text: str, expected: list[str]) -> None:
    assert normalized_words(text) == [unicodedata.normalize("NFC", word) for word in expected]


def test_ascii_text_has_the_same_words_among_other_text() -> None:
    text = "".join(f"x{chr(code)}Y " for code in range(128)) + " ".join(map(chr, range(128)))
    assert normalized_words(text + " é") == [*normalized_words(text), "é"]


def test_a_shared_ngram_counts_whatever_its_case_and_punctuation(tmp_path: Path) -> None:
    rows = [
        {"question": "What is a bridge made of, in the end?", "answer": "Of stones and of time"},
        {"question": LONG, "answer": "deep"},
    ]
    tasks = ngrams_of(tmp_path, CLOZE, rows)
    copied = "BRIDGE — over the river Drina\nmust ask (the old ferryman); who doesn’t “sleep” for"
    assert len(normalized_words(copied)) == 14
    twelve = "bridge over the river Drina must ask the old ferryman who doesnt"
    found = verdicts(tasks, [f"He said: {copied}!", f"He said: {twelve} rest", "", copied])
    assert found == [
        Removal("contaminated", "t 1", 2.0),
        None,
        None,
        Removal("contaminated", "t 1", 2.0),
    ]


@pytest.mark.parametrize(
    ("definition", "row", "document", "contaminated"),
    [
        # The prompt's `Answer:` stands between question and answer, but in no document.
        (CLOZE, {"question": LONG, "answer": "deeper than that"}, f"{END} deeper than that", True),
        (CHOICES, {"question": "q", "choices": ["no", LONG], "gold": "A"}, LONG, True),
        (YES_NO, {"question": LONG}, LONG, True),
        (GENERATION, {"question": "q", "answers": ["no", LONG]}, LONG, True),
        (SCHEMA, {"left": "no", "right": LONG, "end": "end"}, LONG, True),
        (ROLLING, {"text": f"Text. {LONG}. Text."}, LONG, True),
        (ROLLING, {"text": SNOW}, "「" + SNOW[:14], True),
        (ROLLING, {"text": SNOW}, "「" + SNOW[:13], False),
        # Whole questions of 5 to 12 words, with an answer.
        (CLOZE, SUN, "the sun is good for us all", True),
        (CLOZE, SUN, "the sun is good for us", False),
        (CHOICES, {"question": "Two and two", "choices": TWO, "gold": "A"}, TWICE, True),
        (CLOZE, {"question": "Two and", "answer": "two"}, "two and two", False),
    ],
)  # fmt: skip
def test_questions_and_answers_of_every_type_are_matched(
    tmp_path: Path, definition: str, row: dict[str, Any], document: str, contaminated: bool
) -> None:
    tasks = ngrams_of(tmp_path, definition, [row])
    [found] = verdicts(tasks, [f"Before it. {document} After it."])
    assert (found is not None) == contaminated


def test_questions_that_are_too_short_are_counted(tmp_path: Path) -> None:
    rows = [{"question": "two and", "answer": "two"}] * 2 + [{"question": LONG, "answer": "x"}]
    assert ngrams_of(tmp_path, CLOZE, rows).unmatched == {"t": 2}
    assert ngrams_of(tmp_path, CLOZE, rows, n=3).unmatched == {}


def test_ngrams_of_more_than_ten_documents_do_not_count(tmp_path: Path) -> None:
    tasks = ngrams_of(tmp_path, ROLLING, [{"text": LONG}])
    few = verdicts(tasks, [LONG] * MAX_DOCUMENTS + ["Text."])
    assert few[:-1] == [Removal("contaminated", "t 0", float(len(tasks)))] * MAX_DOCUMENTS
    assert verdicts(tasks, [LONG] * (MAX_DOCUMENTS + 1)) == [None] * (MAX_DOCUMENTS + 1)
    # Twice in a document is one document; a longer share than the idiom still counts.
    idiom = " ".join(LONG.split()[:13])
    found = verdicts(tasks, [f"{idiom} {idiom}"] * MAX_DOCUMENTS + [LONG])
    assert found == [None] * MAX_DOCUMENTS + [Removal("contaminated", "t 0", len(tasks) - 1.0)]


def test_a_removal_names_every_question_that_shares_an_ngram(tmp_path: Path) -> None:
    rows = [{"text": f"{LONG} and {k}"} for k in range(MAX_NAMES + 2)]
    tasks = ngrams_of(tmp_path, ROLLING, rows[:2])
    assert [found and found.rule for found in verdicts(tasks, [LONG])] == ["t 0, t 1"]
    assert [found and found.rule for found in verdicts(tasks, [f"{LONG} and 1"])] == ["t 0, t 1"]
    tasks = ngrams_of(tmp_path, ROLLING, rows)
    [found] = verdicts(tasks, [LONG])
    assert found is not None
    assert found.rule == "t 0, t 1, t 2, t 3, t 4, 2 more"


def test_hits_are_those_of_a_search_by_words(tmp_path: Path) -> None:
    drawn = random.Random(18)
    vocabulary = [f"w{k}" for k in range(4)]

    def text(least: int, most: int) -> str:
        return " ".join(drawn.choices(vocabulary, k=drawn.randint(least, most)))

    rows = [{"text": text(2, 14)} for _ in range(60)]
    tasks = ngrams_of(tmp_path, ROLLING, rows, n=8)
    grams = set[tuple[str, ...]]()
    for row in rows:
        cut = row["text"].split()
        if len(cut) >= 8:
            grams |= {tuple(cut[k : k + 8]) for k in range(len(cut) - 7)}
        elif len(cut) >= 5:
            grams.add(tuple(cut))
    assert len(tasks) == len(grams)
    for _ in range(300):
        document = drawn.choices([*vocabulary, "other"], k=drawn.randint(0, 200))
        contained = {
            tuple(document[k : k + n])
            for n in range(5, 9)
            for k in range(len(document) - n + 1)
        } & grams  # fmt: skip
        hits = tasks.hits(" ".join(document)).tolist()
        assert len(hits) == len(contained)
        assert hits == sorted(set(hits))
        for gram in contained:
            assert {*tasks.hits(" ".join(gram)).tolist()} <= {*hits}


def test_tasks_without_long_questions_match_nothing(tmp_path: Path) -> None:
    tasks = ngrams_of(tmp_path, CLOZE, [{"question": "1 + 1", "answer": "2"}])
    assert len(tasks) == 0
    assert verdicts(tasks, ["1 + 1 2", "", LONG]) == [None] * 3


def test_the_hash_depends_on_the_questions(tmp_path: Path) -> None:
    one, again = (ngrams_of(tmp_path, ROLLING, [{"text": LONG}]).sha256 for _ in range(2))
    assert one == again
    assert ngrams_of(tmp_path, ROLLING, [{"text": LONG}], n=8).sha256 != one
    assert ngrams_of(tmp_path, ROLLING, [{"text": LONG + "s"}]).sha256 != one


def test_an_unknown_task_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"did you mean hellaswag\?"):
        open_task_ngrams(DecontaminateConfig(tasks=("helaswag",)), tmp_path)


def test_every_shipped_task_can_be_read_without_its_prompt() -> None:
    names = [path.stem for path in shipped_tasks().glob("*.yaml") if path.stem != "suites"]
    assert len(names) > 15
    for task in load_tasks(names):
        problems = [why for _, why in fields_only(task).problems()]
        assert all(why.startswith("does not apply") for why in problems), task.name


def test_lambada_and_the_novels_share_four_passages_of_one_novel(
    shared: Path, tmp_path: Path
) -> None:
    (tmp_path / "lambada.yaml").write_text(
        f"data: {{file: {shared / 'data/eval/lambada_openai.jsonl'}}}\n"
        'type: cloze\nprompt: "{context}"\nanswer: "{continuation}"\n'
    )
    cfg = DecontaminateConfig(tasks=(str(tmp_path / "lambada.yaml"),))
    tasks = open_task_ngrams(cfg, tmp_path / "data")
    parts, texts = [], []
    for path in sorted((shared / "data/novels").glob("*.parquet")):
        table = pq.read_table(path, columns=["id", "text"])
        parts += table["id"].to_pylist()
        texts += table["text"].to_pylist()
    found = zip(parts, verdicts(tasks, texts), strict=True)
    assert {part: removal.rule for part, removal in found if removal} == {
        "Doyle_Hound_1902/0000": "lambada 1934",
        "Doyle_Hound_1902/0006": "lambada 3453",
        "Doyle_Hound_1902/0011": "lambada 2814, lambada 3934",
    }


def test_changed_data_of_a_task_are_noticed(tmp_path: Path) -> None:
    question, task = tmp_path / "t.jsonl", tmp_path / "t.yaml"
    settings = ("clean.exact=true", f"clean.decontaminate.tasks=[{task}]")
    task.write_text(f'data: {{file: {question}}}\ntype: rolling\nanswer: "{{text}}"\n')
    draw = random.Random(0)
    texts = [" ".join("".join(draw.choices("abcd", k=9)) for _ in range(50)) for _ in range(9)]
    corpus = CleanedCorpus(tmp_path, {"a.jsonl": json_lines(texts)})

    def removed(leaked: str) -> list[int]:
        question.write_text(json.dumps({"text": leaked, "other": texts[7]}) + "\n")
        return list(numbered(corpus.clean(*settings)))

    assert removed(texts[3]) == [3]
    before = {path: path.stat().st_mtime_ns for path in corpus.folder.glob("selection-*/[!.]*")}
    assert removed(texts[3]) == [3]
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert removed(texts[5]) == [5]
    task.write_text(task.read_text().replace("{text}", "{other}"))
    assert removed(texts[5]) == [7]
    assert len([*corpus.folder.glob("selection-*/.work/unit-*.json")]) == 1
    # Tokenizing finds it without the data of the task.
    question.unlink()
    cleaned = Corpus(corpus.folder, clean=corpus.config(*settings).clean)
    assert cleaned.selection is not None
    assert cleaned.selection.removed(0).tolist() == [7]
