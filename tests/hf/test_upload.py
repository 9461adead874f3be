from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.loopback_hub import LoopbackHub

UPLOAD = """
import sys
from pathlib import Path
from dtt.base.errors import DttError
from dtt.hf.upload import prepare, upload
folder, repo, revision = Path(sys.argv[1]), sys.argv[2], (sys.argv[3:] or [None])[0]
try:
    prepare(repo, revision, private=True)
    names = [path.name for path in folder.iterdir() if path.suffix != ".gguf"]
    print(upload(folder, names, repo, revision, message="run, step 7"))
except DttError as error:
    print(error)
    sys.exit(error.exit_code)
"""


def upload(
    folder: Path, repo: str, endpoint: str, token: str | None, *revision: str
) -> tuple[int, str]:
    """Upload in a process of its own: huggingface_hub reads its environment when imported."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING_FACE"))}
    env |= {"HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(folder / "none")}
    if token is not None:
        env["HF_TOKEN"] = token
    command = [sys.executable, "-c", UPLOAD, str(folder), repo, *revision]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "README.md").write_text("---\nlibrary_name: transformers\n---\n# Card\n")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)) * 100)
    return tmp_path


def test_the_hub_receives_every_file_in_a_private_repository(folder: Path) -> None:
    sent = {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / "mine.gguf").touch()  # not of the export
    with LoopbackHub() as hub:
        assert upload(folder, "org/model", hub.endpoint, hub.token) == (
            0,
            f"{hub.endpoint}/org/model\n",
        )
        repo = hub.repos["model", "org/model"]
        assert repo.files == sent
        assert repo.private
        assert upload(folder, "org/model", hub.endpoint, hub.token)[0] == 0
        assert commits(hub) == 1, "nothing changed"


def commits(hub: LoopbackHub) -> int:
    return sum("/commit/" in request for request in hub.requests)


@pytest.mark.slow
def test_a_branch_holds_the_files_of_its_export_and_no_others(folder: Path) -> None:
    stale = ("model-00001-of-00002.safetensors", "chat_template.jinja", "adapter_config.json")
    main = dict.fromkeys((*stale, "adapter_model.safetensors", "plot.png"), b"")
    with LoopbackHub() as hub:
        repo = hub.add("model", "org/model", main)
        for revision in ("step-400", "long/step-500", "step-400"):
            (folder / "config.json").write_text(f'{{"{revision}": 1}}')
            sent = {path.name: path.read_bytes() for path in folder.iterdir()}
            url = f"{hub.endpoint}/org/model/tree/{revision}\n"
            for _ in range(2):
                assert upload(folder, "org/model", hub.endpoint, hub.token, revision) == (0, url)
            assert repo.branches[revision] == sent | {"plot.png": b""}
        assert (repo.files, commits(hub)) == (main, 2)
        url = f"{hub.endpoint}/org/model/tree/main\n"
        assert upload(folder, "org/model", hub.endpoint, hub.token, "main") == (0, url)
        assert repo.files == sent | {"plot.png": b""}


@pytest.mark.parametrize("revision", ["", "refs/pr/5", "a..b", "step 400", "-x", "a.lock", "v1"])
def test_a_branch_that_the_hub_refuses_is_refused_before_an_upload(
    folder: Path, revision: str
) -> None:
    with LoopbackHub() as hub:
        repo = hub.add("model", "org/model", {})
        repo.tags.add("v1")
        code, text = upload(folder, "org/model", hub.endpoint, hub.token, revision)
        assert (code, commits(hub), repo.branches) == (2, 0, {})
    assert f"cannot upload to the branch {revision!r} of org/model" in text
    says = {"": "it is empty", "v1": "it is a tag"}
    assert says.get(revision, f"Invalid reference for a branch: {revision}") in text


def test_a_missing_token_is_reported_with_how_to_get_one(folder: Path) -> None:
    with LoopbackHub() as hub:
        code, text = upload(folder, "org/model", hub.endpoint, None)
    assert (code, hub.requests) == (78, [])
    assert "no Hugging Face token" in text
    assert "hf auth login" in text


def test_a_wrong_token_is_named(folder: Path) -> None:
    with LoopbackHub() as hub:
        code, text = upload(folder, "org/model", hub.endpoint, "hf_wrong")
    assert code == 78
    assert "HTTP 401" in text
    assert "the token is not valid" in text


def test_a_token_without_write_access_is_named(folder: Path) -> None:
    with LoopbackHub(read_only_for_all=True) as hub:
        code, text = upload(folder, "org/model", hub.endpoint, hub.token)
    assert code == 78
    assert "HTTP 403" in text
    assert "may not write to org" in text


def test_an_unreachable_hub_is_named(folder: Path) -> None:
    with LoopbackHub() as hub:
        endpoint, token = hub.endpoint, hub.token
    code, text = upload(folder, "org/model", endpoint, token)
    assert code == 78
    assert f"cannot reach {endpoint}" in text
    assert "nothing was exported yet" in text


def test_an_invalid_repository_name_is_refused(folder: Path) -> None:
    with LoopbackHub() as hub:
        code, text = upload(folder, "a/b/c", hub.endpoint, hub.token)
    assert code == 2
    assert "is not the name of a Hub repository" in text
