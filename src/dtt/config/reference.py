"""Generator of the page docs/config.md."""

from __future__ import annotations

from dtt.config.base import Section
from dtt.config.explain import defaults, describe, items, plain, scalar, tag, variants
from dtt.config.key_types import Key
from dtt.config.run import RunConfig

BAR = "\\|"  # a bar inside a cell of a table
LONGEST_CELL = 200
"""Maximum length of documentation shown in the table, in characters; longer texts follow it."""
HEAD = """\
# Configuration

Generated from the code by `python docs/generate.py`.

One file (YAML, JSON or TOML) serves every command; each command reads its own sections. Values
come, from lowest to highest precedence, from the defaults, the files under `extends` from left to
right, the file itself (`-c`), the environment (`DTT_TRAIN__STEPS=500`), arguments
(`train.steps=500`) and named options (`-d`). The `launch` keys of a profile (`--cluster`) come
between the file and the environment. When a job is resumed, its own `config.yaml` takes
precedence over the defaults, and another value for a key that *must stay* is refused unless
`--allow-change` names the key. Where the default is `null`, the last column states its meaning.

A value of a key that holds text is taken as it is written (`name=007`, `train.sample_prompt=issue
#12`), also without quotes in a YAML file; `null` unsets text that may be null. All other values are
YAML. A key that appears twice in a file, nested or dotted, is an error. Names in free mappings,
such as `launch.environment`, are taken whole, with dots and case. If a higher layer sets another
`type`, the keys of lower layers that this type has stay; the others are dropped, and named in the
log and in the configuration.

A list replaces that of lower layers. With a plus behind its name it adds the entries that the list
lacks: `setup+: [module load gcc]` in a file, `launch.setup+='[module load gcc]'` as an argument.

`dtt config explain KEY` prints the same for one key or section; `dtt config show` prints the
configuration of a run, each value with its origin.
"""


def page() -> str:
    """Return the page docs/config.md: each key's type, default, meaning, and if it may change."""
    out = [HEAD, *_section(RunConfig, (), "Top level")]
    return "\n".join(out)


def _section(cls: type[Section], key: Key, title: str) -> list[str]:
    """Return a section with the table of its keys, followed by the sections below it."""
    rows: list[str] = []
    notes: list[str] = []
    deeper: list[str] = []
    holder = defaults(cls, key)
    for name, field in cls.model_fields.items():
        default = getattr(holder, name, None)
        held = variants(field) or items(field)
        for variant in held:
            inner = (*key, name)
            deeper += _section(variant, inner, _title(inner, variant, len(held), default))
        if not variants(field) and name != "type":
            entry = describe(cls, name, default)
            resume = "may change" if entry.resumable else "must stay"
            given = "must be given" if field.is_required() else f"`{scalar(plain(default))}`"
            meaning = entry.doc
            if len(meaning) > LONGEST_CELL:
                notes.append(f"- `{name}`: {meaning}")
                meaning = "see below"
            cells = (f"`{name}`", entry.type, given, resume, meaning)
            rows.append(f"| {' | '.join(cell.replace('|', BAR) for cell in cells)} |")
    out = [f"## {title}", "", " ".join((cls.__doc__ or "").split()), ""]
    if rows:
        header = "| key | type | default | on resume | meaning |"
        out += [header, "| --- | --- | --- | --- | --- |", *rows, ""]
    if notes:
        out += [*notes, ""]
    return out + deeper


def _title(key: Key, variant: type[Section], count: int, default: object) -> str:
    title = f"`{'.'.join(key)}`"
    if isinstance(default, tuple):
        of_type = f" with `type: {tag(variant)}`" if "type" in variant.model_fields else ""
        return f"An entry of {title}{of_type}"
    if count == 1:
        return title
    note = ", the default" if isinstance(default, variant) else ""
    return f"{title} with `type: {tag(variant)}`{note}"
