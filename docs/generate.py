"""Write the pages that are generated from the code: docs/cli.md and docs/config.md.

Of docs/extending.md, only the signatures are.

python docs/generate.py            rewrite them
python docs/generate.py --check    exit with 1 and name those that are no longer up to date
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

import dtt
from dtt.config.reference import page as config_page
from dtt.main import commands

DOCS = Path(__file__).resolve().parent
HEAD = """\
# Command line

Made from the code by `python docs/generate.py`: what `--help` says, for every command.

`-h` and `--help` work everywhere, `dtt --version` prints the version. Options go before or after
the other arguments. `KEY=VALUE` sets any key of the [configuration](config.md). Results go to
stdout, logs and progress to stderr. The [exit codes](architecture.md#exit-codes) are the same for
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


PAGES = {"cli.md": cli_page, "config.md": config_page, "extending.md": extending_page}


def stale() -> list[str]:
    """Return the names of the pages that differ from the generated text."""
    made = {name: make() for name, make in PAGES.items()}
    return [
        name
        for name, text in made.items()
        if not (DOCS / name).is_file() or (DOCS / name).read_text(encoding="utf-8") != text
    ]


def main() -> int:
    """Write the stale pages, or with `--check` only name them; return the exit code."""
    found = stale()
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
