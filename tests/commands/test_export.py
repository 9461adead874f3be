from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from tiny_job import write_job

from dtt.commands import export
from dtt.errors import ConfigError, InputError


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_job(tmp_path)


def test_the_newest_checkpoint_is_exported_to_the_default_place(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = export.run(job)
    assert (manifest.job, manifest.step, manifest.dtype) == ("tiny", 10, "bf16")
    assert capsys.readouterr().out.startswith("exports/tiny: step 10, ")
    folder = Path("exports/tiny")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert model.num_parameters() == manifest.parameters
    assert transformers.AutoTokenizer.from_pretrained(folder)("ab").input_ids == [64, 65]
    card = (folder / "README.md").read_text()
    assert "python-stdlib" in card
    assert f"{manifest.parameters:,}" in card


def test_the_same_again_writes_nothing(job: Path) -> None:
    first = export.run(job)
    before = Path("exports/tiny").stat().st_mtime_ns
    assert export.run(job) == first
    assert Path("exports/tiny").stat().st_mtime_ns == before


def test_a_step_a_place_and_a_dtype_can_be_named(job: Path, tmp_path: Path) -> None:
    out = tmp_path / "released" / "five"
    manifest = export.run(job, ["export.dtype=fp32"], step=5, out=out)
    assert (manifest.step, manifest.dtype) == (5, "fp32")
    with pytest.raises(ConfigError, match="another export: tiny, step 5"):
        export.run(job, ["export.dtype=fp32"], out=out)


def test_a_step_that_is_not_there_is_refused_with_those_that_are(job: Path) -> None:
    with pytest.raises(InputError, match=r"no checkpoint of step 7.*\n.*5, 10"):
        export.run(job, step=7)


def test_a_folder_that_is_no_job_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a job directory"):
        export.run(tmp_path)
