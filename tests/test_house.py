"""What holds for the source as a whole."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from dtt.main import commands

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src/dtt"
SLOW = {"torch", "numpy", "pyarrow", "datasets", "transformers", "wandb"}


@pytest.mark.parametrize(
    "argv",
    [[], ["--help"], ["train", "--help"], ["eval", "--help"], ["data", "mix", "--help"]],
    ids=" ".join,
)
def test_the_command_line_imports_nothing_slow(argv: list[str]) -> None:
    code = (
        "import atexit, sys\n"
        f"atexit.register(lambda: print('slow:', *({SLOW!r} & sys.modules.keys())))\n"
        f"sys.argv = ['dtt', *{argv}]\n"
        f"from dtt.main import main\n{'main()' if argv else ''}"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "slow:"


@pytest.mark.parametrize(
    "package", [p for p in sorted(SOURCE.rglob("__init__.py")) if p.parent != SOURCE],
    ids=lambda path: path.parent.name,
)  # fmt: skip
def test_each_package_documents_its_content(package: Path) -> None:
    text = ast.get_docstring(ast.parse(package.read_text()))
    assert text is not None
    assert text.endswith(".")


def test_no_file_and_no_function_is_too_long() -> None:
    files = {path: path.read_text() for path in SOURCE.rglob("*.py")}
    lengths = {str(path): len(text.splitlines()) for path, text in files.items()}
    assert {name: n for name, n in lengths.items() if n > 450} == {}
    functions = {
        f"{path.name}:{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path, text in files.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef)
    }
    assert {name: n for name, n in functions.items() if n > 60} == {}


def test_no_script_and_no_style_sheet_of_a_page_is_too_long_or_wide() -> None:
    """Those of other projects are excepted."""
    files = [p for suffix in ("js", "css") for p in SOURCE.rglob(f"*.{suffix}")]
    own = {path: path.read_text("utf-8") for path in files if ".min." not in path.name}
    lengths = {path.name: len(text.splitlines()) for path, text in own.items()}
    assert {name: n for name, n in lengths.items() if n > 450} == {}
    lines = [(p, n, x) for p, text in own.items() for n, x in enumerate(text.splitlines(), 1)]
    assert [f"{p.name}:{n}" for p, n, line in lines if len(line) > 100] == []


def test_a_name_has_one_meaning_in_the_package() -> None:
    """Modules of cli and config are named after their command or section; `run` of a package is
    what its command runs."""
    known = set(typer.main.get_command(commands()).commands)  # type: ignore[attr-defined]
    files = {path.stem for path in (SOURCE / "cli").glob("[!_]*.py")}
    assert files == known | {"app", "options"}
    modules: Counter[str] = Counter()
    classes: Counter[str] = Counter()
    for path in SOURCE.rglob("*.py"):
        if path.parent.name not in {"cli", "config"} and path.stem[0] != "_":
            modules[path.stem] += 1
        tree = ast.parse(path.read_text())
        classes.update(n.name for n in ast.walk(tree) if isinstance(n, ast.ClassDef))
    assert {name for name, n in modules.items() if n > 1} == {"base", "collectives", "run"}
    assert not {name for name, n in classes.items() if n > 1}


AHEAD = """
import os, sys
from importlib import import_module
from support import forked

for name in forked.MODULES:
    import_module(name)
assert "huggingface_hub" not in sys.modules, "a module of READ_ENVIRONMENT is missing there"
for name in (*forked.TRANSFORMERS, *forked.MODULES_OF_HUB):
    import_module(name)
os.environ["HF_ENDPOINT"] = "http://there"
forked.forget_hub()
assert not [name for name in sys.modules if name.startswith(("huggingface_hub", "dtt.hf"))]
from dtt.train import frozen
from transformers import LlamaForCausalLM
from huggingface_hub import constants
assert frozen is sys.modules["dtt.train.frozen"]
assert constants.ENDPOINT == "http://there"
"""


def test_what_tests_import_ahead_has_read_no_variables_of_the_hub_for_good() -> None:
    """Else HF_ENDPOINT has no effect in a process that tests fork."""
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(
        [sys.executable, "-c", AHEAD], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_only_the_server_of_clean_processes_forks() -> None:
    # A process of tests may have grown so large that the kernel refuses to copy it (ENOMEM).
    folder = Path(__file__).parent
    forks = re.compile(r"os\.fork\(|pty\.fork\(|preexec_fn=|\blocal\.run\(")
    texts = {path: path.read_text() for path in folder.rglob("*.py")}
    # A program that `test_local.py` starts calls `local.run`.
    clean = {folder / "support/warm_python.py", folder / "base/test_local.py", Path(__file__)}
    assert {path for path, text in texts.items() if forks.search(text)} == clean


def test_no_loader_may_run_the_code_of_a_folder() -> None:
    """`transformers` asks a question otherwise, and runs the code if the answer is `y`.

    PEFT reads the adapters of `dtt export` only, and runs no code; nor does `datasets` since 4.
    """
    loaders = {"from_pretrained", "from_config", "load_dataset", "HFLM"}
    named, safe = set(), set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in loaders:
                named.add((path.name, node.lineno, node.col_offset, ast.unparse(node)))
            if isinstance(node, ast.Call):
                asked = {a.arg: ast.unparse(a.value) for a in node.keywords}
                called = node.func
                if asked.get("trust_remote_code") == "False":
                    where = (path.name, called.lineno, called.col_offset)
                    safe.add((*where, ast.unparse(called)))
                elif isinstance(called, ast.Name) and called.id in loaders:
                    named.add((path.name, called.lineno, called.col_offset, called.id))
    assert len(safe) >= 5
    assert {one[3] for one in named - safe} <= {"peft.PeftModel.from_pretrained"}


def calls(names: set[str]) -> Iterator[tuple[str, ast.Call, list[ast.AST]]]:
    """Yield the calls of the source that end with one of `names`, with what encloses them."""

    def within(node: ast.AST, around: list[ast.AST]) -> Iterator[tuple[ast.Call, list[ast.AST]]]:
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in names:
            yield node, around
        for child in ast.iter_child_nodes(node):
            yield from within(child, [*around, node])

    for path in sorted(SOURCE.rglob("*.py")):
        for node, around in within(ast.parse(path.read_text()), []):
            yield str(path.relative_to(SOURCE)), node, around


UNBOUNDED = {
    # Files of the machine, of the interpreter and of dtt's own package.
    "artifacts/jobdir.py", "base/host_memory.py", "base/launcher.py", "data/corpus/stdlib.py",
    "jobs/clock.py",
    "jobs/slurm/submissions.py", "launch/sweep/local_trials.py",
    "mesh/environment.py", "report/page.py",
    # The temporary files of a process, or of its own children.
    "verify/differences.py", "verify/forked_ranks.py",
    # Runs without dtt's packages, in the job of its owner.
    "jobs/slurm/supervisor/tolerant_io.py",
    # A log that the user follows.
    "launch/job.py",
    # Written by this process just before, or looked at only after their names and kinds fit.
    "base/files.py", "launch/submission.py",
}  # fmt: skip
"""Modules that read files whole by themselves."""


def test_small_files_of_others_are_read_within_bounds() -> None:
    """A FIFO would be waited for, and a file of 20 GB read: `dtt.base.reading` refuses both."""
    readers = {"read_text", "read_bytes", "from_file", "readlines"}
    found = {
        where
        for where, call, around in calls(readers | {"load", "read"})
        if ast.unparse(call.func) in {"json.load", "yaml.load", "tomllib.load"}
        or (isinstance(call.func, ast.Attribute) and call.func.attr in readers)
        or (ast.unparse(call).endswith(".read()") and opens(around[0], ast.unparse(call.func)))
    }
    text = {"config/layers.py"}  # `yaml.load` of a text
    assert found - text == UNBOUNDED


def opens(module: ast.AST, read: str) -> bool:
    """True if what `read` reads, such as `file` of `file.read`, is a file that the module opens."""
    name = read.removesuffix(".read")
    bound: list[tuple[ast.AST | None, ast.AST]] = []
    for node in ast.walk(module):
        if isinstance(node, ast.withitem):
            bound.append((node.optional_vars, node.context_expr))
        elif isinstance(node, ast.Assign):
            bound.append((node.targets[0], node.value))
    return any(
        target is not None and name in ast.unparse(target).split() and "open(" in ast.unparse(value)
        for target, value in bound
    )


ENCODED_BEFORE = {"data/text/side_files.py", "data/text/unencodable.py"}
"""Modules that encode texts which were encoded before, and texts of their own."""
OWN_TEXTS = {"TEXT", "DECOMPOSED"}
"""Constants of `dtt.hf.verify`."""


def test_texts_of_others_are_encoded_within_the_guard() -> None:
    """Else one text ends the process with a panic of Rust; see `dtt.data.text.unencodable`."""
    unguarded = [
        f"{where}:{call.lineno}"
        for where, call, around in calls({"encode_batch", "encode_batch_fast", "encode"})
        if any(option.arg == "add_special_tokens" for option in call.keywords)
        and not any(
            "encoding(" in ast.unparse(one.items[0]) for one in around if isinstance(one, ast.With)
        )
        and not (isinstance(call.args[0], ast.Constant) or ast.unparse(call.args[0]) in OWN_TEXTS)
    ]
    assert [place for place in unguarded if place.rpartition(":")[0] not in ENCODED_BEFORE] == []
