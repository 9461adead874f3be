from __future__ import annotations

import io
from pathlib import Path

import pytest
import transformers
from tiny_job import END_OF_DOCUMENT, make_tokenizer, write_checkpoint, write_data, write_job
from tokenizers import processors

from dtt.commands import export, generate
from dtt.errors import ConfigError, InputError


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_job(tmp_path)


def run_generate(
    source: Path,
    prompt: str,
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int | None = None,
) -> None:
    generate.run(
        source,
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
    )


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


def ids(text: str) -> list[int]:
    found: list[int] = make_tokenizer().encode(text).ids
    return found


def test_job_export_and_transformers_say_the_same(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export.run(
        job, ["export.dtype=fp32"], step=None, out=tmp_path / "out", upload=None, private=False
    )
    said(capsys)
    run_generate(job, "def f", max_new_tokens=20)
    from_job = said(capsys)
    run_generate(tmp_path / "out", "def f", max_new_tokens=20)
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
        run_generate(job, "x", max_new_tokens=30, temperature=1.5, top_k=100, top_p=0.9, seed=seed)
        texts.append(said(capsys))
    assert texts[0] == texts[1] != texts[2]


def test_a_dash_reads_the_prompt_from_standard_input(
    job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe é"))
    run_generate(job, "-", max_new_tokens=1)
    assert said(capsys).startswith("from a pipe é")


def test_it_stops_at_the_end_of_a_document(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    d, o, n = ids("don")
    write_checkpoint(job, 20, says={d: o, o: n, n: END_OF_DOCUMENT})
    run_generate(job, "d")
    assert said(capsys) == "don\n"


def test_it_stops_at_the_end_of_the_context(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (a,) = ids("a")
    write_checkpoint(job, 20, says={a: a})
    run_generate(job, "a", max_new_tokens=1000)
    assert said(capsys) == 64 * "a" + "\n"


def test_an_empty_prompt_begins_a_document(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (a,) = ids("a")
    write_checkpoint(job, 20, says={END_OF_DOCUMENT: a, a: a})
    run_generate(job, "", max_new_tokens=3)
    assert said(capsys) == "aaa\n"


@pytest.mark.parametrize(("prompt", "expected"), [("a", "ab\n"), ("", "zz\n")])
def test_no_token_that_training_left_out_is_put_before_the_prompt(
    job: Path, capsys: pytest.CaptureFixture[str], prompt: str, expected: str
) -> None:
    a, b, z = ids("abz")
    tokenizer = make_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="z $A b", special_tokens=[("z", z), ("b", b)]
    )
    write_data(job, tokenizer)
    write_checkpoint(job, 20, says={a: b, b: END_OF_DOCUMENT, END_OF_DOCUMENT: z, z: z})
    run_generate(job, prompt, max_new_tokens=2)
    assert said(capsys) == expected


def test_a_character_of_several_tokens_comes_out_whole(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, *face = ids("a🙂")
    write_checkpoint(job, 20, says=dict(zip([a, *face], [*face, END_OF_DOCUMENT], strict=True)))
    run_generate(job, "a")
    assert said(capsys) == "a🙂\n"


def test_a_prompt_that_fills_the_context_is_refused(job: Path) -> None:
    with pytest.raises(ConfigError, match="the prompt is too long: 64 tokens"):
        run_generate(job, "y" * 64)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no model in"):
        run_generate(tmp_path, "x")


def test_a_job_without_a_checkpoint_is_refused(job: Path) -> None:
    for step in (5, 10):
        (job / "checkpoints" / f"step-{step:06d}").rename(job / str(step))
    with pytest.raises(InputError, match="no checkpoint in"):
        run_generate(job, "x")
