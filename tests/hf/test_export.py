from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import transformers
from support.loopback_hub import LoopbackHub
from support.running import Dtt
from support.tiny_job import write_job

from dtt.artifacts.corpus import CorpusSource
from dtt.artifacts.jobdir import JobDir
from dtt.artifacts.manifests import DataManifest, ExportManifest
from dtt.base.errors import ConfigError, InputError, InUse
from dtt.hf import export, publish


def run_export(
    job: Path, overrides: Sequence[str] = (), *, step: int | None = None, out: Path | None = None
) -> ExportManifest:
    source = str(job) if step is None else f"{job}@{step}"
    return export.run(source, overrides, out=out, upload=None, private=False)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_job(tmp_path)


def test_the_newest_checkpoint_is_exported_to_the_default_folder(
    job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = run_export(job)
    assert (manifest.job, manifest.step, manifest.dtype) == ("tiny", 10, "bf16")
    said = capsys.readouterr().out
    assert said.startswith("exports/tiny: step 10, ")
    assert "bf16, rounded from what was trained, which moves logits by at most" in said
    folder = Path("exports/tiny")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert model.num_parameters() == manifest.parameters
    assert transformers.AutoTokenizer.from_pretrained(folder)("ab").input_ids == [64, 65]
    card = (folder / "README.md").read_text()
    assert "python-stdlib" in card
    assert f"{manifest.parameters:,}" in card
    monkeypatch.chdir(folder)
    exec(card.split("```python\n")[1].split("```")[0], {})
    assert capsys.readouterr().out.startswith("Once upon a time")


def test_the_model_card_has_the_validation_loss_and_no_local_paths(job: Path) -> None:
    data = DataManifest.read(job)
    (source,) = data.sources
    corpora = [
        CorpusSource(kind="local", id="/home/me/secret project/diary.jsonl"),
        CorpusSource(kind="own", id="/home/me/secret project/mine.py:Words"),
    ]
    sources = tuple(source.model_copy(update={"corpus": corpus}) for corpus in corpora)
    local = data.model_copy(update={"sources": sources})
    (job / local.filename).write_text(local.dump())
    evaluations = [(0, 5.5, 2.25), (5, 4.25, 1.5), (10, 3.125, 1.25)]
    with JobDir(job).metrics.open("w") as file:
        for step, loss, bits in evaluations:
            record = {"kind": "eval", "step": step, "loss": loss, "bits_per_byte": bits}
            file.write(json.dumps(record) + "\n")
    run_export(job, step=5)
    card = Path("exports/tiny/README.md").read_text()
    assert "| Trained on | diary.jsonl (1,000 tokens), mine.py:Words (1,000 tokens) |" in card
    assert "| Validation loss | 4.2500 nats per token, 1.5000 bits per byte, after step 5 |" in card
    for path in Path("exports/tiny").iterdir():
        assert b"secret project" not in path.read_bytes()


def test_the_result_as_json_is_all_of_stdout(job: Path, dtt: Dtt) -> None:
    done = dtt("export", "jobs/tiny", "--json", "-q")
    reported = json.loads(done.stdout)
    manifest = ExportManifest.read(Path("exports/tiny"))
    assert reported == {"folder": "exports/tiny", "url": None} | manifest.model_dump(mode="json")
    assert done.stderr == ""


HUB = {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}


@pytest.mark.slow
def test_an_invalid_upload_is_refused_before_the_export(job: Path, dtt: Dtt) -> None:
    with LoopbackHub() as hub:
        env = HUB | {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(job / "none")}
        done = dtt("export", "jobs/tiny", "--upload", "org/model", expect=78, **env)
        assert "no Hugging Face token" in done.stderr
        assert not Path("exports").exists()
        env["HF_TOKEN"] = hub.token
        done = dtt("export", "jobs/tiny", "--upload", "org/model", "--json", **env)
        assert json.loads(done.stdout)["url"] == f"{hub.endpoint}/org/model"
        repo = hub.repos["model", "org/model"]
        sent = repo.files["model.safetensors"]
        assert sent == Path("exports/tiny/model.safetensors").read_bytes()

        more = ("--upload", "org/model", "--revision", "step-5")
        dtt("export", "jobs/tiny@5", *more, "--json", **env)
        branch = repo.branches["step-5"]
        assert branch == {p.name: p.read_bytes() for p in Path("exports/tiny").iterdir()}
        assert json.loads(branch["dtt_export.json"])["step"] == 5
        assert "| Training | 5 steps, " in branch["README.md"].decode()
        assert json.loads(repo.files["dtt_export.json"])["step"] == 10


def test_a_repeated_export_writes_nothing(job: Path) -> None:
    first = run_export(job)
    before = Path("exports/tiny").stat().st_mtime_ns
    assert run_export(job) == first
    assert Path("exports/tiny").stat().st_mtime_ns == before


def test_other_keys_export_again(job: Path) -> None:
    run_export(job)
    run_export(job, ["export.license=mit", "export.max_shard_size=20KB"])
    assert "license: mit" in Path("exports/tiny/README.md").read_text()
    assert len(list(Path("exports/tiny").glob("*.safetensors"))) > 1
    with pytest.raises(ConfigError, match=r"export\.dtype=fp16 does not apply to an adapter"):
        export.run("jobs/tiny", ["export.dtype=fp16"], out=None, upload=None, private=False,
                   adapter=True)  # fmt: skip


def test_files_of_others_stay_beside_an_export(job: Path) -> None:
    out = Path("exports/tiny")
    run_export(job, step=5)
    (out / "notes").mkdir()
    for name in ("model-q4.gguf", "notes/a.txt"):
        (out / name).write_text(name)
    (out / "link").symlink_to("elsewhere")
    run_export(job)
    assert (out / "model-q4.gguf").read_text() == "model-q4.gguf"
    assert (out / "notes/a.txt").read_text() == "notes/a.txt"
    assert (out / "link").readlink() == Path("elsewhere")
    assert {"model-q4.gguf", "notes"}.isdisjoint(ExportManifest.read(out).names())
    run_export(job)  # already done, with them


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("README.md", "a file of the earlier export was changed, and would be lost"),
        ("adapter_config.json", "transformers would load it together with the export"),
        ("model.safetensors.index.json", "transformers would load it together"),
    ],
)
def test_what_an_export_would_lose_or_load_wrongly_is_refused(
    job: Path, name: str, says: str
) -> None:
    run_export(job, step=5)
    (Path("exports/tiny") / name).write_text("{}")
    with pytest.raises(ConfigError, match=f"{says}(.|\n)*move it away"):
        run_export(job)
    assert ExportManifest.read(Path("exports/tiny")).step == 5
    assert (Path("exports/tiny") / name).read_text() == "{}"


def test_two_exports_into_one_folder_are_refused(job: Path) -> None:
    with publish.claimed(Path("exports/tiny")), pytest.raises(InUse, match="dtt export into"):
        run_export(job)
    run_export(job)


def test_what_a_killed_export_left_is_cleared_up(job: Path) -> None:
    """Killed between the renames: the earlier export is put back before it is replaced."""
    run_export(job, step=5)
    out = Path("exports/tiny")
    (out / "mine.txt").touch()
    out.rename("exports/.tiny.0a.old")
    Path("exports/.tiny.0a.tmp").mkdir()
    run_export(job)
    assert (out / "mine.txt").is_file()
    assert {path.name for path in out.parent.iterdir()} == {"tiny", ".tiny.lock"}


def test_a_link_and_the_current_folder_are_valid_destinations(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    run_export(job, step=5, out=tmp_path / "link")
    manifest = run_export(job, out=tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert ExportManifest.read(tmp_path / "disk") == manifest
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    run_export(job, out=Path())
    assert ExportManifest.read(tmp_path / "here") == manifest
    assert {path.name for path in tmp_path.glob(".*")} <= {".disk.lock", ".here.lock"}


def test_a_step_is_part_of_a_name_and_a_branch_needs_a_repository(dtt: Dtt, job: Path) -> None:
    dtt("export", "jobs/tiny@5")
    assert ExportManifest.read(Path("exports/tiny")).step == 5
    assert "--upload" in dtt("export", "jobs/tiny", "--revision", "x", expect=2).stderr


def test_a_folder_without_a_job_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a job directory"):
        run_export(tmp_path)
