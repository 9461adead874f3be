"""Twelve planted secrets appear in no file and on no line of output."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from support.running import Dtt

from dtt.base.secrets import holds_secret, named_secret, redacted

Settings = Any

TOKEN = "hf_" + "Ab1" * 11
IN_ENVIRONMENT = {
    "HF_TOKEN": TOKEN,
    "WANDB_API_KEY": "a1b2c3d4" * 5,
    "AWS_SECRET_ACCESS_KEY": "planted-aws-secret",
    "SLURM_JWT": "planted-slurm-jwt",
    "NCCL_SOCKET_AUTH": "planted-nccl-auth",
    "PIP_INDEX_URL": "https://user:planted-mirror@host/simple",
    "HTTPS_PROXY": "http://user:planted-proxy@127.0.0.1:9",
}
IN_FILES = {
    ".netrc": "machine api.wandb.ai login user password planted-netrc",
    ".cache/huggingface/token": "hf_" + "Zy9" * 11,
}
REFUSED = {
    "download.dataset": "https://user:planted-url@host/data.jsonl",
    "train.sample_prompt": "ghp_" + "Cd2" * 12,
    "launch.environment.MY_API_KEY": "planted-in-config",
}
PLANTED = [
    TOKEN, "a1b2c3d4" * 5, "planted-aws-secret", "planted-slurm-jwt", "planted-nccl-auth",
    "planted-mirror", "planted-proxy", "planted-netrc", "hf_" + "Zy9" * 11, "planted-url",
    "ghp_" + "Cd2" * 12, "planted-in-config",
]  # fmt: skip


def found(folder: Path) -> list[tuple[str, str]]:
    """Every secret in every file below `folder`, but for where it was planted."""
    return [
        (str(path.relative_to(folder)), secret)
        for path in folder.rglob("*")
        if path.is_file() and str(path.relative_to(folder)) not in {*IN_FILES, "run.yaml"}
        for secret in PLANTED
        if secret.encode() in path.read_bytes()
    ]


@pytest.fixture
def planted(dtt: Dtt) -> dict[str, str]:
    """The environment; files lie in the home directory, which is the test's folder."""
    for name, content in IN_FILES.items():
        (dtt.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (dtt.folder / name).write_text(content)
    return {**IN_ENVIRONMENT, "HOME": str(dtt.folder), "HF_HOME": str(dtt.folder / ".cache/hf")}


def test_no_secret_is_stored_or_printed(dtt: Dtt, tiny: Settings, planted: dict[str, str]) -> None:
    assert len(set(PLANTED)) == 12
    fakes = dtt.folder / "bin"
    fakes.mkdir()
    for name in ("sbatch", "squeue"):
        (fakes / name).write_text("#!/bin/sh\necho 7\n")
        (fakes / name).chmod(0o755)
    path = {"PATH": f"{fakes}:{os.environ['PATH']}"}
    wandb = 'track=[{"type": "wandb"}]'
    planted = planted | {"WANDB_MODE": "offline"}
    said = [
        dtt("train", *tiny(), wandb, **planted),
        dtt("export", "jobs/t", **planted),
        dtt("submit", "train", *tiny(name="u"), wandb, "-y", **planted, **path),
        dtt("config", "show", *tiny(), **planted),
    ]
    assert list((dtt.folder / "jobs/t/wandb").glob("offline-run-*"))
    assert (dtt.folder / "jobs/u/slurm.sh").exists()
    assert found(dtt.folder) == []
    for run in said:
        assert not [s for s in PLANTED if s in run.stdout + run.stderr]


@pytest.mark.parametrize("key", REFUSED)
@pytest.mark.parametrize("where", ["argument", "file"])
def test_a_secret_in_the_configuration_is_refused_and_not_repeated(
    dtt: Dtt, tiny: Settings, planted: dict[str, str], key: str, where: str
) -> None:
    secret = REFUSED[key]
    said = [f"{key}={secret}"]
    if where == "file":
        first, _, rest = key.partition(".")
        inner, _, last = rest.partition(".")
        value = f"{{{last}: '{secret}'}}" if last else f"'{secret}'"
        (dtt.folder / "run.yaml").write_text(f"{first}:\n  {inner}: {value}\n")
        said = ["-c", "run.yaml"]
    run = dtt("train", *tiny(), *said, expect=2, **planted)
    assert key in run.stderr
    assert not [s for s in PLANTED if s in run.stdout + run.stderr]
    assert found(dtt.folder) == []


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("git clone https://me:pw@host/x.git", "git clone https://[secret]host/x.git"),
        ("https://host/a?b=c", "https://host/a?b=c"),
        ("s3://bucket/key", "s3://bucket/key"),
        (f"token={TOKEN}.", "token=[secret]."),
        ("https://host/x?a=1&token=abc&b=2", "https://host/x?a=1[secret]&b=2"),
        ("hf_short is a name", "hf_short is a name"),
        ("sk-ratings and task-list-of-many-things", "sk-ratings and task-list-of-many-things"),
    ],
)
def test_only_secrets_are_redacted(text: str, shown: str) -> None:
    assert redacted(text) == shown
    assert holds_secret(text) == (text != shown)


def test_the_value_of_a_secret_variable_is_redacted_everywhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a1b2c3d4" * 5)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    assert redacted(f"key {'a1b2c3d4' * 5}, false") == "key [secret], false"
    assert holds_secret("a1b2c3d4" * 5)


def test_variables_are_judged_by_their_names() -> None:
    assert named_secret("MY_api_key")
    assert not named_secret("NCCL_DEBUG")
