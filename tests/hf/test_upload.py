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
folder, repo, code = Path(sys.argv[1]), sys.argv[2], 0
for revision in sys.argv[3:] or [None]:
    try:
        prepare(repo, revision, private=True)
        names = [path.name for path in folder.iterdir() if path.suffix != ".gguf"]
        print(upload(folder, names, repo, revision, message="run, step 7"))
    except DttError as error:
        print(error)
        code = error.exit_code
sys.exit(code)
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


def test_a_branch_that_the_hub_refuses_is_refused_before_an_upload(folder: Path) -> None:
    says = {"": "it is empty", "v1": "it is a tag"}
    for name in ("refs/pr/5", "a..b", "step 400", "-x", "a.lock"):
        says[name] = f"Invalid reference for a branch: {name}"
    with LoopbackHub() as hub:
        repo = hub.add("model", "org/model", {})
        repo.tags.add("v1")
        code, text = upload(folder, "org/model", hub.endpoint, hub.token, *says)
        assert (code, commits(hub), repo.branches) == (2, 0, {})
    refusals = text.split("cannot upload to the branch ")[1:]
    for refusal, (revision, why) in zip(refusals, says.items(), strict=True):
        assert refusal.startswith(f"{revision!r} of org/model")
        assert why in refusal


REFUSED = {
    "no token": (78, ("no Hugging Face token", "hf auth login")),
    "a wrong token": (78, ("HTTP 401", "the token is not valid")),
    "a token without write access": (78, ("HTTP 403", "may not write to org")),
    "an unreachable hub": (78, ("cannot reach http://127.0.0.1:9", "nothing was exported yet")),
    "an invalid name": (2, ("is not the name of a Hub repository",)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_hub_would_refuse_is_named(folder: Path, case: str) -> None:
    code, says = REFUSED[case]
    with LoopbackHub(read_only_for_all="write access" in case) as hub:
        token = {"no token": None, "a wrong token": "hf_wrong"}.get(case, hub.token)
        endpoint = "http://127.0.0.1:9" if "unreachable" in case else hub.endpoint
        repo = "a/b/c" if "name" in case else "org/model"
        found, text = upload(folder, repo, endpoint, token)
        assert (found, commits(hub)) == (code, 0)
        assert token is not None or hub.requests == []
    for words in says:
        assert words in text
