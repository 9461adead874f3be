"""A job whose files contain secrets, which no report of it may show.

dtt itself redacts what it writes. But a model may have learned a key from its data, and a log, a
path or a message of a library may contain one.
"""

from __future__ import annotations

import json
from pathlib import Path

from dtt.base.errors import ExitCode
from support.report_jobs import START, SyntheticRun, write_new_job

BODY = "0123456789abcdefABCDEF0123456789wxyzWXYZ"
ENVIRONMENT = {
    "WANDB_API_KEY": "5f0c" * 10,
    "SLURM_JWT": "eyJhbGciOiJIUzI1NiJ9.eyJleHAiOjE3MDAwMDAwMDB9.c2lnbmF0dXJlc2lnbmF0dXJl",
}
"""Variables that must be set when a report is made: no form tells that their values are secret."""
SECRETS = {
    "hugging_face": f"hf_{BODY[:34]}",
    "github": f"ghp_{BODY[:36]}",
    "github_fine": f"github_pat_{BODY}",
    "aws": "AKIAIOSFODNN7EXAMPLE",
    "openai": f"sk-proj-{BODY}",
    "wandb": f"wandb_v1_{BODY}",
    "gitlab": f"glpat-{BODY[:20]}",
    "url": "hunter2hunter2",
    "bearer": f"abc.{BODY}",
    "signature": f"{BODY[:30]}%3D",
    "wandb_environment": ENVIRONMENT["WANDB_API_KEY"],
    "slurm_environment": ENVIRONMENT["SLURM_JWT"],
}
"""12 secrets, as they must not appear anywhere."""


def phrase(name: str) -> str:
    """Return a text in which the secret is found by its form, or by its value."""
    secret = SECRETS[name]
    match name:
        case "url":
            return f"https://user:{secret}@example.com/data"
        case "bearer":
            return f"Authorization: Bearer {secret}"
        case "signature":
            return f"https://example.com/data?expires=1&signature={secret}"
    return secret


def write_job_with_secrets(folder: Path) -> Path:
    """Write a failed job with every secret in its samples, logs, reasons, paths and names."""
    every = [phrase(secret) for secret in SECRETS]
    run = SyntheticRun(sources=(phrase("wandb"), "code"), tasks=(phrase("github_fine"),))
    # dtt refuses a configuration with secrets that it recognises, so only data.json has this name.
    named = {"data.sources": [{"path": "data/tokens/code"}]}
    written = write_new_job(folder, "secrets", run, named)
    job = written.job
    samples = [
        {"kind": "sample", "step": i, "text": f"password = '{text}'\n", "time": START + i}
        for i, text in enumerate(every, 1)
    ]
    more = [
        {"kind": "guard", "step": 20, "why": f"spike {phrase('aws')}", "action": "skip",
         "bad_step": 20, "ledger": "", "time": START},
        {"kind": "eval", "step": 60, "loss": 3.0, phrase("gitlab"): 1.0,
         "losses": {phrase("hugging_face"): 3.0}, "time": START},
    ]  # fmt: skip
    reason = "cannot upload\n  why:   " + "\n  why:   ".join(every)
    ended = written.attempt(
        0, 210, began=START, code=ExitCode.PREEMPTED, reason=reason, saves=[150, 200],
        asked_by=phrase("slurm_environment"), node=phrase("openai"), extra=[*samples, *more],
    )  # fmt: skip
    written.attempt(
        200, 390, began=ended, code=ExitCode.BUG, reason=f"{phrase('bearer')} {reason}",
        node=phrase("url"),
    )  # fmt: skip
    (job.root / "overrides.txt").write_text("".join(f"train {text}\n" for text in every))
    environment = json.loads((job.root / "env.json").read_text())
    environment |= {"command": ["dtt", *every], "environment": dict.fromkeys(ENVIRONMENT, every[0])}
    (job.root / "env.json").write_text(json.dumps(environment))
    parent = {"job": f"../{phrase('github')}", "step": 10, "checkpoint_sha256": "0" * 64}
    job.parent.write_text(json.dumps(parent))
    job.logs.mkdir()
    (job.logs / "latest.log").write_text("".join(f"{text}\n" for text in every))
    # It could not recognise the value of a variable that was not set at that time.
    config = job.config.read_text()
    paths = config.replace("data/tokens/code", f"data/tokens/{phrase('wandb_environment')}/code")
    assert paths != config
    job.config.write_text(paths)
    return job.root
