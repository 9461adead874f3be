"""What other programs read in the export of a model that was trained on conversations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import transformers
from support.tiny_job import (
    END_OF_DOCUMENT,
    IM_END,
    write_chat_job,
    write_job,
)

from dtt.artifacts.jobdir import JobDir
from dtt.artifacts.manifests import DataManifest, ExportManifest
from dtt.base.errors import DamagedError
from dtt.config.data import ChatConfig
from dtt.data.conversations.dialects import parse_prompt
from dtt.data.conversations.template import CHATML, resolve_template
from dtt.hf import export, verify
from dtt.hf.chat_format import eos_token_ids, folder_chat_format, job_chat_format
from dtt.hf.read import read_hf_folder
from dtt.hf.verify import CONVERSATIONS


def export_job(job: Path, out: Path) -> Path:
    export.run(str(job), ["export.dtype=fp32"], out=out, upload=None, private=False)
    return out


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return export_job(write_chat_job(tmp_path, "Hi 🙂!"), tmp_path / "out")


def read(folder: Path, name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / name).read_text())
    return content


def test_the_end_of_a_turn_is_the_end_of_sequence_token(folder: Path) -> None:
    assert read(folder, "config.json")["eos_token_id"] == IM_END
    generation = read(folder, "generation_config.json")
    assert generation["eos_token_id"] == [IM_END, END_OF_DOCUMENT]
    assert generation["pad_token_id"] == END_OF_DOCUMENT
    tokenizer = read(folder, "tokenizer_config.json")
    assert tokenizer["eos_token"] == "<|im_end|>"
    assert tokenizer["pad_token"] == tokenizer["bos_token"] == "<|endoftext|>"
    assert "chat_template" not in tokenizer
    assert (folder / "chat_template.jinja").read_text() == CHATML
    assert "chat_template.jinja" in {file.path for file in ExportManifest.read(folder).files}


def test_transformers_answers_and_stops(folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    messages = [{"role": "user", "content": "Hello"}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt"
    )
    answer = model.generate(**inputs, max_new_tokens=50)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "Hi 🙂!<|im_end|>"
    pipeline = transformers.pipeline("text-generation", model=str(folder))
    assert pipeline(messages, do_sample=False)[0]["generated_text"][-1] == {
        "role": "assistant", "content": "Hi 🙂!"
    }  # fmt: skip


def test_the_code_on_the_model_card_runs(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    card = (folder / "README.md").read_text()
    assert "chat_template.jinja" in card
    code = card.split("```python\n")[1].split("```")[0]
    capsys.readouterr()
    monkeypatch.chdir(folder)
    exec(code, {})
    assert capsys.readouterr().out == "Hi 🙂!\n"


def test_gguf_reads_the_template_and_the_end_of_a_turn(folder: Path) -> None:
    vocabulary = gguf.SpecialVocab(folder)
    assert vocabulary.chat_template == CHATML
    assert vocabulary.special_token_ids == {
        "bos": END_OF_DOCUMENT, "eos": IM_END, "pad": END_OF_DOCUMENT
    }  # fmt: skip
    assert vocabulary.add_special_token == {"bos": False}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        (folder / name).unlink()
    assert gguf.SpecialVocab(folder).special_token_ids["eos"] == IM_END  # of config.json


def test_an_export_is_read_back_with_the_same_format(folder: Path, tmp_path: Path) -> None:
    job = JobDir(tmp_path / "jobs/tiny")
    ours, theirs = job_chat_format(job, ChatConfig()), folder_chat_format(folder)
    assert ours is not None
    assert theirs is not None
    assert theirs.template == ours.template
    assert theirs.facts.stop_tokens == (IM_END, END_OF_DOCUMENT)
    assert theirs.encoder().stop_tokens == ours.encoder().stop_tokens == (IM_END,)
    for conversation in CONVERSATIONS:
        assert theirs.encoder().prompt_ids(conversation) == ours.encoder().prompt_ids(conversation)
    assert read_hf_folder(folder).end_of_document == END_OF_DOCUMENT
    # As `chat.template: tokenizer` does, for fine-tuning an export.
    assert resolve_template("tokenizer", folder / "tokenizer.json") == CHATML


def test_variables_of_the_template_have_their_values_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template that reads bos_token and eos_token renders the same after the export."""
    monkeypatch.chdir(tmp_path)
    template = (
        "{{ bos_token }}{% if eos_token is defined %}{{ mood }}{% endif %}"
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    job = write_chat_job(tmp_path, "Hi", template=template, kwargs={"mood": "calm"})
    manifest = DataManifest.read(job)
    assert manifest.chat is not None
    chat = manifest.chat.model_copy(update={"special_tokens": {"bos_token": "<|im_start|>"}})
    (job / "data.json").write_text(manifest.model_copy(update={"chat": chat}).dump())
    out = export_job(job, tmp_path / "out")
    tokenizer = read(out, "tokenizer_config.json")
    assert tokenizer["bos_token"] == "<|im_start|>"
    assert "eos_token" not in tokenizer
    messages = [{"role": "user", "content": "x"}]
    theirs = transformers.AutoTokenizer.from_pretrained(out).apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False, **chat.kwargs
    )
    assert theirs == "<|im_start|>[user]x<|im_end|>[assistant]"
    assert gguf.SpecialVocab(out).special_token_ids["eos"] == IM_END
    back = folder_chat_format(out)
    assert back is not None
    assert back.facts.kwargs == {"mood": "calm"}
    assert "mood='calm'" in (out / "README.md").read_text()
    assert back.encoder().template.render(
        parse_prompt({"messages": messages}), add_generation_prompt=True
    ) == theirs  # fmt: skip


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer.json"])
def test_verification_finds_prompts_with_other_ids(folder: Path, tmp_path: Path, name: str) -> None:
    chat = job_chat_format(JobDir(tmp_path / "jobs/tiny"), ChatConfig())
    assert chat is not None
    verify.check_prompts(folder, chat)
    text = (folder / name).read_text()
    (folder / name).write_text(text.replace("<|im_start|>", "<|start|>"))
    with pytest.raises(DamagedError, match="apply_chat_template returns different ids"):
        verify.check_prompts(folder, chat)


def test_the_export_of_a_base_model_has_no_trace_of_conversations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = export_job(write_job(tmp_path), tmp_path / "out")
    assert not (out / "chat_template.jinja").exists()
    assert "chat" not in read(out, "dtt_export.json")
    assert folder_chat_format(out) is None
    config = read(out, "tokenizer_config.json")
    assert list(config) == [
        "tokenizer_class", "model_max_length", "clean_up_tokenization_spaces",
        "bos_token", "eos_token", "pad_token",
    ]  # fmt: skip
    assert read(out, "generation_config.json") == dict.fromkeys(
        ("bos_token_id", "eos_token_id", "pad_token_id"), END_OF_DOCUMENT
    )


@pytest.mark.parametrize(
    ("config", "generation", "ends", "end_of_document"),
    [
        ({"eos_token_id": 7}, None, (7,), 7),
        ({"eos_token_id": [7, 8]}, None, (7, 8), 7),
        ({"eos_token_id": 7, "bos_token_id": 9}, {"eos_token_id": [7, 9]}, (7, 9), 9),
        ({"eos_token_id": 7, "bos_token_id": 3}, {"eos_token_id": [7, 9]}, (7, 9), 7),
        ({}, {"eos_token_id": 5}, (5,), 5),
        ({"eos_token_id": None}, {}, (), None),
    ],
)
def test_the_tokens_that_end_generation_are_found(
    folder: Path,
    config: dict[str, Any],
    generation: dict[str, Any] | None,
    ends: tuple[int, ...],
    end_of_document: int | None,
) -> None:
    kept = {k: v for k, v in read(folder, "config.json").items() if not k.endswith("_token_id")}
    (folder / "config.json").write_text(json.dumps(kept | config))
    (folder / "generation_config.json").unlink()
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    assert eos_token_ids(folder) == ends
    assert read_hf_folder(folder).end_of_document == end_of_document
