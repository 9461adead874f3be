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
from itertools import combinations
from logging import WARNING
from pathlib import Path
from types import ModuleType, NoneType
from typing import Annotated, Any, Literal, Optional, TypeVar, Union, get_args, get_origin

from pydantic import ConfigDict, Discriminator, Field, Tag, create_model
from pydantic.errors import PydanticUserError

from dtt.base.errors import ConfigError, DttError
from dtt.base.log import log_once
from dtt.base.reading import read_small
from dtt.config.action import Action
from dtt.config.base import Section, walk
from dtt.config.key_types import TAGS, Key, tag_of
from dtt.config.layers import Layer
from dtt.config.model import Family
from dtt.config.objective import Objective
from dtt.config.optim import Optimizer
from dtt.config.run import RunConfig
from dtt.config.schedule import Schedule
from dtt.config.sources import Documents, Source, SourceConfig, SourceEntry

KINDS: Mapping[str, type[Section]] = {
    "objective": Objective, "optim": Optimizer, "schedule": Schedule, "data": Source,
    "data.sources": Source, "data.sources.validation": Source, "actions": Action, "model": Family,
    "download.documents": Documents, "download.datasets.documents": Documents,
}  # fmt: skip
"""The base class of each section that may have a class of a user's own."""
LISTS = ("actions", "data.sources", "download.datasets")
"""Those that are lists, or lie in one: their entries have no number here."""
UNTRAINED = ("actions", "download")
"""Sections whose classes change nothing of what is trained, once there is a corpus."""
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
    for section, origins in _tags(layers).items():
        base = KINDS[section]
        classes[section] = tuple(
            _class(tag, section, base, origin, job) if runs else _opaque(tag, base, section)
            for tag, origin in origins.items()
        )
    own: list[Any] = [cls for found in classes.values() for cls in found]
    # A job keeps the files of all classes in one folder.
    for one, other in combinations([cls.own_file for cls in own] if runs else [], 2):
        if one.path.name == other.path.name and one.sha256 != other.sha256:
            where = f"{one.path}, {other.path}"
            raise OwnCodeError("two files have one name", where=where, next="rename one of them")
    return _with_classes(tuple(classes.items()))


def _tags(layers: Sequence[Layer]) -> dict[str, dict[str, str]]:
    """Return the own classes named in `layers`, by section, each with its origin."""
    found: dict[str, dict[str, str]] = {}
    for layer in layers:
        for key, leaf in layer.items():
            if not any(section.startswith(key[0]) for section in KINDS):
                continue
            for path, value in _leaves(key, leaf.value):
                section = ".".join(path[:-1])
                if path[-1] == _tag_name(section) and is_own(value) and section in KINDS:
                    # The highest layer decides where the file is.
                    found.setdefault(section, {})[value] = leaf.origin
    return found


def _leaves(key: Key, value: Any) -> Iterator[tuple[Key, Any]]:
    """Yield the values below a key; an entry of a list has the key of the list."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves((*key, str(name)), inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(key, inner)
    else:
        yield key, value


@cache
def _with_classes(classes: tuple[tuple[str, tuple[type[Section], ...]], ...]) -> type[RunConfig]:
    if not classes:
        return RunConfig
    own = {tuple(section.split(".")): found for section, found in classes}
    return _extended(RunConfig, own)


SectionT = TypeVar("SectionT", bound=Section)


def _extended(cls: type[SectionT], own: Mapping[Key, tuple[type[Section], ...]]) -> type[SectionT]:
    """Return a section class whose keys, and those below, also take the classes in `own`."""
    fields: dict[str, Any] = {}
    for name in dict.fromkeys(path[0] for path in own):
        field = cls.model_fields[name]
        below = {path[1:]: found for path, found in own.items() if path[0] == name and path[1:]}
        annotation = _annotation(field.annotation, own.get((name,), ()), below)
        extra = field.json_schema_extra
        fields[name] = (annotation, Field(default=field.default, json_schema_extra=extra))
    # The same name and module: the documentation of keys is read from the source of a class.
    extended: type[SectionT] = create_model(
        cls.__name__, __base__=cls, __module__=cls.__module__, **fields
    )
    extended.__doc__ = cls.__doc__
    return extended


def _annotation(
    annotation: Any, own: tuple[type[Section], ...], below: Mapping[Key, tuple[type[Section], ...]]
) -> Any:
    """Return the annotation of a field that takes `own` classes, or has some in a section below.

    The field is a section, a list of sections, a section or None, a tagged union, or a path.
    """
    if get_origin(annotation) is tuple:
        return tuple[_annotation(get_args(annotation)[0], own, below), ...]  # type: ignore[misc]
    inner = get_args(annotation) or (annotation,)
    # The bare base class is for none: then a section is an error, which names the mistake.
    members: list[Any] = []
    for one in (*inner, *own):
        if one is not NoneType and one not in KINDS.values():
            fields = getattr(one, "model_fields", {})
            has = {path: found for path, found in below.items() if path[0] in fields}
            members.append(_extended(one, has) if has else one)
    union: Any = Union[tuple(members)]  # noqa: UP007  of a value
    if annotation is SourceConfig:  # the only variant that needs no `type`
        tags = [Annotated[one, Tag(one.model_fields["type"].default)] for one in members]
        union = Union[tuple(tags)]  # noqa: UP007  of a value
        return Annotated[union, Discriminator(_type_of_source)]
    if len(members) > 1 and Path not in members:
        name = _tag_of_class(own[0]) if own else "type"
        union = Annotated[union, Field(discriminator=name)]
    return Optional[union] if NoneType in inner else union  # noqa: UP045  of a value


def _type_of_source(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return kind or "tokens"


def _class(
    tag: str, section: str, base: type[Section], origin: str, job: Path | None
) -> type[Section]:
    where = f"{section}.{_tag_name(section)}={tag} ({origin})"
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
    taken = SourceEntry.model_fields.keys() & cls.model_fields.keys() - Source.model_fields.keys()
    if section == "data.sources" and taken:
        raise OwnCodeError(
            f"{wanted} has a key of every entry of data.sources: {', '.join(sorted(taken))}",
            where=where,
            next="give it another name in your class",
        )
    return _bound(cls, tag, file, section)


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
            log_once(f"{found[0].path} has changed; the job continues with {copy}", WARNING)
        return kept
    if not found:
        raise OwnCodeError(
            f"there is no file {name}",
            where=where,
            why=f"looked for {' and '.join(dict.fromkeys(map(str, places)))}",
            next="give its path from the folder of the configuration",
        )
    return found[0]


TRUST = "DTT_TRUST"
"""Environment variable with which `--trust` reaches all processes of a command."""


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
def _bound(cls: type[Section], tag: str, file: OwnFile, section: str) -> type[Section]:
    """Return the class with the key `type` (or `family`), whose only value is `tag`.

    It also has the keys of its place.
    """
    fields: dict[str, Any] = {_tag_of_class(cls): (Literal[tag], tag)}
    bases = (SourceEntry, cls) if section == "data.sources" else (cls,)
    bound: Any = create_model(cls.__name__, __base__=bases, __module__=cls.__module__, **fields)
    bound.__doc__ = inspect.getdoc(cls) or ""
    bound.own_file = file
    return bound  # type: ignore[no-any-return]


@cache
def _opaque(tag: str, base: type[Section], section: str) -> type[Section]:
    """Return a class that keeps the keys of an own class as they are written."""
    bases = (SourceEntry, base) if section == "data.sources" else (base,)
    cls: Any = type("Own", bases, {"model_config": ConfigDict(extra="allow"), "__doc__": ""})
    fields: dict[str, Any] = {_tag_of_class(base): (Literal[tag], tag)}
    return create_model("Own", __base__=cls, **fields)  # type: ignore[no-any-return]


def own_keys() -> frozenset[str]:
    """Return the keys that may name a class of a user's own."""
    return frozenset(map(_key_of, KINDS))


def _key_of(section: str) -> str:
    """Return the key that names the class of a section; those of a list are in its key."""
    own = f"{section}.{_tag_name(section)}"
    return next((one for one in LISTS if section.startswith(one)), own)


def _tag_name(section: str) -> str:
    return _tag_of_class(KINDS[section]) if section in KINDS else "type"


def _tag_of_class(cls: type[Section]) -> str:
    """Return the name of the key that names the class."""
    return next(name for name in TAGS if name in cls.model_fields)


def own_sections(config: RunConfig) -> Iterator[tuple[str, Section, OwnFile]]:
    """Yield each section of an own class, with its key in `KINDS` and its file."""
    for key, section in walk(config):
        if (file := own_file_of(section)) is not None:
            yield ".".join(name for name in key if not name.isdigit()), section, file


def own_file_of(section: Section) -> OwnFile | None:
    """Return the file of the class of a section; None for one of dtt."""
    return getattr(type(section), "own_file", None)


def own_files(config: RunConfig) -> dict[str, OwnFile]:
    """Return the files of the own classes of a configuration, by their names in a job."""
    return {file.path.name: file for _, _, file in own_sections(config)}


@contextmanager
def own_code(section: Section | None, key: str, item: str = "") -> Iterator[None]:
    """Report an exception in a method of an own class, for an `item`, as one of its user's code."""
    tag = tag_of(section)
    if not is_own(tag):
        yield
        return
    with _code_of_user(f"{key}.{_tag_name(key)}={tag}" + (f", {item}" if item else "")):
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


def trained_files(config: RunConfig) -> dict[str, tuple[str, OwnFile]]:
    """Return the files that decide what is trained, by name, with the keys that name classes."""
    return {
        file.path.name: (_key_of(section), file)
        for section, _, file in own_sections(config)
        if not section.startswith(UNTRAINED)
    }


def kept_files(config: RunConfig, job: Path) -> dict[Path, bytes]:
    """Return the files that belong into a job beside its configuration, for a resume, with
    contents."""
    return {job / CODE / name: file.content for name, file in own_files(config).items()}
