"""One JSON array in a .json file is read like JSON lines, in pieces and with the line of each."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.corpora import downloaded, read_all_rows, read_texts

from dtt.data.corpus import json_files
from dtt.data.corpus.json_files import ArrayReader

ALPACA = [{"instruction": f"Frage ü {i}", "input": "", "output": "a\n" * i} for i in range(40)]
TEXTS = [{"text": f"document ü {i}"} for i in range(40)]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


def read(content: bytes) -> list[Any]:
    return [value for _, _, value in ArrayReader(io.BufferedReader(io.BytesIO(content)), 10**6)]


@given(st.lists(VALUES, max_size=6), st.sampled_from([None, 1, "\t"]), st.integers(1, 40))
def test_the_elements_are_those_of_json_in_pieces_of_any_size(
    values: list[Any], indent: Any, piece: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_files, "PIECE", piece)
        for text in (json.dumps(values, indent=indent), json.dumps(values, ensure_ascii=False)):
            content = text.encode(errors="surrogatepass")
            if "\\ud" in text or b"\xed" in content:  # lone surrogates are not UTF-8
                continue
            assert read(b"\xef\xbb\xbf \n" + content + b"\n") == values


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b'[{"a": 1}, {"a": }]', "line 1: not JSON"),
        (b'[{"a": 1},\n{"a": 2}', "line 2: not JSON"),
        (b'[\n{"a": 1},\n{"a"', "line 3: not JSON"),
        (b'["' + b"x" * 2 * 10**6 + b'"]', "line 1: longer than 0 MiB"),
        (b'[{"a": "\xff"}]', "invalid start byte"),
        (b'[{"a": 1}]\n{"a": 2}', "line 2: after the array comes other text"),
        (b"[" * 100_000, "nested too deeply|not JSON"),
    ],
)
def test_a_mistake_is_reported_with_its_line_after_what_comes_before(
    content: bytes, why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        read(content)


@pytest.mark.parametrize("name", ["a.json", "a.json.gz", "A.JSON"])
@pytest.mark.parametrize("indent", [None, 2])
def test_documents_and_rows_of_an_array_are_those_of_json_lines(
    tmp_path: Path, name: str, indent: int | None
) -> None:
    for values, rows in ((TEXTS, False), (ALPACA, True)):
        content = json.dumps(values, indent=indent, ensure_ascii=False).encode()
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
        corpus = downloaded(tmp_path / name, tmp_path / f"corpus-{rows}", rows=rows)
        assert len(corpus.units(4096)) == 1
        if rows:
            found, bad = read_all_rows(corpus)
            assert [row.value for row in found] == values
            assert found[3].where() == f"{tmp_path / name}:{1 if indent is None else 17}"
        else:
            texts, bad = read_texts(corpus)
            assert texts == [value["text"] for value in values]
        assert bad.count == 0


@pytest.mark.parametrize("between", ["", "\n", " \n\ufeff"])
@pytest.mark.parametrize("before", ["", " " * 300])
def test_arrays_that_follow_each_other_are_read_to_the_last(
    tmp_path: Path, between: str, before: str
) -> None:
    arrays = [json.dumps(TEXTS[start : start + 10]) for start in range(0, 40, 10)]
    (tmp_path / "a.json").write_text(before + between.join([*arrays, "[]\n"]))
    found, bad = read_texts(downloaded(tmp_path / "a.json", tmp_path / "corpus"))
    assert found == [value["text"] for value in TEXTS]
    assert bad.count == 0
