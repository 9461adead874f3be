"""A folder in which every command of the pages can run: data, jobs, sweeps, a Slurm that takes
jobs and runs none, and a Hub on this machine. All of it is tiny."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable
from contextlib import chdir
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
from transformers import GPT2Config, GPT2LMHeadModel

from dtt.artifacts.jobdir import JobDir
from dtt.base.files import sha256_file
from dtt.checkpoint import store
from dtt.config.load import load_job
from dtt.data.samples.dataset import open_dataset
from dtt.data.samples.shuffle import EMPTY_DATA_HASH, extend_data_hash
from dtt.jobs import sweeps as trials
from support import warm_python
from support.conversation_files import conversation, jsonl
from support.forked import CONTEXT
from support.loopback_hub import LoopbackHub
from support.running import ROOT, Dtt, write_documents
from support.stand_in import write_stand_in
from support.tiny_job import END_OF_DOCUMENT, make_tokenizer, write_chat_job
from support.token_files import write_pair

STORIES, EDU = "roneneldan/TinyStories", "HuggingFaceFW/fineweb-edu"
GPT2, LLAMA = "openai-community/gpt2", "meta-llama/Llama-3.2-1B-Instruct"
SAVED = (500, 1000, 3000, 4000, 4500, 4999)
"""Steps whose checkpoints the pages name, and the last step but one of the run they show."""

TINY = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "DTT_MODEL__DIM": "8",
    "DTT_MODEL__N_LAYERS": "1",
    "DTT_MODEL__N_HEADS": "2",
    "DTT_MODEL__N_KV_HEADS": "2",
    "DTT_TRAIN__SEQ_LEN": "32",
    "DTT_TRAIN__GLOBAL_BATCH_TOKENS": "2048",
    "DTT_TRAIN__MICRO_BATCH": "64",
    "DTT_TRAIN__EVAL_EVERY": "0",
    "DTT_TRAIN__EVAL_TOKENS": "64",
    "DTT_TRAIN__SAMPLE_TOKENS": "2",
    "DTT_TRAIN__EMA_DECAY": "0.9",
    "DTT_CHECKPOINT__KEEP_LAST": "50",
    "DTT_DOWNLOAD__MAX_FILES": "5",
    "DTT_TOKENIZE__VALIDATION_FRACTION": "0.2",
    "DTT_PIPELINE__TOKENIZE_PROCESSES": "1",
    "HF_HUB_OFFLINE": "0",
    "HF_HUB_DISABLE_XET": "1",
}
"""Configuration by the environment: the lines of the pages stay as they are printed."""

TRIALS = {"DTT_TRAIN__STEPS": "60"}
"""The same for trials: as short as their warm-up allows."""

# Of `srun` the command runs here, as its only task; other programs of Slurm record their arguments.
SRUN = r"""#!/bin/bash
while [[ $1 == -* ]]; do if [[ $1 == -? ]]; then shift; fi; shift; done
exec "$@"
"""
ENV_SH = f"""#!/bin/bash
if [[ ${{BASH_SOURCE[0]}} == "$0" ]]; then exec "{ROOT}/env.sh" "$@"; fi
source "{ROOT}/env.sh"
"""
FAKES = {"srun": SRUN, "sbatch": "#!/bin/bash\necho $$\n", "squeue": "#!/bin/bash\n"}


def environment(folder: Path, hub: LoopbackHub) -> dict[str, str]:
    """Return the variables with which commands run in a sandbox."""
    warm = warm_python.start(CONTEXT).parent
    return TINY | {
        "HOME": str(folder / "home"),
        "HF_HOME": str(folder / "hf"),
        "HF_ENDPOINT": hub.endpoint,
        "HF_TOKEN": hub.token,
        "PATH": f"{folder / 'bin'}:{warm}:{Path(sys.executable).parent}:{os.environ['PATH']}",
    }


def make(folder: Path, hub: LoopbackHub, pages: str) -> None:
    """Prepare the sandbox in `folder`, and fill the Hub.

    `pages` is the text that holds the configurations to use.
    """
    (folder / "configs").symlink_to(ROOT / "configs")
    programs = FAKES | {"env.sh": ENV_SH}
    for name, text in programs.items():
        path = folder / "env.sh" if name == "env.sh" else folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    shown = re.findall(r"^```yaml\n(.*?)^```$", pages, re.M | re.S)
    (folder / "run.yaml").write_text(next(t for t in shown if t.startswith("name: stories")))
    (folder / "stages.yaml").write_text(next(t for t in shown if t.startswith("name: chain")))
    files = {"answers": "sft.yaml", "preferred": "dpo.yaml"}
    files |= {"helper": "chats.yaml", "helper-dpo": "preferences.yaml"}
    for name, file in files.items():
        (folder / file).write_text(next(t for t in shown if t.startswith(f"name: {name}\n")))
    for name in ("faq.jsonl", "chats.jsonl"):
        (folder / name).write_bytes(jsonl([conversation(i) for i in range(80)]))
    (folder / "preferences.jsonl").write_bytes(jsonl([_preference(i) for i in range(40)]))
    (folder / "lr.yaml").write_text(next(t for t in shown if t.startswith("name: lr")))
    (folder / "capitals.yaml").write_text(next(t for t in shown if t.startswith("type:")))
    capitals = [{"country": c, "cities": ["Lyon", "Paris"], "capital": 1} for c in ("a", "b")]
    (folder / "capitals.jsonl").write_bytes(jsonl(capitals))
    (folder / "prompt.txt").write_text("one two")
    (folder / "prompts.txt").write_text("one\ntwo\n")
    (folder / "questions.txt").write_text("How are you?\nAnd now?\n")
    (folder / "conversations.jsonl").write_text('{"messages": [{"role": "user", "content": "x"}]}')
    (folder / "home/books").mkdir(parents=True)
    write_documents(folder / "home/books/book.jsonl")
    _fill(hub, (folder / "home/books/book.jsonl").read_text())
    make_tokenizer().save(str(folder / "tokenizer.json"))
    write_chat_job(folder, "Fine.", name="assistant")
    (folder / "megatron").mkdir()
    write_pair(folder / "megatron/pile_text_document", [[5, 9, 7, 0]] * 50)
    with chdir(folder), patch.dict(os.environ, environment(folder, hub)):
        dtt = Dtt(folder)
        for config in ("run.yaml", "quickstart"):
            dtt("download", "-c", config)
            dtt("tokenize", "-c", config)
        started = JobDir(Path("jobs/stories"))
        started.stop.parent.mkdir(parents=True)
        started.stop.touch()
        dtt("train", "-c", "run.yaml", expect=75)
        grow(started, SAVED)
        shutil.copytree("jobs/stories", "jobs/run")
        for name in ("latest.log", "latest-n2.log"):
            JobDir(Path("jobs/run")).logs.mkdir(exist_ok=True)
            (JobDir(Path("jobs/run")).logs / name).write_text("trained\n")
        config = Path("jobs/run/config.yaml")
        config.write_text(config.read_text().replace("name: stories", "name: run"))
        with patch.dict(os.environ, TRIALS):
            sweeps = [trials.plan(Path(file)).write() for file in ("lr.yaml", "quickstart-lr")]
            folders = [[one.job(id).root for id in one.manifest.trials] for one in sweeps]
            trained = folders[0][0]
            dtt("train", trained)
        for other in (path for paths in folders for path in paths[:-1] if path != trained):
            kept = (other / "config.yaml").read_bytes()
            shutil.copytree(trained, other, dirs_exist_ok=True)
            for path in (other / "config.yaml", JobDir(other).trained_config(1)):
                path.write_bytes(kept)


def _preference(number: int) -> dict[str, Any]:
    """Return a row with a right and a wrong answer."""
    return {
        "prompt": [{"role": "user", "content": f"{number} plus one?"}],
        "chosen": [{"role": "assistant", "content": f"{number + 1}"}],
        "rejected": [{"role": "assistant", "content": f"{number + 7}"}],
    }


TASKS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "EleutherAI/lambada_openai": ("default", "test", {"text": "One and one more are two"}),
    "Rowan/hellaswag": ("default", "validation", {
        "activity_label": "Sums", "ctx_a": "One and one", "ctx_b": "are",
        "endings": ["one", "two", "six", "ten"], "label": "1",
    }),
    "allenai/ai2_arc": ("ARC-Easy", "test", {
        "question": "One and one?", "answerKey": "B",
        "choices": {"text": ["one", "two"], "label": ["A", "B"]},
    }),
}  # fmt: skip
"""Data of the tasks that the pages name: subset, split and a row."""


def _parquet(rows: list[dict[str, Any]]) -> bytes:
    stream = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), stream)
    content: bytes = stream.getvalue().to_pybytes()
    return content


def _fill(hub: LoopbackHub, lines: str) -> None:
    """Put the datasets and the model that the pages name on the Hub."""
    content = _parquet([{"text": json.loads(line)["text"]} for line in lines.splitlines()])
    for name, (subset, split, row) in TASKS.items():
        files = f"data_files: [{{split: {split}, path: rows.parquet}}]"
        readme = f"---\nconfigs:\n- config_name: {subset}\n  {files}\n---\n".encode()
        hub.add("dataset", name, {"README.md": readme, "rows.parquet": _parquet([row, row])})
    card = "---\nconfigs:\n- config_name: sample-10BT\n  data_files: sample/10BT/*.parquet\n---\n"
    hub.add("dataset", STORIES, {"data/train-00000-of-00001.parquet": content})
    hub.add("dataset", EDU, {"sample/10BT/000.parquet": content, "README.md": card.encode()})
    size = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 32, "vocab_size": 1024}
    size |= {"bos_token_id": END_OF_DOCUMENT, "eos_token_id": END_OF_DOCUMENT}
    with tempfile.TemporaryDirectory() as model:
        GPT2LMHeadModel(GPT2Config(**size)).save_pretrained(model)
        make_tokenizer().save(f"{model}/tokenizer.json")
        hub.add("model", GPT2, {path.name: path.read_bytes() for path in Path(model).iterdir()})
    with tempfile.TemporaryDirectory() as model:
        write_stand_in(Path(model))
        hub.add("model", LLAMA, {path.name: path.read_bytes() for path in Path(model).iterdir()})


def grow(job: JobDir, steps: Iterable[int]) -> None:
    """Give a new job the metrics and checkpoints of `steps`, as if it had trained.

    The weights stay those of its first checkpoint. Positions and hashes of the samples are valid,
    so a resume accepts them.
    """
    first = store.newest(job.checkpoints)
    assert first is not None
    cfg = load_job(job.root)
    dataset = open_dataset(cfg)
    position, facts = first.position(), first.manifest.model_dump(exclude={"files", "step"})
    facts = {key: facts[key] for key in facts if key != "format"}
    hashes, lines = [EMPTY_DATA_HASH], []
    for step in range(1, max(steps) + 1):
        start, end = dataset.first_sample(step - 1), dataset.first_sample(step)
        hashes.append(extend_data_hash(hashes[-1], dataset.order(start, end - start)))
        tokens = end * cfg.train.seq_len
        record = {"kind": "train", "step": step, "loss": 5.0, "lr": 1e-3, "grad_norm": 1.0}
        lines.append(json.dumps(record | {"tokens": tokens, "ledger": hashes[-1].hex()}) + "\n")
        if step in steps:
            staging = job.checkpoints / store.staging_name(step, 1)
            shutil.copytree(first.path, staging)
            now = {"step": step, "samples": end, "tokens": tokens, "ledger": hashes[-1].hex()}
            now["previous_ledger"] = hashes[-2].hex()
            (staging / store.POSITION).write_text(json.dumps(position | now))
            files = [
                record.model_copy(
                    update={"bytes": path.stat().st_size, "sha256": sha256_file(path)}
                )
                for record in first.manifest.files
                for path in [staging / record.path]
            ]
            store.commit(staging, files, step=step, **facts)
    with job.metrics.open("a") as file:
        file.writelines(lines)
