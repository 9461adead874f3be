"""The commands that `kills.py` kills: their inputs, how they start, and their results."""

from __future__ import annotations

import hashlib
import json
import random
import sys
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import yaml
from measurement import DTT, dtt, make_tokens, write_documents

from dtt.artifacts.corpus import CorpusManifest
from dtt.artifacts.jobdir import JobDir
from dtt.base import local
from dtt.base.errors import DttError, ExitCode
from dtt.checkpoint import store
from dtt.config.clean import CleanConfig, NearConfig
from dtt.data.corpus.selection import selection_folder
from dtt.track import jsonl

Results = dict[str, object]
"""What must be equal to the last bit, by name."""
Argv = tuple[list[str], dict[str, str]]
"""A command line and its environment variables."""


class Work(ABC):
    """A command that is killed and started again."""

    variants: ClassVar[Mapping[str, Any]]
    """Ways to start it, such as its number of ranks, by name."""
    any_variant = False
    """True if each start may have another variant."""
    overlaps = True
    """True if it may be started while processes of the last start are left."""

    @abstractmethod
    def prepare(self, folder: Path) -> None:
        """Create the inputs; every run starts in a copy of this folder."""

    @abstractmethod
    def commands(self, variant: str) -> list[Argv]:
        """Return the processes to start."""

    @abstractmethod
    def results(self, folder: Path) -> Results:
        """Return the results of a finished run."""

    def borders(self, folder: Path) -> list[Path]:
        """Return files that appear where one phase ends and the next begins."""
        return []

    def may_be_killed(self, folder: Path, variant: str) -> bool:
        """Return True once a kill may come."""
        return True


def job_results(job: JobDir, step: int) -> Results:
    """Return what equal jobs have in common; the error if the checkpoint of `step` is damaged.

    These are the files of the verified checkpoint, its position in the run, and all training and
    evaluation losses and samples.
    """
    try:
        checkpoint = store.verify(store.folder_of(job.checkpoints, step))
    except DttError as error:
        return {str(error): None}
    files = {f.path: (checkpoint.path / f.path).read_bytes() for f in checkpoint.manifest.files}
    position = checkpoint.position()
    position.pop("run_id", None)  # differs between jobs
    metrics = [r for r in jsonl.read(job.metrics) if r["kind"] in ("train", "eval", "sample")]
    return files | {store.POSITION: position, "metrics": metrics}


EXPERTS = (
    "model.family=dots1", "model.n_experts=4", "parallel.replicate=1", "parallel.shard=2",
    "parallel.expert=2",
)  # fmt: skip
PIPELINE = "parallel.pipeline=2", "parallel.replicate=1", "model.tie_embeddings=false"


class Training(Work):
    """`dtt train` under torchrun."""

    variants: ClassVar = {
        "1 rank": (1, ()), "2 ranks": (2, ()), "2 shards": (2, ("parallel.shard=2",)),
        "2 stages": (2, PIPELINE),
        "2 ranks of 2 stages": (2, (*PIPELINE, "parallel.stages_per_rank=2", "model.n_layers=4")),
        "shared experts": (2, EXPERTS),
    }  # fmt: skip
    steps = 120

    def prepare(self, folder: Path) -> None:
        make_tokens(folder)

    def commands(self, variant: str) -> list[Argv]:
        ranks, layout = self.variants[variant]
        keys = [
            "train", "data.tokens=tokens", "name=run", "model.dim=32", "model.n_layers=2",
            "model.n_heads=2", "model.dropout=0.1", f"train.steps={self.steps}",
            "train.seq_len=32", "train.micro_batch=2", "train.global_batch_tokens=256",
            "train.eval_every=7", "train.log_every=3", "train.sample_every=10",
            "train.sample_tokens=4", "checkpoint.every=4", "schedule.warmup=2", *layout,
        ]  # fmt: skip
        return [(local.torchrun_argv(ranks, keys), {})]

    def results(self, folder: Path) -> Results:
        return job_results(JobDir(folder / "jobs/run"), self.steps)

    def borders(self, folder: Path) -> list[Path]:
        checkpoints = JobDir(folder / "jobs/run").checkpoints
        return [checkpoints / f"step-{step:06d}" for step in range(4, self.steps, 4)]


class Tokenizing(Work):
    """`dtt tokenize` of Python's library, under mpirun or as ranks of a plain `srun`."""

    variants: ClassVar = {
        "mpirun, 1 rank": 1, "mpirun, 2 ranks": 2, "mpirun, 3 ranks": 3,
        "srun, 2 ranks": 2, "srun, 3 ranks": 3,
    }  # fmt: skip
    any_variant = True
    _step = 0

    def prepare(self, folder: Path) -> None:
        remaining = 6_000_000
        with (folder / "library.jsonl").open("w") as file:
            for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
                text = path.read_text(encoding="utf-8", errors="replace")
                file.write(json.dumps({"text": text}) + "\n")
                remaining -= len(text)
                if remaining < 0:
                    break
        dtt("download", "-d", "library.jsonl", folder=folder)

    arguments: tuple[str, ...] = (
        "tokenize", "-d", "library.jsonl", "tokenize.out=out", "tokenizer.vocab_size=1000",
        "tokenize.unit_bytes=60000", "tokenize.validation_fraction=0.1", "tokenize.engine=hf",
    )  # fmt: skip
    rendezvous = "out/.units/rendezvous"

    def commands(self, variant: str) -> list[Argv]:
        ranks, argv = self.variants[variant], [*DTT, *self.arguments]
        if "mpirun" in variant:
            mpirun = Path(sys.executable).with_name("mpirun")
            return [([str(mpirun), "-n", str(ranks), *argv], {})]
        self._step += 1
        step = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": str(self._step)}
        step["SLURM_STEP_NUM_TASKS"] = str(ranks)
        return [(argv, step | {"SLURM_PROCID": str(rank)}) for rank in range(ranks)]

    def results(self, folder: Path) -> Results:
        files = [p for p in (folder / "out").iterdir() if p.is_file() and p.name != ".lock"]
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    def borders(self, folder: Path) -> list[Path]:
        units = [f".units/{number:05d}.json" for number in range(0, 100, 20)]
        return [folder / "out" / name for name in ("tokenizer.json", *units, "manifest.json")]

    def may_be_killed(self, folder: Path, variant: str) -> bool:
        """Return False while a rank of srun may wait, for minutes, for one that has not started."""
        # Ranks that wait for another one create its file, and it is empty.
        lines = folder.glob(f"{self.rendezvous}/*-1-{self._step}-*/*.lines")
        started = sum(path.stat().st_size > 0 for path in lines)
        return "mpirun" in variant or started == self.variants[variant]


class Cleaning(Tokenizing):
    """`dtt clean` of copies of Python's library, most of whose files are near duplicates."""

    arguments = ("clean", "-d", "copies", "clean.near.threshold=0.8")
    rendezvous = "data/corpus/copies/selection-*/.work/rendezvous"

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        text = (folder / "library.jsonl").read_text()
        (folder / "copies").mkdir()
        for copy in range(12):
            copied = text.replace("return", f"give{copy // 2}")
            (folder / f"copies/{copy:02d}.jsonl").write_text(copied)
        dtt("download", "-d", "copies", folder=folder)

    def selection(self, folder: Path) -> Path:
        """Return the folder of the selection that the command makes."""
        corpus = folder / "data/corpus/copies"
        near = CleanConfig(near=NearConfig(threshold=0.8))
        return selection_folder(near, CorpusManifest.read(corpus), corpus)

    def results(self, folder: Path) -> Results:
        files = [path for path in self.selection(folder).iterdir() if path.is_file()]
        made = (path for path in files if not path.name.startswith("."))
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in made}

    def borders(self, folder: Path) -> list[Path]:
        steps = [f".work/{name}-00000.json" for name in ("exact", "pairs", "verified")]
        files = *steps, "00001.removed.parquet", "selection.json"
        return [self.selection(folder) / name for name in files]


WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
TASKS = {
    "sums": 'type: multiple_choice\nprompt: "Q: {question}"\nchoices: "{choices}"\ngold: "{gold}"',
    "words": 'type: cloze\nprompt: "{question}"\nanswer: "{answer}"',
    "names": 'type: schema\nchoices: "{choices}"\nanswer: "{answer}"\ngold: "{gold}"',
    "pages": 'type: rolling\nanswer: "{text}"',
    "replies": 'type: generation\nprompt: "{question}"\nanswer: "{answer}"\nmax_tokens: 4',
}


class Evaluating(Work):
    """`dtt eval` of a small job on a task of each type, all about the same rows."""

    variants: ClassVar = {"1 process": 1, "2 processes": 2}
    any_variant = True
    overlaps = False
    questions = 1000

    def prepare(self, folder: Path) -> None:
        make_tokens(folder)
        dtt(
            "train", "data.tokens=tokens", "name=run", "model.dim=32", "model.n_layers=2",
            "model.n_heads=2", "train.steps=20", "train.seq_len=128", "train.micro_batch=4",
            "train.global_batch_tokens=512", "schedule.warmup=2", folder=folder,
        )  # fmt: skip
        drawn = random.Random(0)
        rows = [
            {
                "question": " ".join(drawn.choices(WORDS, k=drawn.randint(3, 20))),
                "choices": [" ".join(drawn.choices(WORDS, k=drawn.randint(1, 4))) for _ in "four"],
                "gold": drawn.randrange(4),
                "answer": drawn.choice(WORDS),
                "text": " ".join(drawn.choices(WORDS, k=drawn.randint(3, 60))),
            }
            for _ in range(self.questions)
        ]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        for name, definition in TASKS.items():
            (folder / f"{name}.yaml").write_text(f"{definition}\ndata: {{file: rows.jsonl}}\n")

    def commands(self, variant: str) -> list[Argv]:
        tasks = ",".join(f"{name}.yaml" for name in TASKS)
        return [
            (
                local.torchrun_argv(self.variants[variant], ["eval", "jobs/run", "--tasks", tasks]),
                {},
            )
        ]

    def results(self, folder: Path) -> Results:
        files = (folder / "jobs/run/evals").glob("*/*.jsonl")
        return {path.name: path.read_bytes() for path in files}


STAGE_STEPS = {"pretrain": 40, "midtrain": 30, "long": 20, "sft": 102}
COMMON: dict[str, Any] = {
    "name": "chain",
    "model": {"dim": 32, "n_layers": 2, "n_heads": 2, "dropout": 0.1},
    "download": {"dataset": "counting.jsonl"},
    "tokenizer": {"vocab_size": 300, "chat_tokens": True},
    "tokenize": {"validation_fraction": 0.1, "unit_bytes": 8192},
    "train": {
        "seq_len": 32, "micro_batch": 2, "global_batch_tokens": 256, "eval_every": 7,
        "log_every": 3, "sample_every": 10, "sample_tokens": 4, "ema_decay": 0.9,
    },
    "checkpoint": {"every": 4},
    "schedule": {"warmup": 2},
}  # fmt: skip
STAGES: list[dict[str, Any]] = [
    {"name": "pretrain", "optim": {"lr": 1e-3}, "train": {"steps": 40}},
    {
        "name": "midtrain", "seed": 1, "download": {"dataset": "counting-again.jsonl"},
        "optim": {"lr": 5e-4}, "train": {"steps": 30}, "init": {"optimizer": "carry"},
    },
    {
        "name": "long", "optim": {"lr": 1e-4}, "train": {"steps": 20, "seq_len": 64},
        "init": {"average": True},
    },
    {
        "name": "sft", "data": {"type": "chat"}, "download": {"dataset": "questions.jsonl"},
        "optim": {"lr": 1e-4},
        "train": {"epochs": 2, "seq_len": 64, "eval_answer_tokens": 8},
    },
]  # fmt: skip


class Pipeline(Work):
    """`dtt pipeline` with four stages of training."""

    variants: ClassVar = {"1 process": 1, "2 processes": 2}
    overlaps = False

    def prepare(self, folder: Path) -> None:
        for name, step in (("counting", 7), ("counting-again", 3)):
            write_documents(folder / f"{name}.jsonl", step)
        with (folder / "questions.jsonl").open("w") as file:
            for i in range(300):
                question = {"role": "user", "content": f"Count to {i % 17}."}
                numbers = " ".join(map(str, range(1, i % 17 + 1)))
                answer = {"role": "assistant", "content": numbers}
                file.write(json.dumps({"messages": [question, answer]}) + "\n")
        config = COMMON | {"stages": STAGES}
        (folder / "chain.yaml").write_text(yaml.safe_dump(config, sort_keys=False))

    def commands(self, variant: str) -> list[Argv]:
        processes = f"pipeline.train_processes={self.variants[variant]}"
        return [([*DTT, "pipeline", "-c", "chain.yaml", processes], {})]

    def results(self, folder: Path) -> Results:
        """Return those of each stage, and the number of times it was done."""
        found: Results = {}
        for name, steps in STAGE_STEPS.items():
            job = JobDir(folder / "jobs/chain" / name)
            found |= {f"{name}: {key}": value for key, value in job_results(job, steps).items()}
            records = [job.exit_record(number) for number in range(1, job.attempt() + 1)]
            done = [record for record in records if record and record["code"] == ExitCode.DONE]
            found[f"{name}: times done"] = len(done)
        return found

    def borders(self, folder: Path) -> list[Path]:
        paths = []
        for name, steps in STAGE_STEPS.items():
            job = JobDir(folder / "jobs/chain" / name)
            paths += [job.stage, job.config, job.report, job.checkpoints / f"step-{steps:06d}"]
        return paths


WORKS: dict[str, type[Work]] = {
    "train": Training, "tokenize": Tokenizing, "clean": Cleaning,
    "eval": Evaluating, "pipeline": Pipeline,
}  # fmt: skip
