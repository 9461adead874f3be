"""Tokenizers are byte-level, the same every time, and never let a text end its own document."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from dtt.base.errors import DamagedError, EnvironmentUnfit, InputError
from dtt.config.data import GivenTokenizerConfig, TrainedTokenizerConfig
from dtt.data.corpus.document_sampling import held_out, tokenizer_sample
from dtt.data.corpus.hub import MODEL_FILES, fetch_model
from dtt.data.text.encoder import Encoder
from dtt.data.text.tokenizer import (
    PATTERNS,
    given_tokenizer,
    open_tokenizer,
    token_bytes,
    train_tokenizer,
)
from dtt.data.tokenize import markers
from dtt.data.tokenize.work_plan import read_key

TEXTS = [f"def function_{i}(x):\n    return {i} * x + {i * i}\n" for i in range(200)]


def train(**options: Any) -> bytes:
    cfg = TrainedTokenizerConfig(**({"vocab_size": 400} | options))
    return train_tokenizer(cfg, [TEXTS]).encode()


@pytest.fixture(scope="module")
def content() -> bytes:
    return train()


def test_special_tokens_come_first_then_bytes_then_merges() -> None:
    content = train(special_tokens=("<eos>", "<pad>"))
    vocabulary = Tokenizer.from_buffer(content).get_vocab()
    assert vocabulary["<eos>"] == 0
    assert vocabulary["<pad>"] == 1
    assert len(vocabulary) == 400 == max(vocabulary.values()) + 1
    assert all(len(token) == 1 for token, i in vocabulary.items() if 2 <= i < 258)


def test_the_number_of_threads_does_not_change_the_tokenizer(content: bytes) -> None:
    code = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_tokenizer import train
sys.stdout.buffer.write(train())
"""
    for threads in ("1", "4"):
        env = os.environ | {"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads}
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, env=env, check=True)
        assert run.stdout == content


@pytest.mark.parametrize("train_bytes", [1, 20_000, 10**9])
def test_the_tokenizer_learns_from_the_start_of_every_unit(corpora: Any, train_bytes: int) -> None:
    texts = [f"{i} words, {i * i} more and {'so on ' * (i % 40)}" for i in range(1000)]
    lines = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)
    corpus = corpora.make({"a.jsonl": lines})
    units = corpus.units(20_000)
    read: list[int] = []
    batches = tokenizer_sample(corpus, units, train_bytes, 0.1, read.append)
    sample = [text for batch in batches for text in batch]
    trained = [text for text in texts if not held_out(text.encode(), 0.1)]
    assert sample == [text for text in trained if text in set(sample)]
    if train_bytes > 10**6:
        assert sample == trained
    else:
        assert train_bytes <= sum(read) <= 3 * max(train_bytes, 300 * len(units))


def test_a_text_too_small_for_the_vocabulary_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    cfg = TrainedTokenizerConfig(vocab_size=5000)
    content = train_tokenizer(cfg, [["abc", " abc", " abc"]]).encode()
    assert "not 5000" in caplog.text
    assert Encoder(content, None, "here").vocab_size < 300


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("gpt2", ["I", "'ll", " pay", " 12345", " DON", "'", "T"]),
        ("llama3", ["I", "'ll", " pay", " ", "123", "45", " DON", "'T"]),
        ("qwen2", ["I", "'ll", " pay", " ", "1", "2", "3", "4", "5", " DON", "'T"]),
        ("qwen3.5", ["I", "'ll", " pay", " ", "1", "2", "3", "4", "5", " DON", "'T"]),
    ],
)
def test_pre_tokenizers_split_as_published(name: Any, pieces: list[str]) -> None:
    tokenizer = Tokenizer.from_buffer(train(pre_tokenizer=name))
    split = tokenizer.pre_tokenizer.pre_tokenize_str("I'll pay 12345 DON'T")
    assert [piece.replace("Ġ", " ") for piece, _ in split] == pieces


def test_patterns_are_those_of_published_tokenizers(shared: Path) -> None:
    for name, file in (("llama3", "dolma2"), ("qwen2", "qwen")):
        path = shared / "data/tokenizers" / file / "tokenizer.json"
        published = json.loads(path.read_bytes())["pre_tokenizer"]
        patterns = [part["pattern"]["Regex"] for part in published["pretokenizers"][:1]]
        assert patterns == [PATTERNS[name]]


def test_given_tokenizers_are_found_in_files_and_folders(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        assert given_tokenizer(GivenTokenizerConfig(path=str(path))) == content


def test_a_missing_tokenizer_is_reported(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"sentencepiece")
    others = (str(tmp_path / "none.json"), str(tmp_path))
    for path in ("tokenizer.json", *others, "./folder", "hf:org/name"):
        with pytest.raises(InputError, match="no tokenizer at"):
            given_tokenizer(GivenTokenizerConfig(path=path))
    with pytest.raises(InputError, match=r"there is a tokenizer\.model(.|\n)*save_pretrained"):
        given_tokenizer(GivenTokenizerConfig(path=str(tmp_path)))


def test_a_name_that_is_neither_a_path_nor_in_the_cache_is_reported_as_both(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A path with a typing error looks like a name on the Hub."""
    monkeypatch.chdir(tmp_path)
    for fetch in (
        lambda: given_tokenizer(GivenTokenizerConfig(path="tiny")),
        lambda: fetch_model("tiny", None, MODEL_FILES),
    ):
        with pytest.raises(EnvironmentUnfit) as caught:
            fetch()
        for words in (
            "no model tiny on this machine", "no file or folder tiny", "HF_HUB_OFFLINE is set",
            "specify an existing file or folder", "ORG/NAME",
        ):  # fmt: skip
            assert words in str(caught.value)


def test_a_folder_that_is_there_is_not_taken_for_a_model_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tok").mkdir()
    with pytest.raises(InputError, match=r"no tokenizer at tok\n.*tok/tokenizer\.json"):
        given_tokenizer(GivenTokenizerConfig(path="tok"))


def sizes_of(content: bytes, folder: Path, end: int = 0) -> Any:
    path = folder / "tokenizer.json"
    path.write_bytes(content)
    return token_bytes(path, Tokenizer.from_buffer(content).get_vocab_size() + 3, end)


def test_the_bytes_of_tokens_add_up_to_those_of_the_text(content: bytes, tmp_path: Path) -> None:
    """Ids above the vocabulary stand for nothing, as the end of a document does."""
    sizes = sizes_of(content, tmp_path)
    encoder = Encoder(content, None, "here")
    for text in (TEXTS[7], "Düsseldorf, Ærø, 日本語 🙂\n\t ", "<|endoftext|>", ""):
        ids, _ = encoder.encode([text.encode()])
        assert sizes[ids].sum() == len(text.encode())
    assert (sizes[0], sizes[-3:].tolist()) == (0, [0, 0, 0])


@pytest.mark.parametrize("name", ["gpt2", "qwen", "gpt-neox-20b", "dolma2", "mistral-v1"])
def test_the_bytes_of_released_tokenizers_add_up(name: str, shared: Path) -> None:
    path = shared / "data/tokenizers" / name / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    encoder = Encoder(path.read_bytes(), None, path)
    sizes = token_bytes(path, encoder.vocab_size, encoder.end_of_document)
    assert sizes is not None
    file = sorted((shared / "data/tinyshakespeare").glob("*.txt"))[0]
    texts = [file.read_text()[:50_000], "Düsseldorf, 日本語 🙂 naïve  two spaces\n\n\tx = 1"]
    for text in texts:
        found = sizes[tokenizer.encode(text, add_special_tokens=False).ids].sum()
        before = 1 if name == "mistral-v1" else 0  # SentencePiece puts a space before the text
        assert found == len(text.encode()) + before


def test_the_bytes_of_word_pieces_are_not_known(tmp_path: Path) -> None:
    from tokenizers import decoders, models

    tokenizer = Tokenizer(models.WordPiece({"a": 0, "##b": 1}, unk_token="a"))
    tokenizer.decoder = decoders.WordPiece()
    assert sizes_of(tokenizer.to_str().encode(), tmp_path) is None


def test_the_bytes_of_a_unigram_vocabulary_with_byte_fallback(tmp_path: Path) -> None:
    from tokenizers import AddedToken, decoders, models

    vocabulary = [("<unk>", 0.0), ("▁a", -1.0), ("é", -1.0), ("<0x0A>", -2.0)]
    tokenizer = Tokenizer(models.Unigram(vocabulary, 0, byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken("<unk>"), AddedToken("</s>")])
    tokenizer.add_tokens(["über"])
    sizes = sizes_of(tokenizer.to_str().encode(), tmp_path, end=4)
    assert sizes.tolist()[:6] == [0, 2, 2, 1, 0, 5]


def test_a_pipe_is_neither_a_tokenizer_nor_a_marker(tmp_path: Path) -> None:
    """Reading one would wait for a writer."""
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(DamagedError, match="cannot be read"):
        open_tokenizer(tmp_path / "tokenizer.json")
    marker = markers.marker_path(tmp_path, 0)
    marker.parent.mkdir(parents=True)
    for path in (marker, marker.with_name("identity.json")):
        os.mkfifo(path)
    assert markers.read_marker(tmp_path, 0, "key") is None
    assert read_key(tmp_path) is None
