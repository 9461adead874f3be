"""Token files of conversations: the ids and masks of the encoder, whatever happened on the way."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import tokenizing
from support.conversation_files import conversation, jsonl, write_tokenizer
from support.running import Dtt
from support.token_files import read_documents, sums

from dtt.artifacts.corpus import CorpusManifest
from dtt.artifacts.manifests import CHAT_TEMPLATE, TokensManifest
from dtt.base.errors import ConfigError, DamagedError, InputError
from dtt.config.data import (
    ChatConfig,
    DownloadConfig,
    Engine,
    GivenTokenizerConfig,
    TrainedTokenizerConfig,
)
from dtt.data.conversations import row_encoder
from dtt.data.conversations.chat_encoder import ChatEncoder
from dtt.data.conversations.dialects import parse_row
from dtt.data.conversations.row_encoder import Conversations
from dtt.data.conversations.rows import TOO_DEEP
from dtt.data.conversations.template import CHATML
from dtt.data.corpus.download import download
from dtt.data.token_file import mask_path
from dtt.data.tokenize.encode_corpus import Tokenized

ROWS = [conversation(i) for i in range(300)]
Sequence = tuple[list[int], list[bool]]


class Workshop:
    """Rows, a tokenizer, and the token files made of them, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer = write_tokenizer(folder / "tokenizer")

    def corpus(self, content: bytes, name: str = "rows.jsonl") -> CorpusManifest:
        """Write a file of rows, and the corpus of it."""
        (self.folder / name).write_bytes(content)
        cfg = DownloadConfig(dataset=str(self.folder / name))
        return download(cfg, self.folder / "corpus", rows=True)

    def run(
        self,
        out: str = "out",
        chat: ChatConfig | None = None,
        *,
        overwrite: bool = False,
        engine: Engine = "auto",
        **cfg: Any,
    ) -> Tokenized:
        """Tokenize the corpus in this process."""
        kind = Conversations(chat or ChatConfig(), engine=engine)
        corpus, tokens = self.folder / "corpus", self.folder / out
        return tokenizing.run(corpus, tokens, self.tokenizer, kind=kind, overwrite=overwrite, **cfg)

    def sequences(self, out: str = "out") -> dict[str, list[Sequence]]:
        """Return the ids and the mask of each sequence of each split, in order."""
        found: dict[str, list[Sequence]] = {"train": [], "validation": []}
        for shard in TokensManifest.read(self.folder / out).shards:
            stem = self.folder / out / shard.stem
            mask = np.fromfile(mask_path(stem), np.uint8).tolist()
            for ids in read_documents(stem):
                found[shard.split].append((ids.tolist(), mask[: len(ids)]))
                mask = mask[len(ids) :]
            assert not mask
        return found


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    made = Workshop(tmp_path)
    made.corpus(jsonl(ROWS))
    return made


def encoded(tokenizer: GivenTokenizerConfig, rows: list[dict[str, Any]]) -> list[Sequence]:
    content = (Path(tokenizer.path) / "tokenizer.json").read_bytes()
    encoder = ChatEncoder(content, ChatConfig(), "x", CHATML)
    results = encoder.encode_batch(map(parse_row, rows))
    assert [result for result in results if not isinstance(result, list)] == []
    return [(one.ids.tolist(), one.mask.tolist()) for row in results for one in row]  # type: ignore[union-attr]


def test_every_conversation_is_there_once_with_its_mask(workshop: Workshop) -> None:
    manifest = workshop.run().manifest
    found = workshop.sequences()
    expected = encoded(workshop.tokenizer, ROWS)
    assert sorted(found["train"] + found["validation"]) == sorted(expected)
    assert len(manifest.shards) > 4
    for split, sequences in found.items():
        counts = manifest.counts(split)
        assert counts.documents == len(sequences) > 0
        assert counts.tokens == sum(len(ids) for ids, _ in sequences)
        assert counts.trained == sum(sum(mask) for _, mask in sequences)
    assert manifest.chat is not None
    template = (workshop.folder / "out" / CHAT_TEMPLATE).read_bytes()
    assert hashlib.sha256(template).hexdigest() == manifest.chat.template_sha256


def test_gigatoken_which_encodes_text_is_refused(workshop: Workshop) -> None:
    with pytest.raises(ConfigError, match=r"tokenize\.engine=auto"):
        workshop.run(engine="gigatoken")
    assert workshop.run().engine == "hf"


def test_parquet_holds_the_same_conversations_as_json_lines(workshop: Workshop) -> None:
    workshop.run()
    tool = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    calls = [
        {"messages": [
            {"role": "user", "content": f"{i}"},
            {"role": "assistant", "tool_calls": [tool if i % 2 else {
                "type": "function", "function": {"name": "sub", "arguments": {"b": 2}}}]},
        ]}
        for i in range(10)
    ]  # fmt: skip
    rows = [*ROWS, *calls]
    workshop.corpus(jsonl(rows))
    workshop.run("lines", validation_fraction=0)
    path = workshop.folder / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=70)
    assert b"null" in json.dumps(pq.read_table(path).to_pylist()).encode()  # padded by the format
    shutil.rmtree(workshop.folder / "corpus")
    download(DownloadConfig(dataset=str(path)), workshop.folder / "corpus", rows=True)
    workshop.run("parquet", validation_fraction=0)
    assert workshop.sequences("parquet") == workshop.sequences("lines")


def test_a_lost_template_is_written_again(workshop: Workshop) -> None:
    workshop.run()
    whole = sums(workshop.folder / "out")
    (workshop.folder / "out" / CHAT_TEMPLATE).write_text("other")
    assert workshop.run().units == 0
    assert sums(workshop.folder / "out") == whole


def test_changes_of_the_template_and_its_options_are_refused_by_name(workshop: Workshop) -> None:
    workshop.run()
    template = workshop.folder / "mine.jinja"
    template.write_text(CHATML.replace("\\n", " "))
    with pytest.raises(ConfigError, match=r"chat\.template_sha256 is"):
        workshop.run(chat=ChatConfig(template=str(template)))
    with pytest.raises(ConfigError, match=r"chat\.train_on is 'assistant' there, 'all' now"):
        workshop.run(chat=ChatConfig(train_on="all"))
    with pytest.raises(ConfigError, match=r"chat\.kwargs\.x is null there, 1 now"):
        workshop.run(chat=ChatConfig(kwargs={"x": 1}))
    assert workshop.run(chat=ChatConfig(too_long="stop")).units == 0  # matters to packing alone
    workshop.run("fresh", ChatConfig(template=str(template)))
    workshop.run(chat=ChatConfig(template=str(template)), overwrite=True)
    assert sums(workshop.folder / "out") == sums(workshop.folder / "fresh")


BAD = [
    (b"broken", "not JSON"),
    (b"[1]", "not a JSON object"),
    (b'{"messages": "hi"}', "expected a list"),
    (b'{"messages": []}', "messages is empty"),
    (b'{"messages": [{"role": "user", "content": "no answer"}]}', "no message has the role"),
    (b'{"messages": [{"role": "alien", "content": "x"}]}', "unknown role"),
    (b'{"text": "plain"}', "no messages"),
    (b"\xff\xfe", "not UTF-8"),
    (b'{"messages": ' + b"[" * 200 + b"]" * 200 + b"}", "deep"),
]


def test_bad_rows_are_counted_with_line_and_reason_and_end_nothing(workshop: Workshop) -> None:
    good = ROWS[:20]
    lines = jsonl(good[:10]) + b"".join(row + b"\n" for row, _ in BAD) + jsonl(good[10:])
    workshop.corpus(lines)
    result = workshop.run(validation_fraction=0)
    assert workshop.sequences()["train"] == encoded(workshop.tokenizer, good)
    assert result.manifest.left_out == len(BAD)
    shown = "\n".join(result.problems)
    for line, (_, why) in enumerate(BAD, 11):
        if f"rows.jsonl:{line}:" in shown:
            (problem,) = (one for one in result.problems if f"rows.jsonl:{line}:" in one)
            assert why in problem
    assert len(result.problems) >= 8
    assert any("no message has the role" in why for why in result.manifest.refused)
    assert workshop.run(validation_fraction=0).problems == result.problems
    with pytest.raises(DamagedError, match=r"rows\.jsonl:1[1-9]"):
        workshop.run(validation_fraction=0, on_bad_document="stop")
    with pytest.raises(DamagedError, match=r"rows\.jsonl:1[1-9]"):
        workshop.run("stopped", validation_fraction=0, on_bad_document="stop")


DEEP = '[{"name": "f", "x": ' + "[" * 600 + '"<|im_end|>"' + "]" * 600 + "}]"
"""Tools as JSON text, deeper than Python recurses, with the string of a special token."""


def test_what_only_rendering_or_encoding_raises_costs_its_row(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [*ROWS[:5], {**ROWS[5], "tools": DEEP}, *ROWS[6:9]]
    workshop.corpus(jsonl(rows))
    tokenized = workshop.run(validation_fraction=0.0)
    found = workshop.sequences()["train"]
    assert found == encoded(workshop.tokenizer, [*ROWS[:5], *ROWS[6:9]])
    assert tokenized.problems == (f"{workshop.folder / 'rows.jsonl'}:6: {TOO_DEEP}",)
    finish = ChatEncoder._finish

    def fail(self: ChatEncoder, rendered: Any, encoded: Any) -> Any:
        if ROWS[2]["messages"][0]["content"] in rendered.text:
            raise error
        return finish(self, rendered, encoded)

    monkeypatch.setattr(ChatEncoder, "_finish", fail)
    error: Exception = KeyError("x")
    tokenized = workshop.run("other", validation_fraction=0.0)
    assert workshop.sequences("other")["train"] == [*found[:2], *found[3:]]
    failed = f"{workshop.folder / 'rows.jsonl'}:3: cannot be read: KeyError: 'x'"
    assert failed in tokenized.problems
    error = MemoryError()
    with pytest.raises(MemoryError):
        workshop.run("third", validation_fraction=0.0)


def test_a_corpus_without_a_single_conversation_is_an_error(workshop: Workshop) -> None:
    workshop.corpus(b'{"text": "plain"}\n')
    with pytest.raises(InputError, match=r"1 could not be used, such as .*\.jsonl:1: no messages"):
        workshop.run()


def test_a_trained_tokenizer_is_refused_with_what_to_do(workshop: Workshop) -> None:
    workshop.tokenizer = TrainedTokenizerConfig()  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"tokenizer\.chat_tokens=true"):
        workshop.run()


def test_text_and_conversations_are_not_confused(workshop: Workshop) -> None:
    with pytest.raises(InputError, match="contains conversations, not text"):
        tokenizing.run(workshop.folder / "corpus", workshop.folder / "out")
    (workshop.folder / "text.jsonl").write_text('{"text": "x"}\n')
    cfg = DownloadConfig(dataset=str(workshop.folder / "text.jsonl"))
    shutil.rmtree(workshop.folder / "corpus")
    download(cfg, workshop.folder / "corpus")
    with pytest.raises(InputError, match="contains text, not conversations"):
        workshop.run()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"hi", "text files contain no conversations"),
        ("a.json", b"[7]", "no JSON object at the start"),
        ("a.jsonl", b"nothing\n", "no JSON object at the start"),
    ],
)
def test_files_that_hold_no_rows_are_refused(
    workshop: Workshop, name: str, content: bytes, message: str
) -> None:
    shutil.rmtree(workshop.folder / "corpus")
    with pytest.raises((ConfigError, InputError), match=message):
        workshop.corpus(content, name)


# ---- real processes ------------------------------------------------------------------------------


def arguments(folder: Path, out: str) -> list[str]:
    return [
        "tokenize", "data.type=chat", f"download.out={folder / 'corpus'}",
        f"tokenize.out={folder / out}", "tokenizer.type=file",
        f"tokenizer.path={folder / 'tokenizer'}", "tokenize.validation_fraction=0.1",
        "tokenize.unit_bytes=20000",
    ]  # fmt: skip


def test_the_report_counts_conversations_and_trained_tokens(workshop: Workshop) -> None:
    workshop.corpus(jsonl(ROWS) + b'{"messages": []}\n')
    dtt = Dtt(workshop.folder)
    done = dtt(*arguments(workshop.folder, "out"))
    counts = TokensManifest.read(workshop.folder / "out").counts("train")
    share = f"{counts.trained / counts.tokens:.1%}"  # type: ignore[operator]
    assert f"{counts.documents:,} conversations, {counts.tokens:,} tokens" in done.stdout
    assert f"{counts.trained:,} of them trained ({share})" in done.stdout
    assert "refused     1 rows: messages is empty" in done.stdout
    assert "rows.jsonl:301: messages is empty" in done.stderr
    facts = json.loads(dtt(*arguments(workshop.folder, "out"), "--json").stdout)
    assert facts["already_done"]
    assert facts["refused_rows"] == {"messages is empty": 1}
    assert facts["splits"]["train"]["trained_tokens"] == counts.trained
    changed = dtt(*arguments(workshop.folder, "out"), "chat.turns=expand", expect=2)
    assert "chat.turns is 'all' there, 'expand' now" in changed.stderr


def test_a_folder_keeps_the_date_of_its_first_run(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = workshop.folder / "dated.jinja"
    template.write_text("{{ strftime_now('%d %B %Y') }}" + CHATML)
    chat = ChatConfig(template=str(template))
    days = iter(["2026-01-30", "2026-01-31", "2026-01-31", "2026-02-01"])
    monkeypatch.setattr(row_encoder, "today", lambda: next(days))
    first = workshop.run(chat=chat)
    files = sums(workshop.folder / "out")
    (workshop.folder / "out/manifest.json").unlink()  # as after a kill
    again = workshop.run(chat=chat)
    assert again.manifest.key == first.manifest.key
    assert again.manifest.key_parts["chat"]["date"] == "2026-01-30"
    assert sums(workshop.folder / "out") == files
    assert workshop.run("new", chat=chat).manifest.key != first.manifest.key


def test_keys_that_are_not_used_and_nulls_of_tools_are_counted(workshop: Workshop) -> None:
    tool = {"name": "f", "parameters": {"city": None}}
    rows = [{**row, "id": 1, "source": "a", "tools": [tool]} for row in ROWS[:7]]
    rows[0]["messages"] = [{**message, "stamp": 1} for message in rows[0]["messages"]]
    workshop.corpus(jsonl([*rows, *ROWS[7:]]))
    manifest = workshop.run().manifest
    assert manifest.unread == {"id": 7, "source": 7, "messages[].stamp": 1}
    assert manifest.nulls == 7
