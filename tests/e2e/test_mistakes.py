"""What a user's mistake prints: what happened, where, why, what to type next; never a traceback.

Each row is a mistake, made with a real process in a folder where everything else is in order.
`DTT_WRITE_DOCS=1 pytest --all tests/e2e/test_mistakes.py` writes docs/errors.md from ten of them.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import filelock
import pytest
from support.running import ROOT, Dtt, write_documents

from dtt.base.errors import ExitCode

PAGE = ROOT / "docs/errors.md"
TOKENS = "data/tokens/book-bpe300"
RUN = """\
name: small
download: {dataset: book.jsonl}
tokenizer: {vocab_size: 300}
tokenize: {validation_fraction: 0.1}
model: {dim: 16, n_layers: 2, n_heads: 2}
train:
  steps: 8
  seq_len: 32
  micro_batch: 4
  global_batch_tokens: 256
  sample_tokens: 0
checkpoint: {every: 4}
"""

Prepare = Callable[[Path], object]


def nothing(folder: Path) -> None:
    pass


def text(name: str, content: str) -> Prepare:
    return lambda folder: (folder / name).write_text(content)


def append(name: str, content: str) -> Prepare:
    def prepare(folder: Path) -> None:
        with (folder / name).open("a") as file:
            file.write(content)

    return prepare


def cut(*patterns: str) -> Prepare:
    """The last bytes of files are gone, as after a full disk or a broken copy."""

    def prepare(folder: Path) -> None:
        for path in [path for pattern in patterns for path in folder.glob(pattern)]:
            os.truncate(path, path.stat().st_size - 6)

    return prepare


def exported_by(job: str) -> Prepare:
    """The export at exports/small is of `job`."""

    def prepare(folder: Path) -> None:
        manifest = folder / "exports/small/dtt_export.json"
        manifest.write_text(manifest.read_text().replace('"small"', f'"{job}"'))

    return prepare


def gone(name: str) -> Prepare:
    def prepare(folder: Path) -> None:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return prepare


def file_instead(name: str) -> Prepare:
    def prepare(folder: Path) -> None:
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).write_text("")

    return prepare


def overwrite_start(name: str) -> Prepare:
    def prepare(folder: Path) -> None:
        with (folder / name).open("r+b") as file:
            file.write(b"XXXX")

    return prepare


def hidden_module(name: str) -> Prepare:
    """`import NAME` fails, as where it is not installed."""
    return text(f"{name}.py", "raise ImportError\n")


def in_use(name: str) -> Prepare:
    """Another process works there."""

    def hold(folder: Path) -> object:
        lock = filelock.FileLock(folder / name / ".lock", thread_local=False).acquire()
        (folder / name / ".lock").write_text("process 4242 on node7\n")
        return lock

    return hold


def retokenized(folder: Path) -> None:
    Dtt(folder)("tokenize", "-c", "run.yaml", "tokenize.validation_fraction=0.2", "--overwrite")


@dataclass(frozen=True)
class Mistake:
    """One row."""

    name: str
    command: str
    code: ExitCode
    says: tuple[str, ...]
    """What must be read there: the fault, and what to type next."""
    prepare: Prepare = nothing
    env: Mapping[str, str] = field(default_factory=dict)


USAGE, DAMAGED, MISSING = ExitCode.USAGE, ExitCode.DAMAGED, ExitCode.INPUT_MISSING
IO, UNFIT = ExitCode.IO, ExitCode.UNFIT
TRAIN = "dtt train -c run.yaml name=new"

COMMAND_LINE = (
    Mistake("a mistyped command", "dtt trian -c run.yaml", USAGE, ("'trian'", "'train'", "dtt -h")),
    Mistake("an unknown option", "dtt train --confg run.yaml", USAGE, ("--confg", "--config")),
    Mistake("an option's value of the wrong type", "dtt generate jobs/small --temperature hot",
            USAGE, ("--temperature", "number", "dtt generate -h")),
    Mistake("no job to export", "dtt export", USAGE, ("Missing argument", "dtt export -h")),
    Mistake("an argument without =", "dtt tokenize -c run.yaml overwrite", USAGE,
            ("'overwrite'", "key.path=value", "train.steps=500")),
    Mistake("train without a config", "dtt train", USAGE, ("got neither", "dtt train -c")),
    Mistake("a plan without a config", "dtt plan", USAGE, ("got neither", "dtt plan -c")),
    Mistake("two configs", "dtt train -c run.yaml -c quickstart", USAGE,
            ("--config is given 2 times", "extends: [FILE")),
    Mistake("an option given twice", "dtt export jobs/small --out a --out b", USAGE,
            ("--out is given 2 times",)),
    Mistake("--verbose", "dtt train -c run.yaml --verbose", USAGE,
            ("there is no --verbose", "DTT_DEBUG=1")),
    Mistake("a config without -c", "dtt train run.yaml", USAGE,
            ("run.yaml is a configuration file", "dtt train -c run.yaml")),
    Mistake("a config without -c, to tokenize", "dtt tokenize run.yaml", USAGE,
            ("run.yaml is a configuration file", "next:  -c run.yaml")),
    Mistake("a config without -c, to submit", "dtt submit pipeline run.yaml", USAGE,
            ("dtt submit pipeline -c run.yaml",)),
    Mistake("a config and a job at once", "dtt train jobs/small -c run.yaml", USAGE,
            ("jobs/small and -c run.yaml", "dtt train jobs/")),
    Mistake("a shipped config without -c", "dtt train quickstart", MISSING,
            ("the name of a shipped configuration", "dtt train -c quickstart")),
    Mistake("a job without its folder", "dtt train small", MISSING, ("did you mean jobs/small?",)),
    Mistake("a job without its folder, to generate", "dtt generate small -p one", MISSING,
            ("no model in small", "did you mean jobs/small or exports/small?")),
    Mistake("a checkpoint given as a job", "dtt train jobs/small/checkpoints/step-000008", MISSING,
            ("not a job directory", "did you mean jobs/small?")),
    Mistake("a dataset given as a job", "dtt train book.jsonl", MISSING, ("it is a file",)),
    Mistake("a key given as an option", "dtt train -c run.yaml --train.steps 5", USAGE,
            ("there is no --train.steps", "train.steps=VALUE")),
    Mistake("spaces around =", "dtt train -c run.yaml train.steps = 5", USAGE,
            ("train.steps has no value", "one argument", "next:  train.steps=VALUE")),
    Mistake("a key as in YAML", "dtt train -c run.yaml train.steps: 5", USAGE,
            ("train.steps has no value", "next:  train.steps=VALUE")),
    Mistake("a path with a space, without quotes", "dtt download -d my docs/book.jsonl", USAGE,
            ("cannot understand the argument 'docs/book.jsonl'",)),
    Mistake("a number of processes that no mesh has",
            "dtt train -c run.yaml name=new parallel.tensor=4", USAGE,
            ("1 processes do not make the mesh", "start 4 processes")),
    Mistake("logs of a job that ran here", "dtt job logs jobs/small", MISSING,
            ("no log in jobs/small", "only Slurm jobs and sweeps")),
    Mistake("a report of an export", "dtt report exports/small", MISSING,
            ("exports/small is not a job", "dtt job ls")),
    Mistake("a mistyped subcommand", "dtt job log jobs/small", USAGE,
            ("No such command 'log'", "'logs'")),
    Mistake("an evaluation without tasks", "dtt eval jobs/small", USAGE,
            ("no tasks to evaluate", "--tasks core")),
    Mistake("a mistyped task", "dtt eval jobs/small --tasks helaswag", USAGE,
            ("no task or suite 'helaswag'", "hellaswag")),
    Mistake("a chat with a model of text", "dtt chat jobs/small", USAGE,
            ("no chat template", "dtt generate jobs/small")),
    Mistake("a learning rate that is no number",
            "dtt mup transfer -c run.yaml --lrs 1e-3,nan", USAGE,
            ("--lrs 1e-3,nan", "such as --lrs 1e-3,2e-3")),
    Mistake("an unknown GPU to plan for", "dtt plan -c run.yaml --gpu H9000", USAGE,
            ("unknown GPU 'H9000'", "H100")),
    Mistake("no dataset specified", "dtt download", USAGE,
            ("no dataset is named", "dtt download -d", "python-stdlib")),
    Mistake("a pipeline without a dataset", "dtt pipeline", USAGE,
            ("no dataset is named", "-d FOLDER", "-c quickstart")),
    Mistake("tokenize under torchrun", "dtt tokenize -c run.yaml", UNFIT,
            ("not torchrun", "mpirun -n 2 dtt"),
            env={"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}),
    Mistake("train under mpirun", TRAIN, UNFIT, ("2 processes", "torchrun --standalone"),
            env={"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}),
)  # fmt: skip

CONFIG = (
    Mistake("a mistyped key in the file", "dtt train -c run.yaml", USAGE,
            ("run.yaml:13  trian", "did you mean train?"),
            append("run.yaml", "trian: {steps: 5}\n")),
    Mistake("a mistyped key in the environment", "dtt config show", USAGE,
            ("environment DTT_TRAIN__STEPZ", "train.steps"), env={"DTT_TRAIN__STEPZ": "5"}),
    Mistake("impossible values, several", "dtt train -c run.yaml train.steps=0 optim.lr=-1", USAGE,
            ("2 mistakes", "train.steps", "optim.lr", "greater than 0")),
    Mistake("an unknown tracker", "dtt train -c run.yaml 'track=[{type: mlflow}]'", USAGE,
            ("track.0.type", "'wandb', 'tensorboard'", "'mlflow'", "explain track\n")),
    Mistake("a config that does not exist", "dtt train -c rum.yaml", MISSING,
            ("no config 'rum.yaml'", "did you mean run.yaml?")),
    Mistake("a job given as a config", "dtt train -c jobs/small", USAGE,
            ("is a job", "dtt train jobs/small")),
    Mistake("a folder given as a config", "dtt train -c configs", USAGE,
            ("configs is a folder", "next:  -c configs/mine.yaml"),
            lambda folder: ((folder / "configs").mkdir(), text("configs/mine.yaml", "")(folder))),
    Mistake("a key in the wrong section", "dtt train -c run.yaml train.lr=1e-3", USAGE,
            ("train.lr", "did you mean optim.lr?")),
    Mistake("a warm-up longer than the run", "dtt train -c run.yaml schedule.warmup=9", USAGE,
            ("schedule.warmup", "longer than the run (8 steps)")),
    Mistake("a number with leading zeros", "dtt train -c run.yaml", USAGE,
            ("run.yaml:13  train.log_every", "valid integer", "'010'"),
            append("run.yaml", "train.log_every: 010\n")),
    Mistake("a tab in the config", "dtt train -c run.yaml", USAGE,
            ("run.yaml:2", "indent with spaces"), text("run.yaml", "train:\n\tsteps: 5\n")),
    Mistake("a config that is not text", f"dtt train -c {TOKENS}/train-00000.idx", USAGE,
            ("is not YAML", "text file"),
            lambda folder: (folder / TOKENS / "train-00000.idx").write_bytes(b"\0\1\2")),
    Mistake("a key of the wrong case", "dtt train -c run.yaml train.Steps=5", USAGE,
            ("train.Steps: unknown key; did you mean train.steps?",)),
    Mistake("a dash in a key", "dtt train -c run.yaml train.micro-batch=5", USAGE,
            ("did you mean train.micro_batch?",)),
    Mistake("a key without its section", "dtt train -c run.yaml steps=5", USAGE,
            ("steps: unknown key; did you mean train.steps?",)),
    Mistake("a key of another library", "dtt train -c run.yaml train.learning_rate=1e-3", USAGE,
            ("train.learning_rate: unknown key; did you mean optim.lr?",)),
    Mistake("two keys in one argument", "dtt train -c run.yaml 'train.steps=5 seed=1'", USAGE,
            ("train.steps", "'5 seed=1'")),
    Mistake("a number with a comma", "dtt train -c run.yaml train.steps=5,000", USAGE,
            ("train.steps", "'5,000'")),
    Mistake("a job name that is a path", "dtt train -c run.yaml name=../out", USAGE,
            ("name: must be letters, digits and . _ -", "'../out'")),
    Mistake("JSON without a comma", "dtt train -c run.json", USAGE,
            ("run.json is not JSON", "run.json:2"),
            text("run.json", '{"seed": 1\n "name": "x"}\n')),
    Mistake("a dataset given as a config", "dtt train -c book.jsonl", USAGE,
            ("book.jsonl is not YAML", "-d takes a dataset")),
    Mistake("a section without indentation", "dtt train -c run.yaml", USAGE,
            ("run.yaml:2  steps: unknown key; did you mean train.steps?",),
            text("run.yaml", "train:\nsteps: 5\n")),
    Mistake("= in place of : in the config", "dtt train -c run.yaml", USAGE,
            ("does not contain `key: value` lines",), text("run.yaml", "train.steps=5\n")),
    Mistake("an extended file that does not exist", "dtt train -c run.yaml", MISSING,
            ("no config 'bas.yaml'", "did you mean base.yaml"),
            lambda folder: (text("base.yaml", "")(folder),
                            text("run.yaml", "extends: bas.yaml\n")(folder))),
    Mistake("extends without a name", "dtt train -c run.yaml", USAGE,
            ("extends must be a list", "run.yaml:1", "extends: ["), text("run.yaml", "extends: 5")),
)  # fmt: skip

DATA = (
    Mistake("a local dataset that does not exist", "dtt download -d books.jsonl", MISSING,
            ("no dataset 'books.jsonl'", "dtt download -d FILE")),
    Mistake("a Hub dataset, offline", "dtt download -d org/name", UNFIT,
            ("org/name", "HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE")),
    Mistake("an unknown text column", "dtt download -d book.jsonl download.text_column=body", USAGE,
            ("no column 'body'", "columns: text", "download.text_column=text")),
    Mistake("conversations given as text", "dtt download -d chat.jsonl", USAGE,
            ("columns: messages", "next:  data.type=chat"),
            text("chat.jsonl", '{"messages": [{"role": "user", "content": "x"}]}\n')),
    Mistake("a CSV file with semicolons", "dtt download -d a.csv", USAGE,
            ("not separated by commas", "a.csv", "'id;text'"), text("a.csv", "id;text\n1;x\n")),
    Mistake("two columns that may be the text", "dtt download -d ab.jsonl", USAGE,
            ("cannot tell", "ab.jsonl", "download.text_column=a"),
            text("ab.jsonl", '{"a": "x", "b": "y"}\n')),
    Mistake("an empty dataset", "dtt download -d empty.txt", MISSING,
            ("is empty", "specify another file"), text("empty.txt", "")),
    Mistake("a file of an unknown format", "dtt download -d a.pdf", MISSING,
            ("a.pdf", "parquet, jsonl"), text("a.pdf", "x")),
    Mistake("an object for a list of documents", "dtt download -d a.json", MISSING,
            ("a JSON object spans several lines", "jq -c '.data[]'"),
            text("a.json", '{\n "data": [\n  {"text": "x"}\n ]\n}')),
    Mistake("another dataset into the same folder",
            "dtt download -d b.txt download.out=data/corpus/book", USAGE,
            ("holds another corpus", "download.out=FOLDER"), text("b.txt", "x")),
    Mistake("a file where a folder is expected", "dtt download -d book.jsonl", IO,
            ("there is a file where a folder is expected", "where: data\n",
             "specify another folder"),
            file_instead("data")),
    Mistake("a corpus that does not exist", "dtt tokenize -d other.jsonl", MISSING,
            ("no corpus in data/corpus/other", "dtt download")),
    Mistake("a corpus that has changed", "dtt tokenize -c run.yaml", DAMAGED,
            ("has changed", "book.jsonl", "dtt download -d"), append("book.jsonl", "{}\n")),
    Mistake("a corpus that was deleted", "dtt tokenize -c run.yaml", MISSING,
            ("is missing", "book.jsonl", "dtt download -d"), gone("book.jsonl")),
    Mistake("a damaged manifest", "dtt tokenize -c run.yaml", DAMAGED,
            ("data/corpus/book/manifest.json", "dtt download"),
            text("data/corpus/book/manifest.json", "{")),
    Mistake("a tokenizer that does not exist",
            "dtt tokenize -c run.yaml tokenizer.type=file tokenizer.path=gpt2/tokenizer.json",
            MISSING, ("no tokenizer at gpt2/tokenizer.json", "specify a tokenizer.json, a folder")),
    Mistake("a Hub tokenizer, offline",
            "dtt tokenize -c run.yaml tokenizer.type=file tokenizer.path=gpt2", UNFIT,
            ("gpt2", "HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE")),
    Mistake("a file that is not a tokenizer",
            "dtt tokenize -c run.yaml tokenizer.type=file tokenizer.path=run.yaml", DAMAGED,
            ("not a tokenizer.json", "run.yaml", "use a file")),
    Mistake("other options for the same token files",
            "dtt tokenize -c run.yaml tokenize.validation_fraction=0.2", USAGE,
            ("0.1 there, 0.2 now", "tokenize.out=FOLDER", "--overwrite")),
    Mistake("a single document, some of it to be held out", "dtt tokenize -d one.txt", MISSING,
            ("validation split", "next:  tokenize.validation_fraction=0 holds out none"),
            lambda folder: (text("one.txt", "one two")(folder),
                            Dtt(folder)("download", "-d", "one.txt"))),
    Mistake("two tokenize commands in one folder", "dtt tokenize -c run.yaml", UNFIT,
            (f"{TOKENS} is in use", "wait for it"), in_use(TOKENS)),
)  # fmt: skip

TRAINING = (
    Mistake("token files that do not exist", f"{TRAIN} data.tokens=nowhere", MISSING,
            ("no token files in nowhere", "dtt tokenize", "data.tokens=FOLDER")),
    Mistake("a truncated .bin", TRAIN, DAMAGED,
            ("train-00000.bin", "create it again: dtt tokenize"), cut(f"{TOKENS}/train-*.bin")),
    Mistake("a damaged .idx", f"{TRAIN} data.packing=best-fit", DAMAGED,
            ("train-00000.idx", "not a Megatron index", "dtt tokenize"),
            overwrite_start(f"{TOKENS}/train-00000.idx")),
    Mistake("a token file that was deleted", TRAIN, MISSING,
            ("validation-00000.bin", "dtt tokenize"), gone(f"{TOKENS}/validation-00000.bin")),
    Mistake("token files without their tokenizer", f"{TRAIN} train.sample_tokens=4", MISSING,
            ("tokenizer is missing", f"{TOKENS}/tokenizer.json"), gone(f"{TOKENS}/tokenizer.json")),
    Mistake("a vocabulary smaller than the tokenizer's", f"{TRAIN} model.vocab_size=100", USAGE,
            ("model.vocab_size (100)", "300", "model.vocab_size=null")),
    Mistake("a GPU on a machine without one", f"{TRAIN} train.device=cuda", UNFIT,
            ("no GPU", "train.device=cpu"), env={"CUDA_VISIBLE_DEVICES": ""}),
    Mistake("less text than one sequence",
            f"{TRAIN} train.seq_len=50000 train.global_batch_tokens=50000", USAGE,
            ("shorter than one sequence", "train.seq_len=")),
    Mistake("training before tokenizing", TRAIN, MISSING,
            ("no token files in", TOKENS, "create them with `dtt tokenize`"), gone(TOKENS)),
    Mistake("a corpus given as token files", f"{TRAIN} data.tokens=data/corpus/book", MISSING,
            ("no token files there", "`dtt tokenize` creates")),
    Mistake("a model that does not fit into memory", f"{TRAIN} model.dim=1000000", UNFIT,
            ("does not fit into the memory of this machine", "GB with gradients", "model.dim")),
    Mistake("weights of an export, as of a job", f"{TRAIN} init.from=exports/small", MISSING,
            ("no checkpoint in exports/small", "it is not a job", "hf:FOLDER")),
    Mistake("a tracker that is not installed", f"{TRAIN} 'track=[{{type: wandb}}]'", UNFIT,
            ("wandb", "-m pip install 'wandb>="), hidden_module("wandb"),
            env={"PYTHONPATH": "."}),
    Mistake("a learning rate at which training diverges", f"{TRAIN} optim.lr=1e30 "
                                                          f"optim.adamw.lr=1e30",
            ExitCode.DIVERGED, ("loss is nan", "lower optim.lr")),
    Mistake("a mistyped job", "dtt train jobs/smal", MISSING,
            ("jobs/smal is not a job", "did you mean jobs/small?")),
    Mistake("the folder above the job", "dtt train jobs", MISSING, ("did you mean jobs/small?",)),
    Mistake("a job resumed with other values", "dtt train -c run.yaml model.dim=32", USAGE,
            ("different values of: model.dim", "name=ANOTHER", "--allow-change model.dim")),
    Mistake("a job resumed on other token files",
            "dtt train jobs/small train.steps=12 --allow-change train.steps", USAGE,
            ("text that have changed", "data.tokens=FOLDER", "name=ANOTHER"), retokenized),
    Mistake("a job whose every checkpoint is damaged", "dtt train jobs/small", DAMAGED,
            ("step-000008", "step-000004", "none of the 2 checkpoints", "mv jobs/small"),
            cut("jobs/small/checkpoints/*/model-00000.safetensors")),
    Mistake("a file in place of the job directory", TRAIN, IO,
            ("a file where a folder is expected", "jobs/new"), file_instead("jobs/new")),
    Mistake("a resume from a step without a checkpoint",
            "dtt train jobs/small --from-step 5", MISSING, ("no checkpoint of step 5", "4, 8")),
    Mistake("weights of a job that does not exist", f"{TRAIN} init.from=jobs/base", MISSING,
            ("no checkpoint in jobs/base", "there is no such job", "jobs/base@500")),
    Mistake("weights that do not fit", f"{TRAIN} init.from=jobs/small model.dim=20", USAGE,
            ("nothing in jobs/small", "norm.weight: [20] here, [16] there")),
    Mistake("a password in the configuration", f"{TRAIN} download.dataset=https://me:pw@host/x",
            USAGE, ("download.dataset: contains a password", "~/.netrc")),
    Mistake("the best checkpoints without evaluations", f"{TRAIN} checkpoint.keep_best=1", USAGE,
            ("checkpoint.keep_best", "needs an evaluation at each save")),
    Mistake("two train commands of one job", "dtt train jobs/small", UNFIT,
            ("jobs/small is in use", "wait for it"), in_use("jobs/small")),
)  # fmt: skip

CLUSTER = (
    Mistake("a cluster without a profile", "dtt submit train -c run.yaml --cluster lumy", MISSING,
            ("lumy", "lumi")),
    Mistake("an invalid time limit", "dtt submit train -c run.yaml launch.time=tomorrow", USAGE,
            ("launch.time", "HH:MM:SS")),
    Mistake("a batch that cannot be divided evenly among the nodes",
            "dtt submit train -c run.yaml name=new launch.nodes=3 --dry-run", USAGE,
            ("3 processes", "train.global_batch_tokens=")),
    Mistake("a command that cannot run as a job",
            "dtt submit generate -c run.yaml", USAGE, ("generate",)),
    Mistake("a mistyped job to inspect", "dtt job status jobs/smal", MISSING,
            ("jobs/smal is not a job directory", "dtt job ls")),
    Mistake("a sweep over a mistyped key", "dtt sweep submit lr.yaml --dry-run", USAGE,
            ("optim.rl", "optim.lr"),
            text("lr.yaml", "base: run.yaml\nparameters: {optim.rl: [1, 2, 3]}\n")),
    Mistake("a sweep that does not exist", "dtt sweep status lr", MISSING, ("lr",)),
    Mistake("a mistyped shipped sweep", "dtt sweep submit quickstart-rl --dry-run", MISSING,
            ("neither a file nor a shipped sweep", "did you mean quickstart-lr?")),
)  # fmt: skip

RELEASE = (
    Mistake("a step without a checkpoint", "dtt export jobs/small@5", MISSING,
            ("no checkpoint of step 5", "4, 8", "omit the step")),
    Mistake("a step whose checkpoint is damaged", "dtt export jobs/small@8 --out new",
            DAMAGED, ("step-000008", "model-00000.safetensors", "omit the step"),
            cut("jobs/small/checkpoints/step-000008/model-00000.safetensors")),
    Mistake("a mistyped job to export", "dtt export jobs/smal", MISSING,
            ("jobs/smal is not a job", "jobs/small?")),
    Mistake("a job that never saved", "dtt export jobs/small", MISSING,
            ("no checkpoint in", "control/save"), gone("jobs/small/checkpoints")),
    Mistake("an export into a folder with other content", "dtt export jobs/small --out data", USAGE,
            ("data is not an export", "--out")),
    Mistake("an export over that of another job", "dtt export jobs/small@4", USAGE,
            ("another job: other, step 8", "--out"), exported_by("other")),
    Mistake("an export with another model configuration",
            "dtt export jobs/small model.dim=32 --out new", USAGE,
            ("different values of: model.dim", "omit these arguments")),
    Mistake("an export with another tokenizer", "dtt export jobs/small --out new", DAMAGED,
            ("tokenizer is not the one", "jobs/small/tokenizer.json", "restore the original"),
            text("jobs/small/tokenizer.json", "{}")),
    Mistake("an export without the data manifest", "dtt export jobs/small --out new",
            MISSING, ("no description of the data in jobs/small", "dtt train"),
            gone("jobs/small/data.json")),
    Mistake("an export of a job that lost a file", "dtt export jobs/small", DAMAGED,
            ("is incomplete", "move exports/small away"), gone("exports/small/model.safetensors")),
    Mistake("generate from nothing", "dtt generate nowhere -p one", MISSING,
            ("no model in nowhere", "exports/")),
    Mistake("a prompt that is too long", f"dtt generate exports/small -p '{'one ' * 40}'", USAGE,
            ("the prompt is too long", "32 tokens")),
    Mistake("an exported model without weights", "dtt generate exports/small", MISSING,
            ("not a complete model", "safetensors", "dtt export"),
            gone("exports/small/model.safetensors")),
    Mistake("an exported model with truncated weights", "dtt generate exports/small", DAMAGED,
            ("exports/small/model.safetensors is damaged", "dtt export"),
            cut("exports/small/model.safetensors")),
    Mistake("an exported model with a damaged config", "dtt generate exports/small", DAMAGED,
            ("config.json is not JSON", "dtt export"), text("exports/small/config.json", "{")),
)  # fmt: skip

GROUPS = {
    "The command line": COMMAND_LINE,
    "The configuration": CONFIG,
    "download and tokenize": DATA,
    "train": TRAINING,
    "submit, job and sweep": CLUSTER,
    "export and generate": RELEASE,
}
MISTAKES = [mistake for group in GROUPS.values() for mistake in group]
EXAMPLES = (
    "a mistyped command", "a key given as an option", "a mistyped key in the file",
    "impossible values, several", "a CSV file with semicolons", "a token file that was deleted",
    "a model that does not fit into memory", "a learning rate at which training diverges",
    "a job whose every checkpoint is damaged", "an export with another tokenizer",
)  # fmt: skip
"""The mistakes that the page shows."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything in order: corpus, token files, a job of 8 steps, its export."""
    folder = tmp_path_factory.mktemp("finished")
    write_documents(folder / "book.jsonl")
    (folder / "run.yaml").write_text(RUN)
    dtt = Dtt(folder)
    for command in ("download", "tokenize", "train"):
        dtt(command, "-c", "run.yaml")
    dtt("export", "jobs/small")
    return folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may spoil."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    manifest = tmp_path / "data/corpus/book/manifest.json"  # names the book by its absolute path
    manifest.write_text(manifest.read_text().replace(str(finished), str(tmp_path)))
    return tmp_path


def contents(folder: Path) -> dict[str, bytes]:
    """All files but what every start of a job may add to its records."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
        and "attempts" not in path.parts
        and path.name not in ("heartbeat.json", "report.html")
    }


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    """What each mistake printed, by its name."""
    return {}


@pytest.mark.slow(except_for=[mistake.name for mistake in MISTAKES[1::3]])
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_is_reported_with_what_to_do(
    mistake: Mistake, dtt: Dtt, folder: Path, printed: dict[str, str]
) -> None:
    held = mistake.prepare(folder)
    before = contents(folder)
    program, *arguments = shlex.split(mistake.command)
    assert program == "dtt"
    done = dtt(*arguments, expect=mistake.code, **mistake.env)
    del held
    for words in mistake.says:
        assert words in done.stderr
    assert done.stdout == ""
    after = contents(folder)
    assert {name: after.get(name) for name in before} == before
    named = done.stderr.replace(f"{folder}/", "/home/me/")
    printed[mistake.name] = named.replace(sys.executable, "/home/me/dtt/.venv/bin/python")


def test_the_page_of_errors_has_its_examples_and_every_exit_code(printed: dict[str, str]) -> None:
    if os.environ.get("DTT_WRITE_DOCS") == "1":
        PAGE.write_text(render(printed))
    text = PAGE.read_text()
    for mistake in examples():
        assert f"## {mistake.name}\n\nExit code {mistake.code}.\n" in text
        assert f"\n$ {shown(mistake)}\n" in text
    for code in ExitCode:
        assert f"| {code} | " in text


def examples() -> list[Mistake]:
    """The mistakes that the page shows, in its order."""
    by_name = {mistake.name: mistake for mistake in MISTAKES}
    return [by_name[name] for name in EXAMPLES]


def shown(mistake: Mistake) -> str:
    """The command as typed, with the environment that matters."""
    env = "".join(f"{name}={value} " for name, value in mistake.env.items())
    return re.sub(r"(one ){40}", "one one one …", env + mistake.command)


MEANINGS = {
    ExitCode.DONE: "done",
    ExitCode.BUG: "a bug in dtt: please report the traceback",
    ExitCode.USAGE: "the command line or the configuration is wrong",
    ExitCode.DAMAGED: "data or a checkpoint is damaged",
    ExitCode.INPUT_MISSING: "an input is missing or empty",
    ExitCode.IO: "the file system reported an error: disk full, permission denied",
    ExitCode.PREEMPTED: "training stopped on request after saving: run the same command again",
    ExitCode.DIVERGED: "the loss or a gradient is not finite",
    ExitCode.UNFIT: "this machine does not meet a requirement, another process holds the "
    "lock, or a rank was "
    "lost",
    ExitCode.INTERRUPTED: "interrupted by Ctrl-C",
}

INTRODUCTION = """\
# Errors

Generated by `DTT_WRITE_DOCS=1 pytest --all tests/e2e/test_mistakes.py` from real runs; do not edit.

An error is one message on stderr: what happened, where, why, and what to type next; stdout stays
empty. The message is the documentation: type what stands behind `next:`. `DTT_DEBUG=1` shows the
traceback as well. Under torchrun, which flattens exit codes,
`jobs/<name>/attempts/<n>/attempt.json` keeps the code and the message.
[Troubleshooting](troubleshooting.md) begins with symptoms instead.

| exit code | meaning |
| --- | --- |
"""


def render(printed: Mapping[str, str]) -> str:
    """The page: exit codes, then each example with what it prints."""
    out = [INTRODUCTION, *(f"| {code} | {MEANINGS[code]} |\n" for code in ExitCode)]
    for mistake in examples():
        # What is logged before differs from machine to machine, and its time from run to run.
        message = re.sub(
            r"(?m)^\d{4}(-\d\d){2} \d\d:\d\d:\d\d ", "12:00:00 ", printed[mistake.name]
        )
        start = re.search(r"(?m)^(12:00:00 rejected|dtt: |Usage: )", message)
        assert start is not None
        message = message[start.start() :]
        out.append(f"\n## {mistake.name}\n\nExit code {mistake.code}.\n")
        out.append(f"\n```text\n$ {shown(mistake)}\n{message.strip()}\n```\n")
    return "".join(out)
