"""Documents that contain a part of an evaluation task: shared n-grams of words, as in GPT-3.

A document is contaminated if it shares an n-gram with a question and its answer, unless more than
MAX_DOCUMENTS documents of the corpus contain that n-gram: then it is an idiom, a licence or a
boilerplate. So the verdict takes two passes over the corpus::

    tasks = open_task_ngrams(clean.decontaminate, eval.data)
    hits = tasks.hits(text)                                    # pass 1: for each document, and kept
    documents = np.bincount(all_hits, minlength=len(tasks))    # of all documents of the corpus
    removal = tasks.removal(hits, documents)                   # for each document with hits

Brown et al. 2020, Language Models are Few-Shot Learners (arXiv 2005.14165), appendix C.
"""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import count, repeat
from pathlib import Path

import numpy as np
import numpy.typing as npt
import regex

from dtt.artifacts.manifest import fingerprint
from dtt.clean.filters import Removal
from dtt.clean.shingles import U64, ngram_hashes
from dtt.config.clean import DecontaminateConfig
from dtt.evaluate.tasks.definition import Task, load_tasks
from dtt.evaluate.tasks.prompt_template import without_literals
from dtt.evaluate.tasks.prompts import Question
from dtt.evaluate.tasks.task_data import TaskData, open_task

MIN_WORDS = 5
"""Words of the shortest question, with its answer, that is matched as a whole. Shorter ones, such
as sums, occur in documents that have nothing to do with the task, and are not matched."""
MAX_DOCUMENTS = 10
"""Documents that contain an n-gram which still counts; GPT-3's."""
MAX_NAMES = 5
"""Questions that a removal names; a copy of a whole task would name thousands."""

# `regex`, whose \w includes vowel signs; `re` would cut each word of Hindi in several.
WORD = regex.compile(r"\w+")
SPACELESS = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]")
"""Characters of Thai, Lao, Burmese, Khmer, Japanese and Chinese, which have no spaces."""
ASCII_WORDS: dict[int, str | None] = {
    code: chr(code).lower() if chr(code).isalnum() else " " for code in range(128)
}
ASCII_WORDS[ord("'")] = None  # with an empty string, `translate` is slow

Numbers = npt.NDArray[np.int64]


def open_task_ngrams(config: DecontaminateConfig, folder: Path) -> TaskNgrams:
    """Return the n-grams of the configured tasks, whose data are in `folder` or downloaded there.

    Raises the errors of `load_tasks` and `open_task`: an unknown task, data that cannot be had.
    """
    tasks = map(fields_only, load_tasks(config.tasks))
    opened = [open_task(task, folder, limit=None, shots=0) for task in tasks]
    return TaskNgrams(opened, config.ngram)


def fields_only(task: Task) -> Task:
    """Return a task whose texts consist of the fields of its rows only.

    `Question: … Answer:` is the prompt's, and no document that contains the row has it.
    """
    choices = task.choices
    if not isinstance(choices, str):
        choices = tuple(map(without_literals, choices))
    changed = {
        "prompt": without_literals(task.prompt),
        "answer": without_literals(task.answer),
        "choices": choices,
        "delimiter": " ",
        "description": "",
        "gold": 0,  # a choice without its literals need not be what `gold` names
        "gold_is": "index",
        "labels": None,
    }
    return task.model_copy(update=changed)


class TaskNgrams:
    """The n-grams of the questions and answers of tasks, numbered from 0.

    The words of a question are those of its context and of an answer; each choice counts. A
    question with fewer than `ngram` words, but at least MIN_WORDS, is one n-gram of its own length.
    """

    def __init__(self, tasks: Iterable[TaskData], ngram: int) -> None:
        """Read the questions; their order decides the numbers."""
        self.ngram = ngram
        self._questions: list[str] = []
        numbers: defaultdict[str, int] = defaultdict(count(1).__next__)  # 0: no word of a task
        long, short = [np.empty(0, np.uint64)], defaultdict[tuple[int, ...], int](count().__next__)
        long_owners, short_owners = [np.empty(0, np.int64)], []
        self.unmatched: dict[str, int] = {}
        """Questions of each task that are too short to be matched, where there are any."""
        sources = []
        for task in tasks:
            name = task.task.name
            sources.append([task.sha256, task.task.identity()])
            for index, question in enumerate(task.questions):
                owner = len(self._questions)
                self._questions.append(f"{name} {index}")
                texts = [[numbers[word] for word in words] for words in _texts(question)]
                if max(map(len, texts)) < min(MIN_WORDS, ngram):
                    self.unmatched[name] = self.unmatched.get(name, 0) + 1
                for ids in texts:
                    if len(ids) >= ngram:
                        long.append(ngram_hashes(np.array(ids, np.uint64), ngram))
                        long_owners.append(np.full(len(long[-1]), owner))
                    elif len(ids) >= MIN_WORDS:
                        short_owners.append((short[tuple(ids)], owner))
        self._numbers = dict(numbers)
        hashes, places = np.unique(np.concatenate(long), return_inverse=True)
        self._long = HashTable(hashes)
        self._count = len(hashes) + len(short)
        more = np.array(short_owners, np.int64).reshape(-1, 2)
        pairs = np.stack(
            (
                np.concatenate((places, more[:, 0] + len(hashes))),
                np.concatenate((*long_owners, more[:, 1])),
            )
        )
        self._owners = pairs[1, order := np.argsort(pairs[0], kind="stable")]
        self._starts = np.searchsorted(pairs[0, order], np.arange(self._count + 1))
        self._by_prefix: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        for number, ids_of in enumerate(short, len(hashes)):
            [prefix] = ngram_hashes(np.array(ids_of[:MIN_WORDS], np.uint64), MIN_WORDS).tolist()
            self._by_prefix.setdefault(prefix, []).append((ids_of, number))
        self._prefixes = HashTable(np.array(sorted(self._by_prefix), np.uint64))
        self.sha256 = fingerprint([ngram, MIN_WORDS, MAX_DOCUMENTS, *sources])
        """Hash of what the n-grams are made of: data and definitions of the tasks."""

    def __len__(self) -> int:
        """Return the number of n-grams."""
        return self._count

    def hits(self, text: str) -> Numbers:
        """Return the numbers of the n-grams in a text, ascending, each once; mostly none."""
        words = normalized_words(text)
        ids = np.fromiter(map(self._numbers.get, words, repeat(0)), np.uint64, len(words))
        _, found = self._long.find(ngram_hashes(ids, self.ngram))
        starts, _ = self._prefixes.find(prefixes := ngram_hashes(ids, MIN_WORDS))
        whole = [
            number
            for start in starts.tolist()
            for words_of, number in self._by_prefix[int(prefixes[start])]
            if tuple(ids[start : start + len(words_of)].tolist()) == words_of
        ]
        return np.unique(np.concatenate((found, np.array(whole, np.int64))))

    def questions(self, hits: Numbers) -> list[str]:
        """Return the questions that share these n-grams, as `removal` names them."""
        owners = {
            int(owner)
            for number in hits
            for owner in self._owners[self._starts[number] : self._starts[number + 1]]
        }
        return [self._questions[owner] for owner in sorted(owners)]

    def removal(self, hits: Numbers, documents: Numbers) -> Removal | None:
        """Return why a document with these hits is removed; None: it stays.

        `documents` is the number of documents with each n-gram, shape (len(self),). The rule names
        the questions that share an n-gram, as `hellaswag 17` with the number of the row from 0 in
        the data of the task; the score is the number of shared n-grams.
        """
        counted = hits[documents[hits] <= MAX_DOCUMENTS]
        if not len(counted):
            return None
        names = self.questions(counted)
        more = [f"{len(names) - MAX_NAMES} more"] if len(names) > MAX_NAMES else []
        return Removal("contaminated", ", ".join(names[:MAX_NAMES] + more), float(len(counted)))


def _texts(question: Question) -> Iterator[list[str]]:
    """Yield the words of each context with each answer."""
    contexts = [normalized_words(context) for context in question.contexts]
    answers = [normalized_words(text) for text in question.continuations or question.answers]
    yield from (context + answer for context in contexts for answer in answers)


def normalized_words(text: str) -> list[str]:
    """Return the words of a text, casefolded and without punctuation.

    Apostrophes vanish (`don't` is `dont`); other punctuation separates words. Each character of a
    script without spaces is a word.
    """
    if text.isascii():  # three times as fast
        return text.translate(ASCII_WORDS).split()
    text = unicodedata.normalize("NFC", text.casefold())
    if SPACELESS.search(text):
        text = SPACELESS.sub(r" \g<0> ", text)
    return WORD.findall(text.replace("'", "").replace("’", "").replace("_", " "))  # type: ignore[no-any-return]


class HashTable:
    """Sorted hashes, with a bitmap in front of them that answers nearly all look-ups."""

    def __init__(self, hashes: U64) -> None:
        """`hashes` are sorted and unique."""
        self._sorted = hashes
        # 16 entries a hash: 6 % of other hashes reach the binary search, which takes ten times
        # as long as the bitmap. At most 64 MB, which are more than the processor's cache anyway.
        self._bits = min(max((16 * len(hashes)).bit_length(), 10), 26)
        self._present = np.zeros(2**self._bits, bool)
        self._present[self._slots(hashes)] = True

    def _slots(self, hashes: U64) -> npt.NDArray[np.int64]:
        return (hashes >> np.uint64(64 - self._bits)).astype(np.int64)

    def find(self, hashes: U64) -> tuple[Numbers, Numbers]:
        """Return the positions in `hashes` of those in the table, and their places in it."""
        at = np.flatnonzero(self._present[self._slots(hashes)])
        places = np.searchsorted(self._sorted, hashes[at])
        places = np.minimum(places, max(len(self._sorted) - 1, 0))
        same = self._sorted[places] == hashes[at] if len(at) else np.empty(0, bool)
        return at[same], places[same]
