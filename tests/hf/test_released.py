"""An export carries over what training did not change of a released model."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import transformers
from support.tiny_job import (
    END_OF_DOCUMENT,
    IM_END,
    IM_START,
    make_tokenizer,
    write_chat_job,
    write_data,
    write_job,
)

from dtt.artifacts.jobdir import JobDir
from dtt.artifacts.manifests import DataManifest
from dtt.hf import export, released
from dtt.hf.read import read_hf_folder

GENERATION = {
    "do_sample": True, "temperature": 0.6, "top_k": 20, "suppress_tokens": [3],
    "eos_token_id": [IM_START, IM_END], "pad_token_id": 5, "bos_token_id": 7,
}  # fmt: skip
SETTINGS = {
    "tokenizer_class": "PreTrainedTokenizerFast", "padding_side": "left", "pad_token": "<|im_end|>",
    "bos_token": "<|im_start|>", "eos_token": "<|im_start|>", "add_prefix_space": False,
    "additional_special_tokens": ["<|im_end|>"], "chat_template": "{{ messages }}",
    "model_max_length": 99,
}  # fmt: skip
TOKENS = ("<|im_start|>", "<|im_end|>")


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The small files of a released model, of which a tiny job has the tokens."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "base"
    folder.mkdir()
    make_tokenizer(*TOKENS).save(str(folder / "tokenizer.json"))
    for name, content in (
        ("config.json", {"model_type": "llama", "max_position_embeddings": 256}),
        ("generation_config.json", GENERATION),
        ("tokenizer_config.json", SETTINGS),
    ):
        (folder / name).write_text(json.dumps(content))
    (folder / "tokenizer.model").write_bytes(b"sentencepiece")
    return folder


def export_of(job: Path, base: Path) -> Path:
    released.keep(f"hf:{base}", JobDir(job), job / "tokenizer.json")
    export.run(str(job), ["export.dtype=fp32"], out=Path("out"), upload=None, private=False)
    return Path("out")


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def test_a_tuned_chat_model_keeps_all_that_its_base_says(base: Path, tmp_path: Path) -> None:
    job = write_chat_job(tmp_path, "Hi")
    (job / "data.json").write_text(
        DataManifest.read(job).model_copy(update={"begin_of_document": 7}).dump()
    )
    out = export_of(job, base)
    ends = [IM_END, IM_START, END_OF_DOCUMENT]
    assert read(out / "generation_config.json") == GENERATION | {"eos_token_id": ends}
    tokenizer = read(out / "tokenizer_config.json")
    expected = {"padding_side": "left", "bos_token": "(", "model_max_length": 99}
    assert {key: tokenizer[key] for key in expected} == expected
    assert tokenizer["additional_special_tokens"] == ["<|im_end|>"]
    assert tokenizer["pad_token"] == tokenizer["eos_token"] == "<|im_end|>"
    assert not tokenizer.keys() & {"chat_template", "add_prefix_space", "add_bos_token"}
    assert (out / "tokenizer.model").read_bytes() == b"sentencepiece"
    assert transformers.AutoTokenizer.from_pretrained(out)("a").input_ids[0] == 7
    back = read_hf_folder(out)
    assert (back.begin_of_document, back.end_of_document) == (7, END_OF_DOCUMENT)


def test_a_model_of_text_keeps_the_template_and_the_stop_tokens(base: Path, tmp_path: Path) -> None:
    generation = GENERATION | {"eos_token_id": 9}
    (base / "generation_config.json").write_text(json.dumps(generation))
    job = write_chat_job(tmp_path)
    write_data(job, make_tokenizer(*TOKENS))
    out = export_of(job, base)
    assert (out / "chat_template.jinja").read_text() == "{{ messages }}"
    ends = [9, END_OF_DOCUMENT]
    assert read(out / "generation_config.json") == generation | {"eos_token_id": ends}
    assert read(out / "tokenizer_config.json")["model_max_length"] == 99
    assert read_hf_folder(out).end_of_document == END_OF_DOCUMENT


def test_with_other_tokens_the_settings_without_ids_are_kept_and_the_rest_is_named(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_tokenizer("<other>").save(str(base / "tokenizer.json"))
    (base / "tokenizer_config.json").write_text("{}")
    with caplog.at_level(logging.WARNING, "dtt"):
        out = export_of(write_job(tmp_path), base)
    assert "bos_token_id, eos_token_id, pad_token_id, suppress_tokens" in caplog.text
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), END_OF_DOCUMENT)
    kept = {"do_sample": True, "temperature": 0.6, "top_k": 20}
    assert read(out / "generation_config.json") == kept | ids
    assert not (out / "chat_template.jinja").exists()
    assert not (out / "tokenizer.model").exists()


def test_a_job_hands_on_what_it_keeps(base: Path, tmp_path: Path) -> None:
    first, second = write_chat_job(tmp_path), tmp_path / "jobs/second"
    second.mkdir()
    released.keep(f"hf:{base}", JobDir(first), first / "tokenizer.json")
    released.keep("jobs/tiny@10", JobDir(second), first / "tokenizer.json")
    for name in ("released.json", "tokenizer.model"):
        assert (second / name).read_bytes() == (first / name).read_bytes()
