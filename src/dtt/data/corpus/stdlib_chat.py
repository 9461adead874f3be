"""The `python-stdlib-chat` corpus: conversations about Python's standard library.

The questions are about names that the library documents, and the answers come from its docstrings.
So there is a small set of conversations on every machine, without a download.
"""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterator
from pathlib import Path

from dtt.base.files import replacing
from dtt.data.corpus.stdlib import source_files

NAME = "python-stdlib-chat"
FILE = "python-stdlib-chat.jsonl"
ANSWER_CHARACTERS = range(12, 240)
"""Length of an answer; longer first paragraphs of docstrings are left out."""
DEFINITIONS_PER_CONVERSATION = 3
SYSTEM = "You answer questions about Python's standard library in one sentence."

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def write_stdlib_chat(folder: Path) -> Path:
    """Write the conversations into `folder` as one JSONL file; return its path.

    A row has `messages`: one question and answer about a module, and one to three questions about
    names that it defines. Every second conversation starts with a system message. The same Python
    produces the same bytes. Raises EnvironmentUnfit if Python has no sources.
    """
    number = 0
    with replacing(folder / FILE) as file:
        for name, path in source_files():
            for turns in _conversations(name, path):
                system = [{"role": "system", "content": SYSTEM}] if number % 2 else []
                row = {"messages": system + turns}
                file.write(f"{json.dumps(row, ensure_ascii=False)}\n".encode())
                number += 1
    return folder / FILE


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
