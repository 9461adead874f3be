"""The base class of all config sections: a frozen, strict, documented pydantic model."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

RESUMABLE: dict[str, Any] = {"x-on-resume": "may change"}


def resumable(default: Any) -> Any:
    """Declare a key that may change when a job resumes: it does not affect what is trained."""
    return Field(default=default, json_schema_extra=RESUMABLE)


class Section(BaseModel):
    """A group of configuration keys.

    The string below each field is its documentation in `dtt config explain` and in docs/config.md.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield `(key, why)` for combinations of values that cannot work; `key` is relative."""
        return iter(())

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Return pydantic's JSON schema with the documentation of every field added."""
        schema = handler(core_schema)
        for name, field in handler.resolve_ref_schema(schema)["properties"].items():
            if doc := field_docs(cls).get(name):
                field["description"] = doc
        return schema


@cache
def field_docs(cls: type[Section]) -> dict[str, str]:
    """Return the documentation of each field of a section class, including inherited fields.

    It is parsed from the source on demand. Pydantic's `use_attribute_docstrings` would parse the
    source of every class at the start of every command.
    """
    docs = {n: f.description for n, f in cls.model_fields.items() if f.description}
    for base in cls.__mro__[: cls.__mro__.index(Section)]:
        [source] = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(source, ast.ClassDef)
        for pair in pairwise(source.body):
            match pair:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(ast.Constant(str(doc))):
                    docs.setdefault(name, inspect.cleandoc(doc))
    return docs


Unit = Literal["steps", "share", "tokens"]
TOKENS = re.compile(r"(\d+(?:\.\d+)?) ?([kKMBT]?) ?tokens?")
"""Pattern of a number of tokens, such as `50M tokens` or `1.5 B tokens`."""
SUFFIXES = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def measure(length: int | float | str) -> tuple[Unit, Fraction]:
    """Return the unit and the amount of a `Length`; decimals are converted exactly as written.

    Raises ValueError if `length` is not a valid `Length`.
    """
    if isinstance(length, int) and not isinstance(length, bool) and length >= 0:
        return "steps", Fraction(length)
    if isinstance(length, float) and 0.0 <= length <= 1.0:
        return "share", Fraction(str(length))
    if isinstance(length, str):
        if found := TOKENS.fullmatch(length):
            return "tokens", Fraction(found[1]) * SUFFIXES[found[2]]
        if found := re.fullmatch(r"(\d+(?:\.\d+)?) ?%", length):
            share = Fraction(found[1]) / 100
            if share <= 1:
                return "share", share
    raise ValueError(length)


def _is_length(value: Any) -> Any:
    try:
        measure(value)
    except ValueError:
        raise PydanticCustomError(
            "length", "must be steps (500), a share of the run (0.2, 20%) or tokens (50M tokens)"
        ) from None
    return value


Length = Annotated[int | float | str, BeforeValidator(_is_length)]
"""A part of the run: a number of steps, a share of all steps (`0.2`, `20%`), or `50M tokens`."""
