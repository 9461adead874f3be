"""Classes of a user's own as variants of a section: `type: FILE.py:CLASS` or `MODULE:CLASS`.

Such a class is a subclass of the base class of its kind, in the form of the variants of dtt. Code
runs only if the user of this command names it: in a configuration that is passed, or in a job of
the same Unix user. All that is read otherwise keeps the keys of such a section as they are written.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal, Union, get_args

from pydantic import ConfigDict, Field, create_model
from pydantic.errors import PydanticUserError

from dtt.base.errors import ConfigError, DttError
from dtt.base.log import log
from dtt.base.reading import read_small
from dtt.config.base import Section
from dtt.config.objective import Objective
from dtt.config.optim import Optimizer
from dtt.config.run import RunConfig
from dtt.config.schedule import Schedule
from dtt.config.source import Layer

KINDS: Mapping[str, type[Section]] = {
    "objective": Objective, "optim": Optimizer, "schedule": Schedule,
}  # fmt: skip
"""The base class of each section that may have a class of a user's own."""
CODE = "own_code"
"""Folder of a job with the files of its user's classes, as it was trained with them."""


class OwnCodeError(ConfigError):
    """An exception in the code of a user, or a class that does not fit."""


@dataclass(frozen=True)
class OwnFile:
    """The file of a class of a user's own."""

    path: Path
    content: bytes

    @property
    def sha256(self) -> str:
        """The hash of the content."""
        return hashlib.sha256(self.content).hexdigest()


def is_own(tag: object) -> bool:
    """Return True if a value of `type` names a class of a user's own."""
    return isinstance(tag, str) and ":" in tag


def run_config(layers: Sequence[Layer], *, runs: bool, job: Path | None) -> type[RunConfig]:
    """Return the configuration class with the own classes that are named in `layers`.

    Unless it `runs`, their code is not imported. Files are those that `job` keeps, if it is given.
    Raises OwnCodeError for a class that cannot be used.
    """
    classes: dict[str, tuple[type[Section], ...]] = {}
    for section, base in KINDS.items():
        leaves = [layer[key] for layer in layers if (key := (section, "type")) in layer]
        # The highest layer decides where the file is.
        origins = {leaf.value: leaf.origin for leaf in leaves if is_own(leaf.value)}
        if origins:
            classes[section] = tuple(
                _class(tag, section, base, origin, job) if runs else _opaque(tag, base)
                for tag, origin in origins.items()
            )
    return _with_classes(tuple(classes.items()))


class _OwnConfig(RunConfig):
    """A configuration with classes of a user's own, which other processes get by pickle."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what makes it again: its classes exist in this process only."""
        sections = [(name, getattr(self, name)) for name in KINDS]
        own = [
            (name, type(section).__name__, section.type, type(section).own_file)
            for name, section in sections
            if hasattr(type(section), "own_file")
        ]
        return _made_again, (own, self.model_dump_json())


def _made_again(files: list[tuple[str, str, str, OwnFile]], text: str) -> RunConfig:
    classes = tuple(
        (section, (_bound(getattr(_module(tag, file), name), tag, file),))
        for section, name, tag, file in files
    )
    return _with_classes(classes).model_validate_json(text)


def _module(tag: str, file: OwnFile) -> ModuleType:
    name = tag.rpartition(":")[0]
    return _import_file(file) if name.endswith(".py") else importlib.import_module(name)


@cache
def _with_classes(classes: tuple[tuple[str, tuple[type[Section], ...]], ...]) -> type[RunConfig]:
    if not classes:
        return RunConfig
    fields: dict[str, Any] = {}
    for section, own in classes:
        field = RunConfig.model_fields[section]
        union: Any = Union[(*get_args(field.annotation), *own)]
        fields[section] = (Annotated[union, Field(discriminator="type")], field.default)
    # The same name and module: the documentation of keys is read from the source of a class.
    extended: type[RunConfig] = create_model(
        RunConfig.__name__, __base__=_OwnConfig, __module__=RunConfig.__module__, **fields
    )
    return extended


def _class(
    tag: str, section: str, base: type[Section], origin: str, job: Path | None
) -> type[Section]:
    where = f"{section}.type={tag} ({origin})"
    if job is not None:
        # Before any import: the name in a stranger's job may lead to any file or module.
        for path in (job / "config.yaml", job / CODE / Path(tag.rpartition(":")[0]).name):
            _check_owner(path, where)
    name, _, wanted = tag.rpartition(":")
    with _code_of_user(where):
        if name.endswith(".py"):
            file = _find(name, origin, job, where)
            module = _import_file(file)
        else:
            module = importlib.import_module(name)
            path = Path(str(module.__file__))
            file = OwnFile(path, read_small(path))
    cls = getattr(module, wanted, None)
    if not (inspect.isclass(cls) and issubclass(cls, base)):
        names = [n for n, c in vars(module).items() if inspect.isclass(c) and issubclass(c, base)]
        own = [n for n in names if getattr(module, n).__module__ == module.__name__]
        why = f"it is {cls!r}" if cls is not None else f"the file defines {own or 'none'}"
        raise OwnCodeError(
            f"{file.path} has no class {wanted} that is a dtt.{base.__name__}",
            where=where,
            why=why,
            next=f"class {wanted}(dtt.{base.__name__}): …",
        )
    return _bound(cls, tag, file)


def _find(name: str, origin: str, job: Path | None, where: str) -> OwnFile:
    """Return the file that `job` keeps, or the one beside the configuration, or from here."""
    folder = Path(origin.rpartition(":")[0]).parent if ":" in origin else Path()
    # The second is that of a job that was submitted, which starts from its own config.yaml.
    places = [folder / name, folder / CODE / Path(name).name, Path(name)]
    found = [OwnFile(path.absolute(), read_small(path)) for path in places if path.is_file()]
    copy = None if job is None else job / CODE / Path(name).name
    if copy is not None and copy.is_file():
        kept = OwnFile(copy.absolute(), read_small(copy))
        if found and found[0].sha256 != kept.sha256:
            _log_once(f"{found[0].path} has changed; the job continues with {copy}")
        return kept
    if not found:
        raise OwnCodeError(
            f"there is no file {name}",
            where=where,
            why=f"looked for {' and '.join(dict.fromkeys(map(str, places)))}",
            next="give its path from the folder of the configuration",
        )
    return found[0]


@cache
def _log_once(line: str) -> None:
    """Log a line at its first time: a command resolves its configuration several times."""
    log.warning("%s", line)


TRUST = "DTT_TRUST"
"""Environment variable with which `--trust` reaches all processes of a command."""


def trust_other_users() -> None:
    """Run the code in jobs of other users, too, in this process and those that it starts."""
    os.environ[TRUST] = "1"


def _check_owner(path: Path, where: str) -> None:
    """Raise ConfigError if a file of a job is that of another Unix user, who is not trusted."""
    if os.environ.get(TRUST) == "1" or not path.exists():
        return
    owner = path.stat().st_uid
    if owner not in (os.geteuid(), 0):
        raise ConfigError(
            "the job names code of another user, which has not run",
            where=where,
            why=f"{path} belongs to the user {owner}",
            next="read that code; --trust runs it",
        )


def _import_file(file: OwnFile) -> ModuleType:
    """Import a file; the same content is imported once, and other content is another module."""
    name = f"dtt_own_{file.path.stem}_{file.sha256[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    module = ModuleType(name)
    module.__file__ = str(file.path)
    # Before it runs: pydantic resolves the annotations of its classes in the module of this name.
    sys.modules[name] = module
    try:
        # Not by a loader, which would read the file again, and write bytecode beside it.
        exec(compile(file.content, file.path, "exec"), vars(module))  # noqa: S102  the user's own
    except BaseException:
        del sys.modules[name]
        raise
    return module


@cache
def _bound(cls: type[Section], tag: str, file: OwnFile) -> type[Section]:
    """Return the class with the key `type`, whose only value is `tag`."""
    field: Any = (Literal[tag], tag)
    bound: Any = create_model(cls.__name__, __base__=cls, __module__=cls.__module__, type=field)
    bound.__doc__ = inspect.getdoc(cls) or ""
    bound.own_file = file
    return bound  # type: ignore[no-any-return]


@cache
def _opaque(tag: str, base: type[Section]) -> type[Section]:
    """Return a class that keeps the keys of an own class as they are written."""
    cls: Any = type("Own", (base,), {"model_config": ConfigDict(extra="allow"), "__doc__": ""})
    field: Any = (Literal[tag], tag)
    return create_model("Own", __base__=cls, type=field)  # type: ignore[no-any-return]


def own_keys() -> frozenset[str]:
    """Return the keys that may name a class of a user's own."""
    return frozenset(f"{section}.type" for section in KINDS)


def own_files(config: RunConfig) -> dict[str, OwnFile]:
    """Return the files of the own classes of a configuration, by their names in a job."""
    found: dict[str, OwnFile] = {}
    for name in KINDS:
        found |= own_files_of(getattr(config, name))
    return found


def own_files_of(section: Section) -> dict[str, OwnFile]:
    """Return the file of a section's class, if it is one of a user's own."""
    file: OwnFile | None = getattr(type(section), "own_file", None)
    return {} if file is None else {file.path.name: file}


@contextmanager
def own_code(section: Section | None, key: str) -> Iterator[None]:
    """Report an exception in a method of an own class as one of its user's code."""
    tag = getattr(section, "type", None)
    if not is_own(tag):
        yield
        return
    with _code_of_user(f"{key}.type={tag}"):
        yield


@contextmanager
def _code_of_user(where: str) -> Iterator[None]:
    try:
        yield
    except DttError:
        raise
    except (Exception, SystemExit) as error:
        raise OwnCodeError(
            f"your code raised {type(error).__name__}: {error}",
            where=where,
            why="".join(["its traceback:\n", *_frames(error)]).rstrip(),
            next="dtt only calls it: correct it in your file, and run the command again",
        ) from error


def _frames(error: BaseException) -> list[str]:
    """Return the traceback from the first frame of the user's code on."""
    if isinstance(error, PydanticUserError | SyntaxError):
        return traceback.format_exception_only(error)
    frames = traceback.extract_tb(error.__traceback__)
    here = str(Path(__file__).parents[1])
    own = [f for f in frames if not f.filename.startswith((here, "<frozen importlib"))]
    return traceback.format_list(own)


def key_of_file(config: RunConfig, name: str) -> str:
    """Return the key whose class is in the file `name` of a job."""
    files = {key: own_files_of(getattr(config, key)) for key in KINDS}
    return next(f"{key}.type" for key, found in files.items() if name in found)


def kept_files(config: RunConfig, job: Path) -> dict[Path, bytes]:
    """Return the files that belong into a job beside its configuration, for a resume, with
    contents."""
    return {job / CODE / name: file.content for name, file in own_files(config).items()}
