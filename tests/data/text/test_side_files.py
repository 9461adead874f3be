"""Tokenizers yield the ids of AutoTokenizer for their folder, and begin documents as it does."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from dtt.base.errors import ConfigError, DamagedError, InputError
from dtt.data.text.encoder import Encoder
from dtt.data.text.side_files import check_special_tokens, tokenizer_content
from dtt.data.text.tokenizer import add_in_front, begin_of_document

STEP = "<|step|>"
TEXTS = (
    "go<|step|>on",
    " <|step|> ",
    "a<|step|>\n<|step|>b",
    "<|tool|>x",
    "plain text",
    "a <|endoftext|> b",
    "e\u0301",
)


def make(folder: Path, before: tuple[str, ...] = (), after: tuple[str, ...] = ()) -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "<|endoftext|>", "</s>"])
    ids = [(token, tokenizer.token_to_id(token)) for token in (*before, *after)]
    if ids:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after], special_tokens=ids
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def declared(special: bool, **flags: bool) -> dict[str, Any]:
    usual = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    return {"content": STEP, "special": special, **usual, **flags}


STRIPPING = declared(True, lstrip=True)
ENDING = declared(True, lstrip=True, rstrip=True) | {"content": "<|endoftext|>"}
SIDE_FILES: dict[str, dict[str, Any]] = {
    "decoder": {"tokenizer_config.json": {"added_tokens_decoder": {"259": declared(True)}}},
    "not special": {"tokenizer_config.json": {"added_tokens_decoder": {"259": declared(False)}}},
    "strips": {"tokenizer_config.json": {"added_tokens_decoder": {"259": STRIPPING}}},
    "additional": {"tokenizer_config.json": {"additional_special_tokens": [STEP]}},
    "as objects": {"tokenizer_config.json": {"additional_special_tokens": [declared(True)]}},
    "a role": {"tokenizer_config.json": {"eos_token": STEP}},
    "map": {"special_tokens_map.json": {"additional_special_tokens": [STEP]}},
    "a role in the map": {"special_tokens_map.json": {"pad_token": STEP}},
    "added": {"added_tokens.json": {STEP: 259}},
    "prefix space": {"tokenizer_config.json": {"add_prefix_space": True}},
    "by name": {"tokenizer_config.json": {"model_specific_special_tokens": {"step_token": STEP}}},
    "known, strips": {"tokenizer_config.json": {"added_tokens_decoder": {"257": ENDING}}},
    "rebuilt": {"tokenizer_config.json": {"tokenizer_class": "Qwen2Tokenizer"}},
    "nothing new": {"tokenizer_config.json": {"eos_token": "</s>", "add_bos_token": False}},
    "malformed": {"tokenizer_config.json": {"added_tokens_decoder": ["a"], "eos_token": 7}},
}  # fmt: skip


@pytest.mark.parametrize("files", SIDE_FILES.values(), ids=SIDE_FILES)
def test_the_ids_are_those_of_autotokenizer_or_the_folder_is_refused(
    tmp_path: Path, files: dict[str, dict[str, Any]]
) -> None:
    from transformers import AutoTokenizer

    make(tmp_path)
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, facts in ({"tokenizer_config.json": {}} | files).items():
        facts = config | facts if name == "tokenizer_config.json" else facts
        (tmp_path / name).write_text(json.dumps(facts))
    try:
        theirs = AutoTokenizer.from_pretrained(tmp_path)
    except Exception:  # noqa: BLE001
        theirs = None
    try:
        ours = Tokenizer.from_buffer(tokenizer_content(tmp_path / "tokenizer.json"))
    except InputError:
        assert theirs is None
        return
    if theirs is not None:
        for text in TEXTS:
            assert ours.encode(text).ids == theirs(text)["input_ids"], text


@pytest.mark.parametrize("named", ["OwnTokenizer", "PreTrainedTokenizerFast"])
def test_the_code_of_a_folder_does_not_run_whatever_is_answered(
    tmp_path: Path, named: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path)
    content, ran = (tmp_path / "tokenizer.json").read_bytes(), tmp_path / "ran"
    (tmp_path / "own.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass OwnTokenizer: ...")
    config = {"tokenizer_class": named, "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    monkeypatch.setattr("builtins.input", lambda _: "y")
    assert tokenizer_content(tmp_path / "tokenizer.json") == content
    assert not ran.exists()
    assert "own.OwnTokenizer" in caplog.text


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "vocab.json"])
def test_a_file_of_a_tokenizer_folder_that_cannot_be_read_is_named(
    tmp_path: Path, name: str
) -> None:
    make(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"add_prefix_space": true}')
    path = tmp_path / name
    for content in ("[" * 100_000 + "]" * 100_000, "a pipe", "a device", "a large file"):
        path.unlink(missing_ok=True)
        if content == "a pipe":
            os.mkfifo(path)
        elif content == "a device":
            path.symlink_to("/dev/zero")
        elif content == "a large file":
            path.touch()
            os.truncate(path, 2**30)
        elif name == "tokenizer_config.json":
            path.write_text(content)
        else:
            continue
        with pytest.raises(DamagedError, match=name):
            tokenizer_content(tmp_path / "tokenizer.json")


def test_special_tokens_beside_the_file_are_refused_for_documents(tmp_path: Path) -> None:
    """Their strings in documents would be text for dtt and tokens for transformers."""
    path = tmp_path / "tokenizer.json"
    tokenizer = make(tmp_path)
    check_special_tokens(path, path.read_bytes())
    tokenizer.add_tokens([AddedToken("plain", special=False)])
    check_special_tokens(path, tokenizer.to_str().encode())
    tokenizer.add_special_tokens([STEP])
    with pytest.raises(InputError, match=r"<\|step\|>: in documents"):
        check_special_tokens(path, tokenizer.to_str().encode())


@pytest.mark.parametrize("engine", ["hf", "gigatoken"])
def test_each_document_begins_with_the_token_of_the_tokenizer(tmp_path: Path, engine: Any) -> None:
    """gigatoken encodes many documents at once, and each must begin with it."""
    tokenizer = make(tmp_path, before=("<s>",))
    content = (tmp_path / "tokenizer.json").read_bytes()
    documents = [b"one", b"", b"<s>two <|endoftext|>", "drei \U0001f600".encode()] * 3
    plain, begun = (Encoder(content, "</s>", "x", engine, bos) for bos in ("never", "tokenizer"))
    for encoder in (plain, begun):
        encoder.choose_engine(encoder.engine_problem([]))
        assert encoder.engine == engine
    begin, end = tokenizer.token_to_id("<s>"), tokenizer.token_to_id("</s>")
    assert (plain.begin_of_document, begun.begin_of_document) == (None, begin)
    without = [one.tolist() for one in plain.encode(documents).documents()]
    assert [one.tolist() for one in begun.encode(documents).documents()] == [
        [begin, *ids] for ids in without
    ]
    assert all(ids[-1] == end and begin not in ids for ids in without)
    assert begun.encode([]).ids.dtype == np.uint32


@pytest.mark.parametrize(
    ("before", "after"), [((), ("</s>",)), (("<s>",), ("</s>",)), (("<s>", "</s>"), ())]
)
def test_other_tokens_around_a_text_are_refused_unless_they_are_switched_off(
    tmp_path: Path, before: tuple[str, ...], after: tuple[str, ...]
) -> None:
    tokenizer = make(tmp_path, before, after)
    with pytest.raises(ConfigError, match="adds other tokens to a text") as error:
        begin_of_document(tokenizer, "x")
    assert "tokenizer.bos=never" in str(error.value)
    Encoder((tmp_path / "tokenizer.json").read_bytes(), None, "x", bos="never")


@pytest.mark.parametrize("begin", [None, 256])
@pytest.mark.parametrize("before", [(), ("<s>",), ("</s>",)])
def test_a_model_is_used_with_what_its_documents_began_with(
    tmp_path: Path, before: tuple[str, ...], begin: int | None
) -> None:
    tokenizer = add_in_front(make(tmp_path, before), begin)
    plain = tokenizer.encode("a b", add_special_tokens=False).ids
    assert tokenizer.encode("a b").ids == ([] if begin is None else [begin]) + plain
