"""The base class of all config sections: a frozen, strict, documented pydantic model."""

from __future__ import annotations

import ast
import inspect
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    field_validator,
)
from pydantic_core import PydanticCustomError

RESUMABLE: dict[str, Any] = {"x-on-resume": "may change"}


def resumable(default: Any) -> Any:
    """Declare a key that may change when a job resumes: it does not affect what is trained."""
    return Field(default=default, json_schema_extra=RESUMABLE)


MAX_INT, MIN_FLOAT, MAX_FLOAT = 2**63 - 1, 1e-38, 3e38
Size = Annotated[int, Field(gt=0, le=10**6)]
"""A dimension of the model. The number of elements of the largest tensor then fits into 63 bits."""
Depth = Annotated[int, Field(gt=0, le=2048)]
"""A number of layers; building more would take minutes, whatever their size."""
Tokens32 = Annotated[int, Field(gt=0, lt=2**31)]
"""A number of token ids or of positions in a sequence, which are 32 bits wide in files."""
Processes = Annotated[int, Field(ge=0, le=1024)]
"""A number of processes on one machine; 0 leaves the choice to dtt."""


class Section(BaseModel):
    """A group of configuration keys.

    The string below each field is its documentation in `dtt config explain` and in docs/config.md.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False
    )

    @field_validator("*")
    @classmethod
    def _in_range(cls, value: Any) -> Any:
        """Raise an error for a number that torch cannot hold: an int64 or an fp32 tensor."""
        for number in _numbers(value):
            if isinstance(number, int) and not -MAX_INT - 1 <= number <= MAX_INT:
                raise PydanticCustomError("range", "must be below 2^63 = 9,223,372,036,854,775,808")
            if isinstance(number, float) and number and not MIN_FLOAT <= abs(number) <= MAX_FLOAT:
                why = "must be 0 or between 1e-38 and 3e38, the range of fp32"
                raise PydanticCustomError("range", why)
        return value

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield `(key, why)` for combinations of values that cannot work; `key` is relative."""
        return iter(())


def walk(section: Section, key: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Section]]:
    """Yield a section, and all below it, with their keys; an entry of a list has its number."""
    yield key, section
    for name in type(section).model_fields:
        value = getattr(section, name)
        listed = enumerate(value) if isinstance(value, tuple) else ()
        for inner, number in [(value, ()), *((entry, (str(i),)) for i, entry in listed)]:
            if isinstance(inner, Section):
                yield from walk(inner, (*key, name, *number))


def _numbers(value: Any) -> Iterator[Any]:
    """Yield the value, or the values of a list or mapping; those of sections were checked."""
    if isinstance(value, tuple | list | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _numbers(inner)
    else:
        yield value.written if isinstance(value, Length) else value


@cache
def field_docs(cls: type[BaseModel]) -> dict[str, str]:
    """Return the documentation of each field of a model class, including inherited fields.

    It is parsed from the source on demand. Pydantic's `use_attribute_docstrings` would parse the
    source of every class at the start of every command.
    """
    docs = {n: f.description for n, f in cls.model_fields.items() if f.description}
    for base in cls.__mro__[: cls.__mro__.index(BaseModel)]:
        # A class that is made from another has its name and module.
        docs = _docs_of_module(base.__module__).get(base.__name__, {}) | docs
    return docs


@cache
def _docs_of_module(name: str) -> dict[str, dict[str, str]]:
    """Return the documentation of the fields of each class in a module."""
    docs: dict[str, dict[str, str]] = {}
    for node in ast.walk(ast.parse(inspect.getsource(sys.modules[name]))):
        if isinstance(node, ast.ClassDef):
            found = docs.setdefault(node.name, {})
            for pair in pairwise(node.body):
                match pair:
                    case ast.AnnAssign(target=ast.Name(id=key)), ast.Expr(ast.Constant(str(doc))):
                        found[key] = inspect.cleandoc(doc)
    return docs


def must_be(pattern: str, what: str) -> AfterValidator:
    """Return a validator of values whose text matches `pattern`, which `what` puts into words."""

    def check(value: str | int) -> str | int:
        if re.fullmatch(pattern, str(value), re.ASCII) is None:
            raise PydanticCustomError("shape", "must be {what}", {"what": what})
        return value

    return AfterValidator(check)


Unit = Literal["steps", "share", "tokens"]
TOKENS = re.compile(r"(\d+(?:\.\d+)?) ?([kKMBT]?) ?tokens?")
"""Pattern of a number of tokens, such as `50M tokens` or `1.5 B tokens`."""
SHARE = re.compile(r"(\d+(?:\.\d+)?) ?%")
SUFFIXES = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True)
class Length:
    """A part of the run: a number of steps, a share of all steps (`0.2`, `20%`), or tokens.

    Lengths are equal if unit and amount are: `1`, a step, differs from `1.0`, the whole run.
    """

    written: int | float | str = field(compare=False)
    """The value in the configuration, such as `50M tokens`."""
    unit: Unit = field(init=False)
    amount: Fraction = field(init=False)
    """Exactly what was written: decimals are not rounded."""

    def __post_init__(self) -> None:
        """Measure what was written. Raise ValueError if it is no length."""
        length, unit, amount = self.written, "steps", Fraction(-1)
        if isinstance(length, int) and not isinstance(length, bool):
            amount = Fraction(length)
        elif isinstance(length, float) and 0.0 <= length <= 1.0:
            unit, amount = "share", Fraction(str(length))
        elif isinstance(length, str) and (found := TOKENS.fullmatch(length)):
            unit, amount = "tokens", Fraction(found[1]) * SUFFIXES[found[2]]
        elif isinstance(length, str) and (found := SHARE.fullmatch(length)):
            unit, amount = "share", Fraction(found[1]) / 100
        if not 0 <= amount <= {"share": 1, "tokens": MAX_INT}.get(unit, math.inf):
            raise ValueError(length)
        object.__setattr__(self, "unit", unit)
        object.__setattr__(self, "amount", amount)

    def __str__(self) -> str:
        """Return the length as it was written."""
        return str(self.written)


def _length(value: Any) -> Length:
    try:
        return value if isinstance(value, Length) else Length(value)
    except ValueError:
        raise PydanticCustomError(
            "length", "must be steps (500), a share of the run (0.2, 20%) or tokens (50M tokens)"
        ) from None


LengthKey = Annotated[
    Length,
    PlainValidator(_length),
    PlainSerializer(lambda length: length.written),
]
"""A key that holds a Length."""
