"""Samples of conversations: each whole and once, with its own targets, and hardly any padding."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.conversation_files import conversation, jsonl, write_tokenizer
from support.running import Dtt
from support.token_files import FACTS, Conversation, every
from support.token_files import write_conversations as write

from dtt.base.errors import ConfigError, DamagedError
from dtt.base.targets import IGNORE_INDEX
from dtt.config.load import resolve
from dtt.config.sources import SourceConfig
from dtt.data.samples import sample_layout
from dtt.data.samples.dataset import Dataset, open_dataset
from dtt.data.samples.packing import TooLong, least_slack
from dtt.data.samples.token_source import TokenSource

SEQ_LEN = 20

# A conversation is drawn as the lengths of its turns: a question, an answer, a question, …
TURNS = st.lists(st.integers(1, 8), min_size=2, max_size=6)
SHARDS = st.lists(st.lists(TURNS, min_size=1, max_size=12), min_size=1, max_size=3)


def made(turns: list[int], counter: itertools.count[int]) -> Conversation:
    """A conversation of ids that occur nowhere else, whose answers are targets."""
    ids = [next(counter) for length in turns for _ in range(length)]
    mask = [bool(i % 2) for i, length in enumerate(turns) for _ in range(length)]
    return ids, mask


def opened(
    folder: Path, seq_len: int = SEQ_LEN, too_long: TooLong = "drop", **options: Any
) -> TokenSource:
    cfg = SourceConfig(path=folder, name="x")
    return TokenSource(cfg, "train", seq_len=seq_len, seed=0, too_long=too_long, **options)


def samples(source: TokenSource) -> list[list[Conversation]]:
    """The conversations in each sample, each token with whether it is a target.

    The first token of a conversation is never a target; there is nothing that predicts it.
    """
    whole = every(source)
    rows = source.read(whole)
    assert rows.doc_ids is not None
    targets = rows.targets
    found = []
    for ids, documents, row in zip(rows.ids, rows.doc_ids, targets, strict=True):
        real = ids != IGNORE_INDEX
        assert real.tolist() == sorted(real.tolist(), reverse=True)  # padding is at the end
        is_target = np.concatenate([[False], row != IGNORE_INDEX])
        assert not is_target[~real].any()
        assert (row[is_target[1:]] == ids[1:][is_target[1:]]).all()
        of = [real & (documents == n) for n in range(int(documents[real].max()) + 1)]
        found.append([(ids[one].tolist(), is_target[one].tolist()) for one in of])
    assert source.counts(whole).targets == (targets != IGNORE_INDEX).sum()
    for sample in whole.tolist():
        one = np.array([sample], dtype=np.uint64)
        assert source.counts(one).targets == (targets[sample] != IGNORE_INDEX).sum() > 0
    return found


@settings(max_examples=60)
@given(shards=SHARDS)
def test_every_conversation_that_fits_is_complete_in_one_sample_with_its_targets(
    shards: list[list[list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    counter = itertools.count(1)
    conversations = [[made(turns, counter) for turns in shard] for shard in shards]
    folder = tmp_path_factory.mktemp("tokens")
    write(folder, conversations)
    source = opened(folder)
    everything = [one for shard in conversations for one in shard]
    fitting = [one for one in everything if len(one[0]) <= SEQ_LEN + 1]
    found = samples(source)
    assert sorted(one for sample in found for one in sample) == sorted(fitting)
    left_out = source.packing_counts
    assert left_out is not None
    assert (left_out.conversations, left_out.packed) == (len(everything), len(fitting))
    assert left_out.too_long == len(everything) - len(fitting)
    assert source.tokens == left_out.tokens == sum(len(ids) for ids, _ in fitting)
    assert left_out.targets == sum(sum(mask) for _, mask in fitting)
    alone = samples(opened(folder, packing="none"))
    assert all(len(sample) == 1 for sample in alone)
    assert sorted(one for sample in alone for one in sample) == sorted(fitting)


@settings(max_examples=60)
@given(shards=SHARDS)
def test_whole_turns_cuts_after_the_last_answer_that_fits(
    shards: list[list[list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    counter = itertools.count(1)
    conversations = [[made(turns, counter) for turns in shard] for shard in shards]
    folder = tmp_path_factory.mktemp("tokens")
    write(folder, conversations)
    source = opened(folder, too_long="whole_turns")
    expected, cut = [], 0
    for turns, (ids, mask) in zip(
        (turns for shard in shards for turns in shard),
        (one for shard in conversations for one in shard),
        strict=True,
    ):
        ends = list(itertools.accumulate(turns))
        stop = len(ids)
        if stop > SEQ_LEN + 1:
            stop = max((end for end in ends[1::2] if end <= SEQ_LEN + 1), default=0)
            cut += stop > 0
        if stop:
            expected.append((ids[:stop], mask[:stop]))
    assert sorted(one for sample in samples(source) for one in sample) == sorted(expected)
    assert source.packing_counts is not None
    assert source.packing_counts.cut == cut


@settings(max_examples=200)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12), capacity=st.integers(30, 60))
def test_least_slack_fills_the_first_bin_as_well_as_any_choice_of_items(
    lengths: list[int], capacity: int
) -> None:
    bins = least_slack(np.array(lengths, dtype=np.int64), capacity)
    longest, *others = sorted(lengths, reverse=True)
    sums = {longest}
    for length in others:
        sums |= {total + length for total in sums if total + length <= capacity}
    assert sum(n for n, b in zip(lengths, bins.tolist(), strict=True) if b == 0) == max(sums)


def test_the_bins_are_the_same_in_every_version() -> None:
    """A golden value: to change it is to change what every resumed job is trained on."""
    lengths = np.array([8, 3, 5, 5, 2, 2, 4, 7], dtype=np.int64)
    assert least_slack(lengths, 10).tolist() == [0, 1, 2, 2, 0, 3, 3, 1]


def test_conversations_without_targets_are_left_out_and_counted(tmp_path: Path) -> None:
    write(tmp_path, [[([1, 2, 3], [False] * 3), ([4, 5], [False, True]), ([6], [True])]])
    source = opened(tmp_path)
    assert samples(source) == [[([4, 5], [False, True])]]
    assert source.packing_counts is not None
    assert [*source.packing_counts.lines(SEQ_LEN)] == [
        "2 of 3 conversations have no trained tokens: left out"
    ]


def test_too_long_stop_names_the_file_and_the_length(tmp_path: Path) -> None:
    write(tmp_path, [[([1, 2], [False, True]), ([*range(3, 40)], [False] * 36 + [True])]])
    with pytest.raises(ConfigError, match=r"train-00000\.bin, conversation 1(.|\n)*seq_len=36"):
        opened(tmp_path, too_long="stop")
    fitting = opened(tmp_path, seq_len=36, too_long="stop")
    assert [len(ids) for sample in samples(fitting) for ids, _ in sample] == [37, 2]


def test_a_mask_that_does_not_match_its_tokens_is_damage(tmp_path: Path) -> None:
    write(tmp_path, [[([1, 2], [False, True])]])
    for content in (b"\0\1\1", b"\0\2"):
        (tmp_path / "train-00000.mask").write_bytes(content)
        with pytest.raises(DamagedError, match=r"train-00000\.mask"):
            opened(tmp_path)


def test_the_packing_is_computed_once_and_again_for_other_masks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, [[([1, 2, 3], [False, True, True])]])
    assert opened(tmp_path).counts(np.zeros(1, dtype=np.uint64)).targets == 2
    with monkeypatch.context() as patch:
        patch.setattr(sample_layout, "pack_conversations", lambda *_: pytest.fail("packed again"))
        assert len(opened(tmp_path)) == 1
    write(tmp_path, [[([1, 2, 3], [False, False, True])]])
    assert opened(tmp_path).counts(np.zeros(1, dtype=np.uint64)).targets == 1


# ---- runs ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two folders of conversations and one of text, all with one tokenizer."""
    folder = tmp_path_factory.mktemp("folders")
    write_tokenizer(folder / "tokenizer")
    dtt = Dtt(folder)
    common = ["tokenizer.type=file", "tokenizer.path=tokenizer", "tokenize.validation_fraction=0.1"]
    for name, first in (("one", 0), ("two", 500)):
        rows = [conversation(i) for i in range(first, first + 200)]
        (folder / f"{name}.jsonl").write_bytes(jsonl(rows))
        arguments = ["data.type=chat", f"download.out=corpus-{name}", f"tokenize.out={name}"]
        dtt("download", "-d", f"{name}.jsonl", *arguments)
        dtt("tokenize", *arguments, *common)
    (folder / "text.jsonl").write_text(
        "".join(json.dumps({"text": f"{i} seven eggs " * 20}) + "\n" for i in range(200))
    )
    dtt("download", "-d", "text.jsonl", "download.out=corpus-text")
    dtt("tokenize", "download.out=corpus-text", "tokenize.out=text", *common)
    return folder


def run_of(*arguments: str) -> Dataset:
    sizes = ["train.seq_len=512", "train.global_batch_tokens=2048", "train.steps=5"]
    return open_dataset(resolve(None, [*sizes, *arguments]).config)


def test_several_folders_of_conversations_are_mixed(folder: Path) -> None:
    sources = f"[{{path: {folder}/one, weight: 3}}, {{path: {folder}/two, weight: 1}}]"
    dataset = run_of("data.type=chat", f"data.sources={sources}", "train.steps=8")
    chosen = dataset.order(0, 32)
    rows = dataset.read(chosen)
    assert dataset.shares() == {"one": 0.75, "two": 0.25}
    assert (rows.targets != IGNORE_INDEX).sum() == dataset.counts(chosen).targets
    assert dataset.manifest.chat is not None
    assert dataset.chat_template == (folder / "one/chat_template.jinja").read_text()


def test_conversations_and_text_are_mixed_as_tokens(folder: Path) -> None:
    sources = f"[{{path: {folder}/one}}, {{path: {folder}/text}}]"
    keys = ("data.packing=best-fit", "data.mask_documents=true")
    dataset = run_of(f"data.sources={sources}", *keys)
    for source in dataset.sources:
        some = np.arange(3, dtype=np.uint64)
        targets = source.read(some).targets
        assert source.counts(some).targets == (targets != IGNORE_INDEX).sum()
    with pytest.raises(ConfigError, match="token files of text hold text"):
        run_of("data.type=chat", f"data.sources={sources}")


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ([], r"data\.type=chat; or"),
        (["data.packing=best-fit"], r"data\.type=chat; or"),
        (["data.mask_documents=true"], r"data\.type=chat; or"),
        (["data.type=chat", "train.context_schedule=[[0,256],[2,512]]"], "would cut conversations"),
    ],
)
def test_conversations_are_neither_read_as_one_stream_nor_cut(
    folder: Path, keys: list[str], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        run_of(f"data.tokens={folder}/one", *keys)


def test_different_templates_are_not_mixed(tmp_path: Path) -> None:
    write(tmp_path / "a", [[([1, 2], [False, True])]])
    write(
        tmp_path / "b", [[([1, 2], [False, True])]], FACTS.model_copy(update={"stop_tokens": (2,)})
    )
    sources = f"[{{path: {tmp_path}/a}}, {{path: {tmp_path}/b}}]"
    with pytest.raises(ConfigError, match="a and b have different chat templates or stop tokens"):
        run_of("data.type=chat", f"data.sources={sources}")
