"""A corpus with planted copies, and all its similar pairs by brute force."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import combinations

WORD = re.compile("[0-9a-z\x80-\U0010ffff]+")


def planted(count: int, seed: int = 7, words: int = 160) -> list[str]:
    """Documents: half of them new, the others copies, edited copies, chains and look-alikes."""
    draw = random.Random(seed)
    vocabulary = [
        "".join(draw.choices("abcdefghijklmnoprstuvwy", k=n % 9 + 2)) for n in range(4000)
    ]
    header = " ".join(draw.choices(vocabulary, k=40))
    found: list[str] = []

    def new() -> str:
        return " ".join(draw.choices(vocabulary, k=draw.randint(20, 2 * words)))

    def edited(text: str, rate: float) -> str:
        return " ".join(
            draw.choice(vocabulary) if draw.random() < rate else word for word in text.split()
        )

    def chain(text: str) -> list[str]:
        """The ends differ more than neighbours do."""
        return [text := edited(text, 0.02) for _ in range(3)]

    kinds: dict[str, tuple[int, Callable[[str], list[str]]]] = {
        "new": (50, lambda _: [new()]),
        "edited": (20, lambda text: [edited(text, draw.uniform(0.0, 0.2) ** 2 / 0.2)]),
        "copy": (6, lambda text: [text.replace(" ", draw.choice(["  ", "\n", " \t"])) + "\n"]),
        "respelled": (
            4, lambda text: [text.upper().replace(" ", draw.choice([", ", " — ", "; "]))]
        ),
        "chain": (4, chain),
        "header": (5, lambda _: [f"{header} {new()}"]),
        "shuffled": (5, lambda text: [" ".join(draw.sample(text.split(), len(text.split())))]),
        "short": (
            3, lambda _: [" ".join(draw.choices(["yes", "no", "maybe"], k=draw.randint(1, 4)))]
        ),
        "empty": (2, lambda _: [""]),
        "blank": (1, lambda _: [" \n\t"]),
    }  # fmt: skip
    while len(found) < count:
        kind = draw.choices([*kinds], [share for share, _ in kinds.values()])[0]
        found += kinds[kind][1](draw.choice(found) if found else new())
    return found[:count]


def similar_pairs(texts: Sequence[str], size: int = 5) -> dict[tuple[int, int], float]:
    """The Jaccard similarity of all pairs of documents that share a shingle.

    The texts have no signs beyond ASCII but the dash.
    """
    cut = [WORD.findall(text.lower().replace("—", " ")) for text in texts]
    sets = [{tuple(words[i : i + size]) for i in range(len(words) - size + 1)} for words in cut]
    holders: dict[tuple[str, ...], list[int]] = {}
    for number, shingles in enumerate(sets):
        for shingle in shingles:
            holders.setdefault(shingle, []).append(number)
    shared: Counter[tuple[int, int]] = Counter()
    for numbers in holders.values():
        shared.update(combinations(numbers, 2))
    return {
        (a, b): common / (len(sets[a]) + len(sets[b]) - common) for (a, b), common in shared.items()
    }
