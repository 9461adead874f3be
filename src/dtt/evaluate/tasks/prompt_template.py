"""Prompt templates: text with fields of a row, and nothing that runs.

`{question}` is a field, `{choices.text}` a field of an object, `{targets.0}` an entry of a list,
and `{premise!strip!chop}` a field with conversions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

PART = re.compile(r"\{([^{}]*)\}|[{}]")
FIELD = re.compile(r"\w[\w -]*(?:\.\w[\w -]*)*(?:![a-z_]+)*")
FIELDS_SHOWN = 12
"""Maximum number of fields that an error lists."""


CONVERSIONS: dict[str, Callable[[str], str]] = {
    "capitalize": str.capitalize,
    "uncapitalize": lambda text: text[:1].lower() + text[1:],
    "lower": str.lower,
    "upper": str.upper,
    "strip": str.strip,
    "lstrip": str.lstrip,
    "rstrip": str.rstrip,
    "chop": lambda text: text[:-1],
    "without_last_word": lambda text: " ".join(text.split(" ")[:-1]),
    "last_word": lambda text: text.split(" ")[-1],
    "before_blank": lambda text: text.partition("_")[0],
    "after_blank": lambda text: text.partition("_")[2],
}
"""Conversions of a field. `chop` removes the last character; the blank is the first `_`."""

Replaced = Mapping[str, Mapping[str, str]]
"""Values of fields and the text that replaces each of them."""


def template_problems(template: str) -> Iterator[str]:
    """Yield what is wrong with a template."""
    if "{{" in template or "{%" in template:
        yield "is a template with fields {name}, not Jinja: write single braces, and no expressions"
        return
    for match in PART.finditer(template):
        field = match[1]
        if field is None:
            yield f"has a brace without a partner at character {match.start() + 1}"
        elif not FIELD.fullmatch(field):
            yield f"{{{field}}} is not a field such as {{question}} or {{choices.text!strip}}"
        else:
            for conversion in field.split("!")[1:]:
                if conversion not in CONVERSIONS:
                    yield f"{{{field}}}: conversions are {', '.join(CONVERSIONS)}"


def render(template: str, row: Mapping[str, Any], replaced: Replaced | None = None) -> str:
    """Return the text of a template; raise ValueError if the row does not have its fields."""
    return PART.sub(
        lambda match: _text(match[1], field_value(match[1].partition("!")[0], row), replaced),
        template,
    )


def render_list(
    templates: str | tuple[str, ...], row: Mapping[str, Any], replaced: Replaced | None = None
) -> list[str]:
    """Return the texts of several templates, or those in the one field that holds a list."""
    if not isinstance(templates, str):
        return [render(template, row, replaced) for template in templates]
    match = PART.fullmatch(templates)
    if match is not None:
        value = field_value(match[1].partition("!")[0], row)
        if isinstance(value, list):
            return [_text(match[1], entry, replaced) for entry in value]
    return [render(templates, row, replaced)]


def without_literals(template: str) -> str:
    """Return a template with only the fields of `template`, separated by spaces."""
    return " ".join(match[0] for match in PART.finditer(template))


def field_value(path: str, row: Mapping[str, Any]) -> Any:
    """Return the value at a dotted path; raise ValueError if there is none."""
    value: Any = row
    for part in path.split("."):
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            raise ValueError(
                f"there is no field {path!r}; fields: {', '.join([*row][:FIELDS_SHOWN])}"
            )
    return value


def _text(match: str, value: Any, replaced: Replaced | None) -> str:
    """Return the text of a field, or of an entry of a list, as `replaced` maps it, converted."""
    path, *conversions = match.split("!")
    if not isinstance(value, str | int | float):
        kind = "null" if value is None else "a list" if isinstance(value, list) else "an object"
        raise ValueError(f"field {path!r} is {kind}, not text")
    text, texts = str(value), (replaced or {}).get(path)
    if texts is not None and text not in texts:
        known = ", ".join(texts)
        raise ValueError(f"field {path!r} is {text!r}, which is not in map: {known}")
    text = text if texts is None else texts[text]
    for conversion in conversions:
        text = CONVERSIONS[conversion](text)
    return text


def fields(template: str) -> set[str]:
    """Return the fields of a template, without their conversions."""
    return {match[1].partition("!")[0] for match in PART.finditer(template) if match[1]}
