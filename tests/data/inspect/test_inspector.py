"""Inspection reports what the data holds, exactly or as an estimate, and what is trained."""

from __future__ import annotations

import json
import struct
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.conversation_files import conversation, jsonl, write_tokenizer
from support.running import Dtt
from support.tiny_job import make_tokenizer
from support.token_files import END, write_folder, write_pair

from dtt.base.errors import DamagedError
from dtt.data.inspect import inspector, raw_text
from dtt.data.inspect.inspector import IdStatistics, inspect_path, places
from dtt.data.inspect.report import InspectOptions, Report
from dtt.data.samples import compatibility
from dtt.data.samples.token_shards import DocumentEnds, Shard
from dtt.data.token_file import TokenFile, idx_path


def see(path: Path, **wishes: Any) -> Report:
    usual = {"samples": 3, "everything": False, "hashes": False, "tokenizer": None}
    return inspect_path(path, InspectOptions(**(usual | {"dtype": "uint16"} | wishes)))


def test_sampled_ranges_are_spread_evenly_and_never_overlap() -> None:
    sizes = [10**9, 0, 3 * 10**9, 5, 10**7]
    found = places(sizes, everything=False)
    assert len(found) == inspector.PLACES
    starts = np.cumsum([0, *sizes])
    spans = [(int(starts[file]) + a, int(starts[file]) + b) for file, a, b in found]
    assert spans[0][0] == 0
    assert spans[-1][1] == sum(sizes)
    gaps = [b[0] - a[0] for a, b in pairwise(spans)]
    assert max(gaps) - min(gaps) <= 3 * inspector.PLACE_TOKENS
    assert all(a[1] <= b[0] for a, b in pairwise(spans))
    assert all(0 <= a < b <= sizes[file] for file, a, b in found)


def test_small_data_in_many_files_is_read_whole() -> None:
    assert places([1000] * 100, everything=False) == [(file, 0, 1000) for file in range(100)]
    most = inspector.PLACES * inspector.PLACE_TOKENS
    assert sum(stop - start for _, start, stop in places([most - 5, 5], everything=False)) == most


DOCUMENTS = st.lists(st.lists(st.integers(1, 9), max_size=12), max_size=12)


@given(DOCUMENTS, st.booleans(), st.integers(1, 9))
def test_place_by_place_every_document_is_seen_once(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], pair: bool, size: int
) -> None:
    """Also those across a border of two places, and empty ones at either end."""
    stem = tmp_path_factory.mktemp("pair") / "a"
    write_pair(stem, documents)
    ends = np.cumsum([len(document) for document in documents], dtype=np.int64)
    where = TokenFile(stem) if pair else DocumentEnds(ends.astype("<u8"))
    total = sum(map(len, documents))
    shard = Shard(stem.with_suffix(".bin"), total, "<u2", "", lambda: where)
    assert len(where) == len(documents)
    seen = IdStatistics(10, None)
    for start in range(0, max(total, 1), size):
        seen.read(shard, where, start, min(start + size, total))
    assert sorted(seen.lengths.tolist()) == sorted(map(len, documents))
    assert seen.last == Counter(document[-1] for document in documents if document)
    assert seen.tokens == total
    assert seen.outside == 0


def test_raw_ids_have_no_documents_and_are_shown_as_text(tmp_path: Path) -> None:
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    ids = make_tokenizer().encode("all in a row").ids
    np.array([*ids, 300, 400], dtype="<u4").tofile(tmp_path / "train.bin")
    report = see(tmp_path / "train.bin", dtype="uint32")
    assert report.kind == "raw ids"
    assert (report.documents, report.lengths, report.tokens) == (None, None, len(ids) + 2)
    assert report.samples[0]["text"] == "all in a row"
    assert report.oddities == ["ids outside the vocabulary of 257: 2"]


def test_documents_without_an_end_are_counted(tmp_path: Path) -> None:
    write_folder(tmp_path / "t", {"train-0": [[1, END], [2, 3], [4, END]], "train-1": [[5]]})
    report = see(tmp_path / "t")
    assert report.oddities == ["documents that do not end with id 0: 2"]
    write_pair(tmp_path / "a", [[1], [2], [3]])
    assert see(tmp_path / "a").oddities == [
        "no id ends most documents: training cannot tell where they end"
    ]


def test_an_index_out_of_order_is_reported_as_damage(tmp_path: Path) -> None:
    stem = tmp_path / "a"
    write_pair(stem, [[1, END]] * 40)
    whole = idx_path(stem).read_bytes()
    offsets = 34 + 4 * 40
    broken = bytearray(whole)
    broken[offsets + 8 * 20 : offsets + 8 * 21] = struct.pack("<q", 2)
    idx_path(stem).write_bytes(broken)
    report = see(stem)
    assert len(report.damaged) == 1
    assert "do not follow one another" in report.damaged[0]
    assert str(tmp_path) in report.damaged[0]
    idx_path(stem).write_bytes(whole[:-8])
    with pytest.raises(DamagedError, match="should have"):
        see(stem)


def test_a_broken_pair_among_others_is_named_and_the_others_are_reported(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        write_pair(tmp_path / name, [[1, 2, END]])
    (tmp_path / "b.bin").write_bytes(b"1")
    with idx_path(tmp_path / "c").open("r+b") as file:
        file.seek(-16, 2)
        file.write(bytes([9]))  # its documents begin with a sequence that is not the first
    report = see(tmp_path)
    assert report.tokens == 6
    assert report.documents == 1
    assert [Path(line.split(": ")[0]).name for line in report.damaged] == ["b.bin", "c.bin"]
    assert "but b.bin has 1" in report.damaged[0]


def test_the_manifest_of_another_program_is_not_reported_as_damaged(tmp_path: Path) -> None:
    write_pair(tmp_path / "a", [[1, 2, END]])
    (tmp_path / "manifest.json").write_text('{"format": "theirs"}')
    assert see(tmp_path).kind == "Megatron .bin/.idx"
    assert not list(compatibility.file_problems(tmp_path))
    (tmp_path / "manifest.json").write_text('{"format": "dtt-')
    with pytest.raises(DamagedError, match="cannot read the manifest"):
        see(tmp_path)


def test_documents_that_cannot_be_read_or_are_blank_are_named(tmp_path: Path) -> None:
    lines = b'{"text": "good"}\n{"text": \n{"text": "\xff"}\n{"text": " "}\n'
    (tmp_path / "a.jsonl").write_bytes(lines)
    report = see(tmp_path / "a.jsonl")
    assert report.documents == 2
    blank, unread, first, second = report.oddities
    assert blank == "documents that contain only white space: 1"
    assert unread == "documents that cannot be read: 2"
    assert "a.jsonl:2: not JSON" in first
    assert "a.jsonl:3: not UTF-8" in second


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_large_corpus_is_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(raw_text, "SAMPLE_BYTES", 2**16)
    texts = [f"{i} " + "word " * (i * 7919 % 200) for i in range(8000)]
    if kind == "parquet":
        pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", row_group_size=100)
    else:
        lines = (json.dumps({"text": t}) + "\n" for t in texts)
        (tmp_path / "a.jsonl").write_text("".join(lines))
    path = tmp_path / f"a.{kind}"
    some, every = see(path), see(path, everything=True)
    assert not some.is_exact
    assert some.read["amount"] < 2**18
    assert every.documents == 8000
    assert some.documents is not None
    assert some.documents_estimated
    assert 0.85 < some.documents / 8000 < 1.2


def test_keys_and_refused_rows_are_listed_for_each_kind_of_file(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    for name, row in {
        "chat-01.jsonl": {"messages": messages, "id": 1},
        "chat-02.jsonl": {"messages": messages, "system": "S"},
        "kto.jsonl": {"prompt": "Q", "completion": "A", "label": False},
    }.items():
        (tmp_path / name).write_text(json.dumps(row) + "\n")
    report = see(tmp_path)
    assert report.facts["chat-N.jsonl: keys read"] == {"messages": 2, "system": 1}
    assert report.facts["chat-N.jsonl: keys not used"] == {"id": 1}
    assert any("kto.jsonl: label marks good and bad" in line for line in report.oddities)


# ---- conversations -------------------------------------------------------------------------------

ROWS = [conversation(i) for i in range(1, 60)]


@pytest.fixture
def dtt(tmp_path: Path) -> Dtt:
    write_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "rows.jsonl").write_bytes(jsonl(ROWS))
    dtt = Dtt(tmp_path)
    dtt("download", "-d", "rows.jsonl", "data.type=chat", "download.out=corpus")
    return dtt


def tokenize(dtt: Dtt, *arguments: str) -> None:
    dtt(
        "tokenize", "data.type=chat", "download.out=corpus", "tokenizer.type=file",
        "tokenizer.path=tokenizer", "tokenize.out=tokens", "tokenize.validation_fraction=0",
        *arguments,
    )  # fmt: skip


def test_the_answer_of_a_conversation_is_between_the_marks(dtt: Dtt) -> None:
    tokenize(dtt)
    shown = dtt("data", "inspect", "tokens", "--samples", 1).stdout
    answer = ROWS[0]["messages"][1]["content"]
    text = "\n".join(line.removeprefix("    | ") for line in shown.splitlines())
    assert f"<|im_start|>assistant\n⟦{answer}<|im_end|>⟧" in text
    assert "trained tokens are between ⟦ and ⟧" in shown
    assert "stop_tokens        <|im_end|> (2)" in shown
    assert "anomalies" not in shown


def test_refused_rows_and_damaged_masks_are_reported(dtt: Dtt) -> None:
    (dtt.folder / "rows.jsonl").write_bytes(jsonl(ROWS) + b'{"messages": []}\n')
    dtt("download", "-d", "rows.jsonl", "data.type=chat", "download.out=corpus")
    tokenize(dtt)
    assert "refused rows: 1: messages is empty" in dtt("data", "inspect", "tokens").stdout
    mask = dtt.folder / "tokens/train-00000.mask"
    content = mask.read_bytes()
    mask.write_bytes(content[:-1] + bytes([1 - content[-1]]))
    done = dtt("data", "inspect", "tokens", "--verify", expect=65)
    assert "train-00000.mask: its sha256 is" in done.stdout
    mask.write_bytes(content[:-1])
    assert "train-00000.mask" in dtt("data", "inspect", "tokens", expect=65).stdout


def test_the_mixture_of_a_run_names_what_it_leaves_out(dtt: Dtt) -> None:
    tokenize(dtt)
    (dtt.folder / "run.yaml").write_text(
        "data: {type: chat, tokens: tokens}\ntrain: {seq_len: 512, global_batch_tokens: 512}\n"
    )
    shown = dtt("data", "mix", "-c", "run.yaml").stdout
    assert "of 59 conversations are longer than train.seq_len = 512: left out" in shown


def test_rows_are_inspected_before_they_are_tokenized(dtt: Dtt) -> None:
    for path in ("corpus", "rows.jsonl"):
        shown = dtt("data", "inspect", path).stdout
        assert "documents          59" in shown
        assert '{"messages": ' in shown
