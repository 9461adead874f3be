"""`dtt config show | explain | schema`."""

from __future__ import annotations

import json
from collections.abc import Sequence

from dtt.base.errors import ConfigError
from dtt.base.terminal import Verbatim
from dtt.config import explain as keys
from dtt.config.load import resolve, stage_names
from dtt.config.run import RunConfig
from dtt.train.initial import model_of

STAGES = """\
stages
  Stages of training, in order: a list of sections, each with a name and any keys of this
  configuration, which overlay the common part. The job of a stage is NAME/STAGE; it starts from the
  final checkpoint of the previous stage. `stages.STAGE.KEY=VALUE` sets a key of one stage."""


def show(
    config: str | None, arguments: Sequence[str], dataset: str | None, stage: str | None = None
) -> None:
    """Print the resolved configuration, of all stages or of one, and the origin of each value."""
    options = {} if dataset is None else {"download.dataset": dataset}
    names = stage_names(config, arguments) if stage is None else ()
    found = [
        resolve(config, arguments, options, model_of=model_of, stage=name)
        for name in names or (stage,)
    ]
    text = keys.show_stages(found) if names else keys.show(found[0])
    print(Verbatim(text), end="")


def explain(key: str, config: str | None, stage: str | None = None) -> None:
    """Print the description of a key; raise ConfigError if there is no such key.

    Without `stage`, the values are those of the first stage, if the configuration has stages.
    """
    names = stage_names(config) if stage is None else ()
    resolved = resolve(config, stage=names[0] if names else stage)
    if key.split(".")[0] == "stages":
        print(STAGES)
        return
    text = keys.explain(key, resolved.config, resolved.layer)
    if text is None:
        close = keys.nearest(key)
        raise ConfigError(
            f"no key {key!r}",
            next=f"dtt config explain {close}" if close else "dtt config explain",
        )
    print(text)
    if names:
        print(f"  stage    {names[0]}; --stage NAME shows the value in another")


def schema() -> None:
    """Print the JSON schema of the configuration."""
    schema = RunConfig.model_json_schema()
    name = {"type": "string"}
    schema["properties"]["extends"] = {
        "description": "Configs that this one overrides: relative paths or shipped names.",
        "anyOf": [name, {"type": "array", "items": name}],
    }
    schema["properties"]["stages"] = {
        "description": " ".join(STAGES.split()[1:]),
        "type": "array",
        "items": {"type": "object", "required": ["name"]},
    }
    print(json.dumps(schema, indent=1))
