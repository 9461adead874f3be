"""`dtt config show | explain | schema`."""

from __future__ import annotations

import json
from collections.abc import Sequence

from dtt.commands.begin import model_of
from dtt.config import explain as knobs
from dtt.config.load import resolve
from dtt.config.run import RunConfig
from dtt.errors import ConfigError


def show(config: str | None, arguments: Sequence[str], dataset: str | None) -> None:
    """Print the resolved configuration and the origin of each value."""
    options = {} if dataset is None else {"download.dataset": dataset}
    resolved = resolve(config, arguments, options, model_of=model_of)
    print(knobs.show(resolved.config, resolved.layer), end="")


def explain(key: str, config: str | None) -> None:
    """Print the description of a key; raise ConfigError if there is no such key."""
    resolved = resolve(config)
    text = knobs.explain(key, resolved.config, resolved.layer)
    if text is None:
        close = knobs.nearest(key)
        raise ConfigError(
            f"no key {key!r}",
            next=f"dtt config explain {close}" if close else "dtt config explain",
        )
    print(text)


def schema() -> None:
    """Print the JSON schema of the configuration."""
    schema = RunConfig.model_json_schema()
    name = {"type": "string"}
    schema["properties"]["extends"] = {
        "description": "Configs that lie below this one: paths beside it, or shipped ones by name.",
        "anyOf": [name, {"type": "array", "items": name}],
    }
    print(json.dumps(schema, indent=1))
