"""Write the pages of docs that are generated from the code.

They are cli.md, config.md, files.md and support-matrix.md; of extending.md, only the signatures.

python docs/generate.py [PAGE …]            rewrite them, or those named
python docs/generate.py --check [PAGE …]    exit with 1 and name those that are not up to date
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import typer
from pydantic import BaseModel

import dtt
from dtt.artifacts.corpus import CorpusManifest
from dtt.artifacts.jobdir import JobDir
from dtt.artifacts.manifests import (
    CheckpointManifest,
    DataManifest,
    ExportManifest,
    TokensManifest,
)
from dtt.artifacts.selection_manifest import SelectionManifest
from dtt.base.errors import DttError
from dtt.config.base import field_docs
from dtt.config.load import Mistakes, resolve
from dtt.config.parallel import mesh_sizes
from dtt.config.reference import LONGEST_CELL
from dtt.config.reference import page as config_page
from dtt.config.sweep import SweepConfig
from dtt.evaluate.tasks.definition import Task
from dtt.jobs.sweep_trials import SweepManifest
from dtt.main import commands
from dtt.model.mesh_divisibility import check_layout
from dtt.model.scaling import scaled

DOCS = Path(__file__).resolve().parent
SOURCE = Path(dtt.__file__).parent
HEAD = """\
# Command line

Made from the code by `python docs/generate.py`: what `--help` says, for every command.

`-h` and `--help` work everywhere, `dtt --version` prints the version. Options go before or after
the other arguments. `KEY=VALUE` sets any key of the [configuration](config.md). Results go to
stdout, logs and progress to stderr. The [exit codes](errors.md) are the same for
all commands.
"""

KINDS = (
    "Documents", "Source", "Rows", "Objective", "Schedule", "Optimizer", "Action", "Family",
)  # fmt: skip
BEGIN, END = "<!-- signatures: python docs/generate.py -->\n", "<!-- end of signatures -->"


def cli_page() -> str:
    """Return the page docs/cli.md."""
    return "\n".join([HEAD, *_commands(typer.main.get_command(commands()), "dtt")])


def _commands(group: Any, path: str) -> Iterator[str]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{path} {name}")
        else:
            yield from _command(command, f"{path} {name}")


def _command(command: Any, path: str) -> Iterator[str]:
    """Yield the section of one command: description, usage, parameters, examples."""
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option"]
    usage = [path, *map(_argument, arguments), "[OPTION]…" if options else ""]
    yield f"## {path}\n"
    yield _text(command.help) + "\n"
    yield f"```\n{' '.join(filter(None, usage))}\n```\n"
    if command.params:
        yield "| | |\n| --- | --- |"
        yield from (f"| `{_argument(p)}` | {_text(p.help)} |" for p in arguments)
        yield from (f"| {_option(p)} | {_text(p.help)}{_default(p)} |" for p in options)
        yield ""
    if command.epilog:
        lines = command.epilog.removeprefix("\b\nExamples:\n").splitlines()
        yield "\n".join(["```sh", *(line.removeprefix("  ") for line in lines), "```\n"])


def _argument(parameter: Any) -> str:
    name = parameter.metavar or parameter.name.upper()
    return name if parameter.required or parameter.metavar else f"[{name}]"


def _option(parameter: Any) -> str:
    """Format an option as Markdown: `-c`, `--config CONFIG`."""
    *shorter, longest = sorted(parameter.opts, key=len)
    if not parameter.is_flag:
        longest += f" {parameter.metavar or parameter.name.upper()}"
    return ", ".join(f"`{name}`" for name in (*shorter, longest))


def _default(parameter: Any) -> str:
    if parameter.default in (None, False, ""):
        return ""
    return f" Default: {parameter.default}."


def _text(text: str) -> str:
    """Escape plain text for Markdown, so that `<name>` is not read as a tag."""
    return text.replace("<", "\\<").replace("|", "\\|")


def extending_page() -> str:
    """Return the page docs/extending.md, whose signatures are those of the code."""
    page = DOCS / "extending.md"
    text = page.read_text(encoding="utf-8") if page.is_file() else BEGIN + END
    before, _, rest = text.partition(BEGIN)
    # As `ruff format` leaves it, which reads the code of pages, too.
    code = "\n\n\n".join("\n".join(_signatures(name)) for name in KINDS)
    return f"{before}{BEGIN}\n```python\n{code}\n```\n\n{END}{rest.partition(END)[2]}"


def _signatures(name: str) -> Iterator[str]:
    """Yield the methods that a class of one's own may define."""
    cls = getattr(dtt, name)
    yield f"class {name}:"
    for method, function in vars(cls).items():
        inherited = any(hasattr(base, method) for base in cls.__bases__)
        shown = not method.startswith("_") or method in ("__len__", "__getitem__")
        if inspect.isfunction(function) and shown and not inherited:
            signature = str(inspect.signature(function)).replace("'", "")
            line = f"    def {method}{signature}: ..."
            if len(line) > 100:  # as `ruff format` breaks it, which also reads this page
                start, _, rest = line.partition("(")
                arguments, _, result = rest.rpartition(") -> ")
                line = f"{start}(\n        {arguments}\n    ) -> {result}"
            yield line


FILES_HEAD = """\
# Fields of files

Every field of the files that dtt writes, and of a task file, made from the code by `python
docs/generate.py`. To see one of them:

```sh
dtt data inspect data/tokens/TinyStories-train-bpe8192 --verify
```

[Data format](data-format.md) describes the binary files, and the rules that the fields follow.
Manifests are read strictly: an unknown or missing field counts as damage (of a checkpoint's, an
unknown one is ignored).
"""
FILES: dict[str, type[BaseModel]] = {
    "Task: a YAML file of `dtt eval`": Task,
    "Sweep: a file of `dtt sweep`": SweepConfig,
    "Corpus: manifest.json": CorpusManifest,
    "Selection: selection.json": SelectionManifest,
    "Token files: manifest.json": TokensManifest,
    "Checkpoint: MANIFEST.json": CheckpointManifest,
    "The data of a job: data.json": DataManifest,
    "Export: dtt_export.json": ExportManifest,
    "Sweep: manifest.json": SweepManifest,
}
TEXTS = {
    "Metrics: metrics.jsonl": "track/base.py",
    "The position of a checkpoint: position.json": "train/state.py",
    "An attempt: attempt.json": "jobs/attempt.py",
    "The clock of an attempt: clock.json": "jobs/clock.py",
    "Removed documents: 00012.removed.parquet": "artifacts/selection_manifest.py",
    "Results of benchmark tasks": "evaluate/tasks/result_files.py",
}
"""The modules whose docstring lists the fields; they are parsed, because some import torch."""
JOB_FILES = {
    "overrides.txt": "The arguments of every start, one line each.",
    "env.json": "Versions, git state and selected environment variables; no secrets.",
    "data.json": "Sources and vocabulary. An export needs only this file and tokenizer.json.",
    "run_id": "The id of the job in trackers and in `checkpoint.mirror`; made when one needs it.",
    "attempts/N/": "`config.yaml`, what attempt N trained; `attempt.json`; `clock.json`; "
    "`stacks/`, the stacks of each rank when it hung.",
}
"""What is in a job directory besides the attributes of `JobDir`."""


def files_page() -> str:
    """Return the page docs/files.md: the fields of manifests, of task files and of metrics."""
    out = [FILES_HEAD]
    out += ["## The job directory: jobs/NAME/", "", "| path | content |", "| --- | --- |"]
    out += [f"| `{path}` | {about} |" for path, about in sorted(_job_files().items())] + [""]
    for title, cls in FILES.items():
        out += [f"## {title}", "", " ".join((cls.__doc__ or "").split()), ""]
        done: set[type[BaseModel]] = set()
        for name, inner in _held("", cls):
            if inner not in done:
                done.add(inner)
                about = " ".join((inner.__doc__ or "").split())
                out += [f"**`{name}`**: {about}", ""] if name else []
                out += _fields(inner)
    for title, module in TEXTS.items():
        source = ast.parse((SOURCE / module).read_text(encoding="utf-8"))
        out += [f"## {title}", "", "```text", ast.get_docstring(source) or "", "```", ""]
    return "\n".join(out)


def _job_files() -> dict[str, str]:
    """Return the files of a job directory by path, each with its description."""
    tree = ast.parse((SOURCE / "artifacts/jobdir.py").read_text(encoding="utf-8"))
    body = next(node for node in tree.body if getattr(node, "name", "") == "JobDir").body
    found = dict(JOB_FILES)
    for node, text in pairwise(body):
        match node, text:
            case ast.Assign([ast.Name(name)]), ast.Expr(ast.Constant(str(about))):
                found[str(getattr(JobDir(Path()), name))] = " ".join(about.split())
    return found


def _held(name: str, annotation: Any) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield the model classes in the annotation of a field, then those of their own fields."""
    for inner in get_args(annotation):
        yield from _held(name, inner)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield name, annotation
        for inner_name, field in annotation.model_fields.items():
            yield from _held(inner_name, field.annotation)


def _fields(cls: type[BaseModel]) -> list[str]:
    """Return the table of the fields of a class; long texts follow it."""
    docs = {name: " ".join(text.split()) for name, text in field_docs(cls).items()}
    rows, notes = [], []
    for name, field in cls.model_fields.items():
        meaning = docs.get(name, "")
        if isinstance(field.default, str | int | float) and field.default not in ("", False):
            meaning = f"{meaning} Default: {field.default!r}." if meaning else f"`{field.default}`"
        if len(meaning) > LONGEST_CELL:
            notes.append(f"- `{name}`: {meaning}")
            meaning = "see below"
        rows.append(f"| `{name}` | {_text(meaning)} |")
    return ["| field | meaning |", "| --- | --- |", *rows, "", *notes, *([""] if notes else [])]


MATRIX_HEAD = """\
# Support matrix

What works together, and what is refused, made by `python docs/generate.py`: it gives each pair of
features below to the checks that every start, `dtt plan` and `dtt submit` make, for a Llama with
untied weights on eight processes. To ask the same about a configuration of yours:

```sh
dtt plan -c run.yaml --gpu H100 launch.nodes=1 launch.gpus_per_node=8
```

A number is the reason below, `or` means that both are values of one key, and ✓ that nothing
refuses the pair. That it computes what one process computes is another question, which
[`dtt verify`](verify.md) answers for any configuration.
"""
VERSIONS = """\
## Versions

dtt allows Python from 3.11, torch 2.11 to 2.13 and transformers from 5.14. What was run with what:

| what | Python | torch | transformers |
| --- | --- | --- | --- |
| all tests (`bash .ci/run`), for each change | 3.11 | 2.13, CPU | 5.24 |
| tests of model, parallel, optim and train, compiled too, each night | 3.11 | 2.11, CPU | newest |
| tests marked `gpu`, and `benchmarks/gpu_session.py`, on one H200 | 3.12 | 2.11, CUDA 13.0 | 5.17 |
| wheel in an empty environment, and the quickstart with its verified export, 2026-11-29 | 3.12, 3.13 | 2.13, CUDA 13.0, on a CPU | 5.24 |
| `tests/hf/test_weights.py`, `test_write_folder.py` and `test_export.py`, 2026-11-29 | 3.11 | 2.13, CPU | 5.14 |
| fast tests of model, parallel, optim, train and contracts, 2026-11-29 | 3.11 | 2.14.1, CUDA 13.0, on a CPU | 5.24 |

With transformers 5.9, those of OLMo 3 with YaRN fail; releases between it and 5.14 were not run.
torch 2.14 is not allowed yet: the checks of GPU code (`tests/gpu_free`) need its CPU build. Python 3.14 and torch 2.15 have not been run.
"""  # noqa: E501
BASE = (
    "optim.type=adamw", "train.seq_len=2048", "train.global_batch_tokens=131072",
    "train.micro_batch=1", "parallel.replicate=1", "parallel.shard=-1",
)  # fmt: skip
LORA = ("adapter.type=lora", "init.from=jobs/base")
FACTORS = f"short_factor: {[1.0] * 32}, long_factor: {[2.0] * 32}"
LONGROPE = (
    "model.family=phi3",
    f"model.rope_scaling={{type: longrope, original_max_seq_len: 1024, {FACTORS}}}",
)
ACROSS = {
    "tensor": ("parallel.tensor=2",),
    "context": ("parallel.context=2",),
    "pipeline": ("parallel.pipeline=2",),
    "expert": ("model.family=qwen3_moe", "parallel.expert=2"),
    "fp8": ("train.precision=fp8",),
    "bf16-pure": ("train.precision=bf16-pure",),
    "Muon": ("optim.type=muon",),
    "LoRA": LORA,
    "DPO": ("objective.type=dpo", "data.type=preference"),
    "muP": ("scaling={type: mup, base_dim: 128}",),
    "transformers": ("model.family=transformers", "model.config={model_type: lfm2}"),
}
DOWN = {
    "DDP": ("parallel.shard=1", "parallel.replicate=-1"),
    "HSDP": ("parallel.shard=4", "parallel.replicate=-1"),
    **ACROSS,
    "mixture of experts": ("model.family=qwen3_moe",),
    "QLoRA": (*LORA, "adapter.base=nf4"),
    "dropout of an adapter": (*LORA, "adapter.dropout=0.1"),
    "AdamW with 8 bits": ("optim.state=8bit",),
    "stochastic rounding": ("train.precision=bf16-pure", "train.stochastic_rounding=true"),
    "tied head": ("model.tie_embeddings=true",),
    "sliding window": ("model.family=mistral", "model.window=512"),
    "LongRoPE": LONGROPE,
    "conversations": ("data.type=chat",),
    "text on the fly": ("data.type=text", "tokenizer.type=file", "tokenizer.path=hf:gpt2"),
    "documents apart": ("data.mask_documents=true", "data.packing=best-fit"),
    "recomputation": ("train.remat=selective",),
    "batch schedule": ("train.batch_schedule={type: doubling, start: 32768, every: 10%}",),
    "context schedule": ("train.context_schedule=[[0, 1024], [50%, 2048]]",),
    "time budget": ("train.budget=6h",),
    "weight average": ("train.ema_decay=0.999",),
    "z-loss": ("train.z_loss=1e-4",),
}


def matrix_page() -> str:
    """Return the page docs/support-matrix.md, from the answers of the checks."""
    reasons: dict[str, int] = {}

    def cell(down: str, across: str) -> str:
        found = "✓" if down == across else _refusal(DOWN[down], ACROSS[across])
        if found in ("✓", "or"):
            return found
        return str(reasons.setdefault(found, len(reasons) + 1))

    rows = [f"| {down} | {' | '.join(cell(down, across) for across in ACROSS)} |" for down in DOWN]
    keys = [f"| {name} | {_text(' '.join(f'`{a}`' for a in DOWN[name]))} |" for name in DOWN]
    return "\n".join([
        MATRIX_HEAD,
        f"| | {' | '.join(ACROSS)} |", f"| --- |{' --- |' * len(ACROSS)}", *rows, "",
        "## Why a pair is refused", "", "The messages are those of dtt.", "",
        *(f"{number}. {_text(why)}" for why, number in reasons.items()), "",
        VERSIONS,
        "## The features", "", "| feature | keys |", "| --- | --- |",
        *(row if len(row) < LONGEST_CELL else f"{row[:150]}… |" for row in keys), "",
    ])  # fmt: skip


def _refusal(one: tuple[str, ...], other: tuple[str, ...]) -> str:
    """Return ✓, `or`, or why dtt refuses two features together."""
    keys = dict(argument.split("=", 1) for argument in one)
    given = dict(argument.split("=", 1) for argument in other)
    if any(keys[key] != given[key] for key in keys.keys() & given.keys()):
        return "or"
    base = [a for a in BASE if a.split("=")[0] not in {*keys, *given}]
    try:
        cfg = resolve(None, [*base, *one, *other], env={}).config
        check_layout(cfg, mesh_sizes(cfg.parallel, 8), scaled(cfg, 50304).arch)
    except Mistakes as error:
        return "; ".join(f"`{'.'.join(key)}`: {why}" for key, why in error.problems)
    except DttError as error:
        what, *more = str(error).splitlines()
        return ": ".join([what, *(line[9:] for line in more if line.startswith("  why:"))])
    return "✓"


PAGES = {
    "cli.md": cli_page,
    "config.md": config_page,
    "extending.md": extending_page,
    "files.md": files_page,
    "support-matrix.md": matrix_page,
}


def stale(chosen: list[str]) -> list[str]:
    """Return the names of the pages, of those chosen, that differ from the generated text."""
    made = {name: PAGES[name]() for name in chosen or PAGES}
    return [
        name
        for name, text in made.items()
        if not (DOCS / name).is_file() or (DOCS / name).read_text(encoding="utf-8") != text
    ]


def main() -> int:
    """Write the stale pages, or with `--check` only name them; return the exit code."""
    found = stale([name for name in sys.argv[1:] if name != "--check"])
    if "--check" in sys.argv[1:]:
        for name in found:
            print(f"docs/{name} is not up to date: python docs/generate.py", file=sys.stderr)
        return 1 if found else 0
    for name in found:
        (DOCS / name).write_text(PAGES[name](), encoding="utf-8")
        print(f"wrote docs/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
