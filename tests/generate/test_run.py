from __future__ import annotations

import io
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers
from support.running import Dtt
from support.tiny_job import (
    END_OF_DOCUMENT,
    make_tokenizer,
    write_checkpoint,
    write_data,
    write_job,
)
from tokenizers import Regex, pre_tokenizers, processors

from dtt.base.errors import ConfigError, DamagedError, InputError
from dtt.generate import run as generate
from dtt.hf import export


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_job(tmp_path)


def run_generate(
    source: Path | str,
    *prompts: str,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int | None = None,
    **options: Any,
) -> None:
    sampling = generate.Sampling(max_new_tokens, temperature, top_k, top_p, seed)
    generate.run(str(source), prompts, sampling, **options)


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


def ids(text: str) -> list[int]:
    found: list[int] = make_tokenizer().encode(text).ids
    return found


def test_job_export_and_transformers_generate_the_same_text(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export.run(str(job), ["export.dtype=fp32"], out=tmp_path / "out", upload=None, private=False)
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


def test_a_dash_reads_the_prompt_from_standard_input(
    job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe é"))
    run_generate(job, "-", max_new_tokens=1)
    assert said(capsys).startswith("from a pipe é")


@pytest.mark.parametrize(
    ("chain", "prompt", "expected"),
    [
        ("don\0", "d", "don\n"),  # it stops at the end of a document
        ("\0aa", "", "aaa\n"),  # an empty prompt starts a document
        ("a🙂\0", "a", "a🙂\n"),  # a character of several tokens is complete
    ],
)
def test_a_text_is_printed_up_to_its_end(
    job: Path, capsys: pytest.CaptureFixture[str], chain: str, prompt: str, expected: str
) -> None:
    """Each token of a chain follows the one before; NUL stands for the end of a document."""
    tokens = [END_OF_DOCUMENT if id == ids("\0")[0] else id for id in ids(chain)]
    write_checkpoint(job, 20, says=dict(itertools.pairwise(tokens)))
    run_generate(job, prompt, max_new_tokens=10 if chain[-1] == "\0" else 3)
    assert said(capsys) == expected


@pytest.mark.parametrize(("prompt", "expected"), [("a", "ab\n"), ("", "zz\n")])
def test_no_token_unknown_to_training_precedes_the_prompt(
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


def test_continuations_do_not_depend_on_the_batch(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["def f", "x", "a longer prompt", ""]
    settings = {"max_new_tokens": 20, "temperature": 1.5, "top_k": 100, "seed": 3}
    alone = []
    for prompt in prompts:
        run_generate(job, prompt, **settings)
        alone.append(said(capsys))
    run_generate(job, *prompts[:2], **settings)
    assert said(capsys) == f"==> 1 of 2 <==\n{alone[0]}==> 2 of 2 <==\n{alone[1]}"
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(prompts[1:]) + "\n")
    run_generate(job, prompts[0], prompts_file=file, batch_size=3, as_json=True, **settings)
    records = [json.loads(line) for line in said(capsys).splitlines()]
    assert [record["prompt"] for record in records] == prompts
    assert [record["prompt"] + record["text"] + "\n" for record in records] == alone


def test_the_command_line_takes_several_prompts(job: Path, dtt: Dtt) -> None:
    a, b = ids("ab")
    write_checkpoint(job, 20, says={a: b, b: END_OF_DOCUMENT})
    (dtt.folder / "prompts.txt").write_text("b\na\n")
    done = dtt("generate", job, "-p", "a", "--prompts-file", "prompts.txt", "--temperature", 0)
    assert done.stdout == "==> 1 of 3 <==\nab\n==> 2 of 3 <==\nb\n==> 3 of 3 <==\nab\n"


def test_json_has_the_finish_reason(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = ids("ab")
    write_checkpoint(job, 20, says={a: a, b: END_OF_DOCUMENT})
    run_generate(job, "a", "ab", "a" * 62, max_new_tokens=5, as_json=True)
    records = [json.loads(line) for line in said(capsys).splitlines()]
    assert [
        (r["text"], r["finish_reason"], r["prompt_tokens"], r["completion_tokens"]) for r in records
    ] == [("aaaaa", "length", 1, 5), ("", "stop", 2, 0), ("aa", "length", 62, 2)]


@pytest.mark.parametrize(
    ("config", "given", "expected"),
    [
        ({"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}, {}, (0.6, 20, 0.95)),
        ({"do_sample": True, "top_p": 0.9}, {"top_p": 0.5}, (1.0, None, 0.5)),
        ({"do_sample": True, "top_k": 0, "temperature": 2}, {"temperature": 0.1}, (0.1, None, 1.0)),
        ({"temperature": 0.6}, {}, (0.8, None, 1.0)),  # transformers would be greedy
        (None, {"top_k": 3}, (0.8, 3, 1.0)),
        ({"do_sample": True, "temperature": "hot"}, {}, "temperature is 'hot'"),
        ({"do_sample": True, "top_p": 1e999}, {}, "top_p is inf"),
    ],
)
def test_options_that_are_not_given_are_those_of_the_model(
    config: dict[str, Any] | None,
    given: dict[str, Any],
    expected: tuple[object, ...] | str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "config.json").write_text("{}")
    if config is not None:
        content = json.dumps(config | {"repetition_penalty": 1.1, "min_p": 0})
        (tmp_path / "generation_config.json").write_text(content)
    options = {"temperature": None, "top_k": None, "top_p": None, "seed": None} | given
    if isinstance(expected, str):
        with pytest.raises(DamagedError, match=expected):
            generate.choose_sampling(str(tmp_path), 5, **options)
        return
    with caplog.at_level("INFO", logger="dtt"):
        found = generate.choose_sampling(str(tmp_path), 5, **options)
    assert (found.temperature, found.top_k, found.top_p) == expected
    said = config is not None and "do_sample" in config
    assert ("does not have: repetition_penalty 1.1" in caplog.text) == said
    assert ("temperature 0.6, top_k 20, top_p 0.95" in caplog.text) == (expected[0] == 0.6)


def test_a_step_of_a_job_and_a_folder_with_the_prefix_of_init_from_are_sources(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b, c = ids("abc")
    write_checkpoint(job, 20, says={a: b, b: END_OF_DOCUMENT})
    write_checkpoint(job, 30, says={a: c, c: END_OF_DOCUMENT})
    export.run(f"{job}@20", [], out=tmp_path / "out", upload=None, private=False)
    said(capsys)
    for source, text in (
        (job, "ac"), (f"{job}@20", "ab"), (tmp_path / "out", "ab"), (f"hf:{tmp_path}/out", "ab")
    ):  # fmt: skip
        run_generate(source, "a")
        assert said(capsys) == f"{text}\n"


@pytest.mark.parametrize(
    ("source", "prompts", "message"),
    [
        ("jobs/none", ["x"], "there is no such folder"),
        ("jobs/none@5", ["x"], "there is no such folder"),
        ("jobs/tiny@7", ["x"], r"there are: 5, 10"),
        ("jobs/tiny@newest", ["x"], "does not name a step"),
        ("hf:jobs/tiny", ["x"], "has no config.json"),
        ("jobs/empty", ["x"], "no checkpoint in"),
        ("jobs/tiny", ["y", "y" * 64], "prompt 2 is too long: 64 tokens"),
        ("jobs/tiny", ["\udcff"], "not UTF-8 text"),
        ("jobs/tiny", ["-"], "not UTF-8 text"),
        ("jobs/tiny", None, r"prompts\.txt"),
        ("jobs/tiny", b"", r"prompts\.txt"),
        ("jobs/tiny", b"\xff", r"prompts\.txt"),
    ],
)
def test_a_mistake_is_named(
    job: Path,
    source: str,
    prompts: list[str] | bytes | None,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts are those of the command line, or the content of a file, which may be missing."""
    shutil.copytree(job, "jobs/empty", ignore=shutil.ignore_patterns("step-*"))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), "utf-8"))
    file = None if isinstance(prompts, list) else Path("prompts.txt")
    if isinstance(prompts, bytes):
        Path("prompts.txt").write_bytes(prompts)
    given = prompts if isinstance(prompts, list) else []
    with pytest.raises((ConfigError, InputError), match=message):
        run_generate(source, *given, prompts_file=file)


def test_a_prompt_that_the_tokenizer_cannot_encode_is_named(
    job: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its pattern takes too many steps for this text, for which `tokenizers` panics."""
    tokenizer = make_tokenizer()
    costly = pre_tokenizers.Split(Regex("(a+)+$|((a|a)*)*b"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([costly, tokenizer.pre_tokenizer])
    write_data(job, tokenizer)
    with pytest.raises(InputError, match="cannot encode a text") as error:
        run_generate(job, "a" * 60 + "c")
    assert "its pattern failed" in (error.value.why or "")
    assert "panicked" not in capfd.readouterr().err
