"""Filters, which judge each document by itself: conditions on columns, languages, quality rules.

The rules are those of Gopher, C4 and FineWeb, with the limits of `dtt.config.clean`. A word is what
white space separates, so that no model of a language is needed, and a line is one that is not
blank, without the white space around it. datatrove cuts words with spaCy, which makes words of
punctuation marks and of parts of `don't`. The verdicts on at least 296 of 300 web pages are the
same for each rule (tests/clean/test_filters.py lists the others), except for
`gopher.min_alphabetic_words`: with punctuation marks as words without letters, datatrove removes
15 % of the pages by it, and 8 % of the novels.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import count
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import regex

from dtt.base.errors import ConfigError, EnvironmentUnfit
from dtt.clean.shingles import ngram_hashes
from dtt.config.clean import LIMITS, LanguageConfig, Limits, WhereConfig
from dtt.mesh.environment import install

SAMPLE = 4096
"""Characters at the start of a document that decide. py3langid loops in Python over each byte, so
a whole novel would take a tenth of a second and gain nothing."""


class Removal(NamedTuple):
    """Why a document is removed."""

    reason: str
    """`where`, `language`, `contaminated` or `rules`; `exact` and `near` come from other passes."""
    rule: str
    """The rule and what it found, such as `gopher.min_words`, or `hellaswag 17` for a question;
    several questions are separated by commas."""
    score: float | None = None
    """The number that was compared with a limit."""


class Filter(Protocol):
    """A judge of single documents. It is made once for each process and has no state."""

    columns: tuple[str, ...]
    """Columns of the row that it reads besides the text."""

    def __call__(self, text: str, row: Mapping[str, Any]) -> Removal | None:
        """Return why a document is removed; None: it stays."""


class WhereFilter:
    """A judge of one column; a document without a value there does not fulfil the condition."""

    def __init__(self, condition: WhereConfig) -> None:
        """Judge by `condition`."""
        self.columns: tuple[str, ...] = (condition.column,)
        self._condition = condition
        # CSV has text only.
        self._texts = frozenset(map(str, condition.values))

    def __call__(self, text: str, row: Mapping[str, Any]) -> Removal | None:
        """Return `where` with the column and what it holds; None: the condition is fulfilled."""
        wanted, value = self._condition, row.get(self._condition.column)
        if wanted.values:
            if value in (self._texts if isinstance(value, str) else wanted.values):
                return None
            return Removal("where", f"{wanted.column} {_shown(value)}")
        try:
            number = float(value) if isinstance(value, str | int | float) else math.nan
        except (ValueError, OverflowError):
            number = math.nan
        if math.isnan(number):
            return Removal("where", f"{wanted.column} {_shown(value)}")
        if wanted.min is not None and not number >= wanted.min:
            return Removal("where", f"{wanted.column} < {wanted.min:g}", number)
        if wanted.max is not None and not number <= wanted.max:
            return Removal("where", f"{wanted.column} > {wanted.max:g}", number)
        return None


def _shown(value: Any) -> str:
    text = "null" if value is None else str(value)
    return text if len(text) <= 40 else text[:39] + "…"


class LanguageFilter:
    """A filter that keeps documents in some languages, as py3langid identifies them.

    py3langid is naive Bayes over byte n-grams, with 139 languages and its model in the wheel.
    lingua's wheel has 96 MB, fastText's model is a download.
    """

    columns: tuple[str, ...] = ()

    def __init__(self, config: LanguageConfig) -> None:
        """Load the model.

        Raises EnvironmentUnfit if py3langid is not installed, and ConfigError for a code that it
        does not know.
        """
        try:
            from py3langid.langid import MODEL_FILE, LanguageIdentifier
        except ModuleNotFoundError as error:
            raise EnvironmentUnfit(
                "clean.language requires py3langid", why=str(error), next=install("language")
            ) from None
        identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
        if unknown := sorted({*config.keep} - {*identifier.labels}):
            raise ConfigError(
                f"clean.language.keep: py3langid has no language {', '.join(unknown)}",
                next=f"ISO 639-1 codes: {', '.join(sorted(identifier.labels))}",
            )
        self._classify = identifier.classify
        self._config = config

    def __call__(self, text: str, row: Mapping[str, Any]) -> Removal | None:
        """Return the language of a document that is removed, with its probability.

        One in a kept language is removed if the probability is below `min_confidence`; so is one
        without any features, such as an empty one, since all languages are equally probable.
        """
        language, found = self._classify(text[:SAMPLE])
        probability = float(found)
        if language in self._config.keep and probability >= self._config.min_confidence:
            return None
        return Removal("language", language, probability)


# ---- quality rules ----

STOP_WORDS = frozenset(["the", "be", "to", "of", "and", "that", "have", "with"])
"""Gopher's."""
ELLIPSES = ("...", "…")
BULLETS = ("•", "-")
"""Marks that begin a line of a list; datatrove's reading of "a bullet point"."""
LETTER = re.compile(r"[^\W\d_]")
QUOTES = "\"'”’»"
C4_ENDS = tuple(".?!" + QUOTES)
"""Ends of a line that C4 keeps: "a period, exclamation mark, question mark, or end quotation mark"
(C4's code knows the straight double quote only, datatrove's both straight ones)."""
TERMINAL = regex.compile(rf"[\p{{Sentence_Terminal}}{QUOTES}]")
"""Terminal punctuation of any script. FineWeb was made with the straight quotes among them; without
quotes, a dialogue would have no such line."""
CITATION = re.compile(r"\[(\d*|edit|citation needed)\]")
BANNED = re.compile(
    "javascript|terms of use|privacy policy|cookie policy|uses cookies|use of cookies|use cookies"
)
"""Text of lines that C4 drops, in lower case; from its code, the paper says it in words."""
SENTENCE_END = re.compile(rf"[.?!](?=[{QUOTES})\]]*(?:\s+[^\sa-z]|\s*$))")
"""Last mark of a sentence: the next one does not begin with a small letter. `Mr. Smith` counts as
an end, which the sentence tokenizer of C4 knows better. One mark, not `[.?!]+`: a run of n marks
that ends no sentence would take n² steps."""

Measured = Iterator[tuple[str, float]]
"""Names of limits and the values to compare with them, cheap ones first."""


class QualityRules:
    """A filter that applies published rules in the order in which they are configured."""

    columns: tuple[str, ...] = ()

    def __init__(self, rules: Sequence[str], limits: Limits) -> None:
        """`limits` are those that differ from the defaults, by rule and name."""
        self._rules = [
            (rule, MEASURES[rule], LIMITS[rule] | dict(limits.get(rule, {}))) for rule in rules
        ]

    def __call__(self, text: str, row: Mapping[str, Any]) -> Removal | None:
        """Return the first limit that the text does not keep, with its value; None: it stays."""
        document = DocumentText(text)
        for rule, measure, limits in self._rules:
            for name, value in measure(document, limits):
                limit = limits[name]
                if value < limit if name.startswith("min_") else value > limit:
                    return Removal("rules", f"{rule}.{name}", value)
        return None


class WordSequence:
    """The words of a document, numbered by their first occurrence, and their repeated n-grams."""

    def __init__(self, words: Sequence[str]) -> None:
        """Give each word a number."""
        found: defaultdict[str, int] = defaultdict(count().__next__)
        # In C code: a Python loop takes three times as long.
        self._numbers = np.fromiter(map(found.__getitem__, words), np.uint64, len(words))
        self._distinct = list(found)
        self.distinct = found.keys()
        lengths = np.fromiter(map(len, words), np.int64, len(words))
        self._ends = np.concatenate(([0], np.cumsum(lengths)))
        """Characters in front of each word, and of all words."""

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def chars(self) -> int:
        """Number of characters, without white space."""
        return int(self._ends[-1])

    def count(self, holds: Callable[[str], object]) -> int:
        """Return the number of words for which `holds` is true."""
        true = np.fromiter(map(bool, map(holds, self._distinct)), bool, len(self._distinct))
        return int(true[self._numbers].sum())

    def top_ngram_chars(self, n: int) -> int:
        """Return the characters, with spaces, in all occurrences of the most frequent n-gram.

        Of several, the one that occurs first counts. 0 for less than n words.
        """
        hashes = ngram_hashes(self._numbers, n)
        if not len(hashes):
            return 0
        ordered = np.sort(hashes)
        starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
        counts = np.diff(starts, append=len(ordered))
        most = int(counts.max())
        first = 0 if most == 1 else int(np.isin(hashes, ordered[starts[counts == most]]).argmax())
        return most * (self._chars(n)[first] + n - 1)  # type: ignore[no-any-return]

    def repeated_chars_bound(self, n: int) -> int:
        """Return the characters of all words in n-grams that occurred before.

        No `repeated_chars` of as many or more words is larger.
        """
        hashes = ngram_hashes(self._numbers, n)
        order = np.argsort(hashes, kind="stable")
        ordered = hashes[order]
        repeated = order[1:][ordered[1:] == ordered[:-1]]
        if not len(repeated):
            return 0
        inside = np.zeros(len(self), bool)
        for offset in range(n):
            inside[repeated + offset] = True
        return int(np.diff(self._ends)[inside].sum())

    def repeated_chars(self, n: int) -> int:
        """Return the characters in n-grams that occurred before, none of them counted twice.

        After a repeated n-gram, the search continues behind it. This is a loop in Python over the
        words; `repeated_chars_bound` spares most documents from it.
        """
        hashes = ngram_hashes(self._numbers, n).tolist()
        chars = self._chars(n)
        seen: set[int] = set()
        total = start = 0
        while start < len(hashes):
            if hashes[start] in seen:
                total += int(chars[start])
                start += n
            else:
                seen.add(hashes[start])
                start += 1
        return total

    def _chars(self, n: int) -> npt.NDArray[np.int64]:
        """Return the characters of each n-gram, without white space."""
        return self._ends[n:] - self._ends[:-n]


class DocumentText:
    """A text with its words and lines, which are cut when the first rule asks for them."""

    def __init__(self, text: str) -> None:
        """Cut nothing yet."""
        self.text = text

    @cached_property
    def words(self) -> WordSequence:
        """The words."""
        return WordSequence(self.text.split())

    @cached_property
    def lines(self) -> list[str]:
        """The lines that are not blank, without the white space around them."""
        return [line for line in map(str.strip, self.text.splitlines()) if line]

    @cached_property
    def duplicate_lines(self) -> tuple[int, int]:
        """Number of lines that equal an earlier one, and of their characters."""
        return _duplicates(self.lines)

    def share_of_lines(self, holds: Callable[[str], bool]) -> float:
        """Return the share of lines for which `holds` is true; 0 without lines."""
        return sum(map(holds, self.lines)) / max(len(self.lines), 1)


def _duplicates(parts: Sequence[str]) -> tuple[int, int]:
    distinct = set(parts)
    return len(parts) - len(distinct), sum(map(len, parts)) - sum(map(len, distinct))


def measure_gopher(document: DocumentText, limits: Mapping[str, float]) -> Measured:
    """Yield Gopher's measures of quality, then those of repetition.

    As in datatrove, characters of duplicates are divided by those of the text with white space.
    """
    text, words, lines = document.text, document.words, document.lines
    number = max(len(words), 1)
    yield "min_words", len(words)
    yield "max_words", len(words)
    yield "min_mean_word_length", words.chars / number
    yield "max_mean_word_length", words.chars / number
    yield "max_hashes_per_word", text.count("#") / number
    yield "max_ellipses_per_word", sum(map(text.count, ELLIPSES)) / number
    yield "max_bullet_lines", document.share_of_lines(lambda line: line.startswith(BULLETS))
    yield "max_ellipsis_lines", document.share_of_lines(lambda line: line.endswith(ELLIPSES))
    yield "min_stop_words", len(STOP_WORDS & words.distinct)
    yield "min_alphabetic_words", words.count(LETTER.search) / number

    size = max(len(text), 1)
    paragraphs = re.split(r"\n\s*\n", text.strip())
    for unit, total, (repeated, chars) in (
        ("paragraph", len(paragraphs), _duplicates(paragraphs)),
        ("line", max(len(lines), 1), document.duplicate_lines),
    ):
        yield f"max_duplicate_{unit}s", repeated / total
        yield f"max_duplicate_{unit}_chars", chars / size
    for n in (2, 3, 4):
        yield f"max_top_{n}gram_chars", words.top_ngram_chars(n) / size
    # The characters in repeated n-grams, n >= 5, are among those in repeated 5-grams: few enough of
    # these end the search, which is the case for 9 of 10 documents.
    longer = {n: f"max_duplicate_{n}gram_chars" for n in range(5, 11)}
    if words.repeated_chars_bound(5) / size > min(limits[name] for name in longer.values()):
        for n, name in longer.items():
            yield name, words.repeated_chars(n) / size


def measure_c4(document: DocumentText, limits: Mapping[str, float]) -> Measured:
    """Yield C4's measures.

    C4 drops lines and then pages; a selection keeps or removes the whole document. So these are
    rules of documents: no `lorem ipsum` and no curly bracket anywhere, since no line is dropped,
    and enough sentences in the lines that C4 would keep. The lines that it would drop (no terminal
    punctuation, few words, a word of more than 1000 characters, JavaScript, cookies and terms of
    use) count as a share. The list of bad words is left out.
    """
    lowered = document.text.lower()
    yield "max_lorem_ipsum", lowered.count("lorem ipsum")
    yield "max_curly_brackets", document.text.count("{")
    banned = BANNED.search(lowered) is not None
    kept = sentences = 0
    for line in document.lines:
        if "[" in line:
            line = CITATION.sub("", line)
        if not line.endswith(C4_ENDS) or line.endswith(ELLIPSES):
            continue
        words = line.split()
        if len(words) < limits["line_words"] or len(max(words, key=len)) > limits["word_length"]:
            continue
        if banned and BANNED.search(line.lower()):
            continue
        kept += 1
        sentences += max(len(SENTENCE_END.findall(line)), 1)
    yield "min_sentences", sentences
    yield "max_dropped_lines", 1 - kept / max(len(document.lines), 1)


def measure_fineweb(document: DocumentText, limits: Mapping[str, float]) -> Measured:
    """Yield the three measures that FineWeb adds to those of Gopher and C4."""
    lines = document.lines
    ends = TERMINAL.findall("".join(line[-1] for line in lines))
    yield "min_punctuated_lines", len(ends) / max(len(lines), 1)
    short = limits["short_line"]
    yield "max_short_lines", document.share_of_lines(lambda line: len(line) <= short)
    chars = max(sum(map(len, lines)), 1)
    yield "max_duplicate_line_chars", document.duplicate_lines[1] / chars


MEASURES: dict[str, Callable[[DocumentText, Mapping[str, float]], Measured]] = {
    "gopher": measure_gopher,
    "c4": measure_c4,
    "fineweb": measure_fineweb,
}
