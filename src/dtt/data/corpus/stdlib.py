"""Corpora that need no download, made from Python's standard library.

`python-stdlib` has its sources, `python-stdlib-chat` conversations: the questions are about names
that the library documents, and the answers come from its docstrings.
"""

from __future__ import annotations

import ast
import inspect
import json
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dtt.base.errors import EnvironmentUnfit
from dtt.base.files import replacing
from dtt.base.log import log

NAME, CHAT_NAME = "python-stdlib", "python-stdlib-chat"
FILE, CHAT_FILE = f"{NAME}.parquet", f"{CHAT_NAME}.jsonl"
ROW_GROUP_BYTES = 2**19
SCHEMA = pa.schema([("id", pa.string()), ("text", pa.string())])

ANSWER_CHARACTERS = range(12, 240)
"""Length of an answer; longer first paragraphs of docstrings are left out."""
DEFINITIONS_PER_CONVERSATION = 3
SYSTEM = "You answer questions about Python's standard library in one sentence."

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

LEFT_OUT = frozenset(
    {
        "__pycache__",
        "dist-packages",  # installed packages
        "encodings",  # tables of characters
        "ensurepip",
        "idlelib",
        "lib2to3",
        "pydoc_data",  # one string literal of 700 kB
        "site-packages",
        "test",
        "tests",
        "turtledemo",
    }
)


def revision() -> str:
    """Return the running Python, which determines the content, such as `CPython 3.11.7`."""
    return f"{platform.python_implementation()} {platform.python_version()}"


def write_stdlib(folder: Path) -> Path:
    """Write the sources of the standard library into `folder` as one Parquet file; return its path.

    The columns are `id` (the module name) and `text`. There is one row per module, sorted by name.
    The same Python produces the same bytes. Raises EnvironmentUnfit if Python has no sources.
    """
    group: list[dict[str, str]] = []
    group_bytes = skipped = 0
    target = folder / FILE
    with replacing(target) as file, pq.ParquetWriter(file, SCHEMA, compression="zstd") as writer:
        for name, path in source_files():
            try:
                group.append({"id": name, "text": path.read_text(encoding="utf-8")})
            except UnicodeDecodeError:
                skipped += 1
                continue
            group_bytes += path.stat().st_size
            if group_bytes >= ROW_GROUP_BYTES:
                writer.write_table(pa.Table.from_pylist(group, SCHEMA))
                group, group_bytes = [], 0
        if group:
            writer.write_table(pa.Table.from_pylist(group, SCHEMA))
    if skipped:
        log.info("left out %d modules that are not UTF-8", skipped)
    return target


def source_files() -> list[tuple[str, Path]]:
    """Return the name and source file of each module of the standard library, sorted by name.

    Raises EnvironmentUnfit if Python has no sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    modules = sorted(_modules(root))
    if not modules:
        raise EnvironmentUnfit(
            "this Python comes without the sources of its standard library",
            where=root,
            next="use another dataset, or use another Python",
        )
    return modules


def _modules(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield the name and file of each module, except tests, data tables and build configuration."""
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        if not LEFT_OUT.intersection(parts) and not parts[-1].startswith("_sysconfigdata"):
            yield ".".join(parts), path


def write_stdlib_chat(folder: Path) -> Path:
    """Write the conversations into `folder` as one JSONL file; return its path.

    A row has `messages`: one question and answer about a module, and one to three questions about
    names that it defines. Every second conversation starts with a system message. The same Python
    produces the same bytes. Raises EnvironmentUnfit if Python has no sources.
    """
    number = 0
    with replacing(folder / CHAT_FILE) as file:
        for name, path in source_files():
            for turns in _conversations(name, path):
                system = [{"role": "system", "content": SYSTEM}] if number % 2 else []
                row = {"messages": system + turns}
                file.write(f"{json.dumps(row, ensure_ascii=False)}\n".encode())
                number += 1
    return folder / CHAT_FILE


def _conversations(module: str, path: Path) -> Iterator[list[dict[str, str]]]:
    """Yield the messages of each conversation about a module; none if it has no docstrings."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, SyntaxError):
        return
    if summary := _summary(tree):
        yield _turn(f"What is the module {module} for?", summary)
    pending: list[dict[str, str]] = []
    for name, node in _definitions(tree, module):
        if summary := _summary(node):
            kind = "class" if isinstance(node, ast.ClassDef) else "function"
            question = f"And the {kind} {name}?" if pending else f"What does the {kind} {name} do?"
            pending += _turn(question, summary)
        if len(pending) == 2 * DEFINITIONS_PER_CONVERSATION:
            yield pending
            pending = []
    if pending:
        yield pending


def _definitions(tree: ast.Module, module: str) -> Iterator[tuple[str, Documented]]:
    """Yield the public functions and classes of a module, and the methods of its classes."""
    for node in tree.body:
        if isinstance(node, Documented) and not node.name.startswith("_"):
            yield f"{module}.{node.name}", node
            if isinstance(node, ast.ClassDef):
                for method in node.body:
                    if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
                        yield f"{module}.{node.name}.{method.name}", method


def _summary(node: Documented) -> str | None:
    """Return the first paragraph of a docstring in one line; None if it cannot be an answer."""
    paragraph = inspect.cleandoc(ast.get_docstring(node) or "").partition("\n\n")[0]
    text = " ".join(paragraph.split())
    return text if len(text) in ANSWER_CHARACTERS and text.isprintable() else None


def _turn(question: str, answer: str) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
    ]
