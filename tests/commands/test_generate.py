from __future__ import annotations

import io
from pathlib import Path

import pytest
import transformers
from tiny_job import END_OF_DOCUMENT, make_tokenizer, write_checkpoint, write_job

from dtt.commands import export, generate
from dtt.errors import ConfigError, InputError


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_job(tmp_path)


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


def ids(text: str) -> list[int]:
    found: list[int] = make_tokenizer().encode(text).ids
    return found


def test_job_export_and_transformers_say_the_same(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export.run(job, ["export.dtype=fp32"], out=tmp_path / "out")
    said(capsys)
    generate.run(job, "def f", max_new_tokens=20, temperature=0)
    from_job = said(capsys)
    generate.run(tmp_path / "out", "def f", max_new_tokens=20, temperature=0)
    assert said(capsys) == from_job
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    inputs = tokenizer("def f", return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=20, do_sample=False)[0]
    expected = tokenizer.decode(ids, skip_special_tokens=True)
    assert from_job.startswith("def f")
    assert from_job.rstrip("\n�") == expected.rstrip("\n�")


def test_a_seed_fixes_the_text(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for seed in (1, 1, 2):
        generate.run(job, "x", max_new_tokens=30, temperature=1.5, top_k=100, top_p=0.9, seed=seed)
        texts.append(said(capsys))
    assert texts[0] == texts[1] != texts[2]


def test_a_dash_reads_the_prompt_from_standard_input(
    job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe é"))
    generate.run(job, "-", max_new_tokens=1)
    assert said(capsys).startswith("from a pipe é")


def test_it_stops_at_the_end_of_a_document(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    d, o, n = ids("don")
    write_checkpoint(job, 20, says={d: o, o: n, n: END_OF_DOCUMENT})
    generate.run(job, "d", temperature=0)
    assert said(capsys) == "don\n"


def test_it_stops_at_the_end_of_the_context(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (a,) = ids("a")
    write_checkpoint(job, 20, says={a: a})
    generate.run(job, "a", max_new_tokens=1000, temperature=0)
    assert said(capsys) == 64 * "a" + "\n"


def test_an_empty_prompt_begins_a_document(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (a,) = ids("a")
    write_checkpoint(job, 20, says={END_OF_DOCUMENT: a, a: a})
    generate.run(job, "", max_new_tokens=3, temperature=0)
    assert said(capsys) == "aaa\n"


def test_a_character_of_several_tokens_comes_out_whole(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, *face = ids("a🙂")
    write_checkpoint(job, 20, says=dict(zip([a, *face], [*face, END_OF_DOCUMENT], strict=True)))
    generate.run(job, "a", temperature=0)
    assert said(capsys) == "a🙂\n"


def test_a_prompt_that_fills_the_context_is_refused(job: Path) -> None:
    with pytest.raises(ConfigError, match="the prompt is too long: 64 tokens"):
        generate.run(job, "y" * 64)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no model in"):
        generate.run(tmp_path, "x")


def test_a_job_without_a_checkpoint_is_refused(job: Path) -> None:
    for step in (5, 10):
        (job / "checkpoints" / f"step-{step:06d}").rename(job / str(step))
    with pytest.raises(InputError, match="no checkpoint in"):
        generate.run(job, "x")
