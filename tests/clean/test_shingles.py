"""Words and shingles are those that the documentation defines, in every script."""

from __future__ import annotations

import re

import numpy as np
import pytest

from dtt.clean.shingles import Shingles, band_keys, bands_and_rows, shingles, sketches

ALONE = "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u9fff\uf900-\ufaff\U00020000-\U00031fff]"
OTHERS = "\u0080-\u00bf\u2000-\u206f\u3000-\u303f\uff00-\uff0f\uff1a-\uff20"
WORD = re.compile(f"{ALONE}|(?:(?!{ALONE})[0-9a-zA-Z]|(?!{ALONE})[^\\x00-\\x7f{OTHERS}])+")
TEXTS = [
    "The cat sat on the mat, and the CAT sat on it again.",
    "  leading and trailing white space, twice \n\n leading and trailing white space ",
    "",
    "three words only",
    "Ünïcode wörter: ça et là — “quoted” … naïve café; ЧТО это такое, ПОЧЕМУ",
    "我能吞下玻璃而不傷身體。我能吞下玻璃",
    "mixed text 你好world世界again 123abc，日本語テキストと English words",
    "ภาษาไทยไม่มีช่องว่าง and ភាសាខ្មែរ 한국어는 띄어쓰기를 한다 정말로",
    "a" * 63 + " " + "b" * 64 + " " + "c" * 65 + " d " + "e" * 1000 + " " + "e" * 1001,
    "emoji 🙂 count 🙂🙂 as words \U00020000\U00020001 but rare characters stand alone",
    "nul\0byte and_underscore don't x",
    "£5 and ½ of ¿qué? fullwidth！punctuation，ＡＢＣ words",
]


def expected(text: str, size: int) -> list[tuple[str, ...]]:
    words = ["".join(c.lower() if c.isascii() else c for c in word) for word in WORD.findall(text)]
    return [tuple(words[i : i + size]) for i in range(len(words) - size + 1)]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_equal_shingles_and_only_they_have_equal_hashes(size: int) -> None:
    cut = shingles([text.encode() for text in TEXTS], size)
    wanted = [
        (number, shingle) for number, text in enumerate(TEXTS) for shingle in expected(text, size)
    ]
    assert cut.document.tolist() == [number for number, _ in wanted]
    hashes: dict[tuple[str, ...], int] = {}
    for (_, shingle), value in zip(wanted, cut.hashes.tolist(), strict=True):
        assert hashes.setdefault(shingle, value) == value
    assert len(set(hashes.values())) == len(hashes)
    assert len(hashes) > 50


def test_hashes_are_the_same_in_every_process_and_version() -> None:
    """Results of pass 1 are kept on disk; a change needs another VERSION."""
    cut = shingles([b"The cat sat on the mat again", "über allen Gipfeln".encode()], 2)
    assert int(np.bitwise_xor.reduce(cut.hashes)) == 4597201040385504087
    keys = band_keys(sketches(cut, 2, 12), 4, 3)
    assert int(np.bitwise_xor.reduce(keys, axis=None)) == 18332943008743829970


@pytest.mark.parametrize("count", [1, 2, 7, 100, 1000, 5000])
@pytest.mark.parametrize("similarity", [0.5, 0.8])
def test_sketches_agree_as_often_as_the_sets_are_similar(count: int, similarity: float) -> None:
    """Over 200 pairs; few shingles, many shingles, and none without a value in a bin."""
    if count < 5:
        similarity = 0.0 if count == 1 else 1 / 3
    shared = round(2 * count * similarity / (1 + similarity))
    texts = []
    for pair in range(200):
        common = [f"c{pair}x{i}" for i in range(shared)]
        for side in "ab":
            own = [f"{side}{pair}x{i}" for i in range(count - shared)]
            texts.append(" ".join(common + own).encode())
    cut = shingles(texts, 1)
    found = sketches(cut, len(texts), 120)
    assert (found != np.iinfo(np.uint64).max).all()
    agreed = (found[::2] == found[1::2]).mean()
    truth = shared / (2 * count - shared)
    # The standard deviation of a value is at most 0.5, of the mean of 24,000 about 0.0033; values
    # of one sketch depend on each other where there are fewer shingles than values.
    assert abs(agreed - truth) < (0.02 if count >= 100 else 0.12)


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0])
def test_bands_miss_less_than_half_a_percent_at_the_threshold(threshold: float) -> None:
    bands, rows = bands_and_rows(threshold)
    assert (1 - threshold**rows) ** bands < 0.005
    assert bands * rows <= 128


@pytest.mark.parametrize("count", [9, 54, 180, 540])
def test_few_pairs_at_the_threshold_share_no_band(count: int) -> None:
    """8,000 pairs of similarity 0.8: the values of a sketch are independent enough."""
    draw, pairs, (bands, rows) = np.random.default_rng(count), 8000, bands_and_rows(0.8)
    shared = count * 8 // 9
    common = draw.integers(0, 2**64, (pairs, 1, shared), np.uint64).repeat(2, axis=1)
    own = draw.integers(0, 2**64, (pairs, 2, count - shared), np.uint64)
    hashes = np.concatenate([common, own], axis=2).ravel()
    cut = Shingles(hashes, np.repeat(np.arange(2 * pairs), count))
    keys = band_keys(sketches(cut, 2 * pairs, bands * rows), bands, rows)
    missed = (keys[::2] != keys[1::2]).all(axis=1).mean()
    # The bound is 0.0031; the standard deviation of the mean is 0.0006.
    assert missed < 0.005


def test_documents_share_a_band_key_if_and_only_if_a_band_is_equal() -> None:
    draw = np.random.default_rng(5)
    values = draw.integers(0, 3, (300, 12)).astype(np.uint64)
    keys = band_keys(values, 4, 3)
    parts = values.reshape(300, 4, 3)
    for band in range(4):
        same = (parts[:, None, band] == parts[None, :, band]).all(axis=2)
        np.testing.assert_array_equal(keys[:, None, band] == keys[None, :, band], same)
    assert not set(keys[:, 0].tolist()) & set(keys[:, 1].tolist())
