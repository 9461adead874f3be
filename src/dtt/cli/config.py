"""Commands of `dtt config`."""

from __future__ import annotations

from typing import Annotated

from dtt.cli.app import cli
from dtt.cli.options import Config, Dataset, Overrides, Stage, argument, resolve_each

config_cli = cli.group("config", "Inspect the configuration.")

STAGES = """\
stages
  Stages of training, in order: a list of sections, each with a name and any keys of this
  configuration, which overlay the common part. The job of a stage is NAME/STAGE; it starts from the
  final checkpoint of the previous stage. `stages.STAGE.KEY=VALUE` sets a key of one stage."""


@config_cli.command()
def show(
    overrides: Overrides = None, config: Config = None, dataset: Dataset = None, stage: Stage = None
) -> None:
    """Print the resolved configuration as YAML, with the origin of each value.

    Prints every stage of a configuration with stages of training, or the one that --stage names.
    """
    from dtt.base.terminal import Verbatim
    from dtt.config import explain as keys

    found = resolve_each(config, overrides, {"download.dataset": dataset}, stage=stage)
    stages = list(found.values())
    one = stage in found  # or a configuration without stages
    print(Verbatim(keys.show(stages[0]) if one else keys.show_stages(stages)), end="")


@config_cli.command()
def explain(
    key: Annotated[str, argument("[KEY]", "Dotted key or section; default: all sections.")] = "",
    config: Config = None,
    stage: Stage = None,
) -> None:
    """Describe a key: its meaning, type and value, in the first stage if there are several."""
    from dtt.base.errors import ConfigError
    from dtt.config import explain as keys
    from dtt.config.load import resolve, stage_names

    names = stage_names(config) if stage is None else ()
    resolved = resolve(config, stage=names[0] if names else stage)
    if key.split(".")[0] == "stages":
        print(STAGES)
        return
    text = keys.explain(key, resolved.config, resolved.layer)
    if text is None:
        close = keys.nearest(key)
        raise ConfigError(
            f"no key {key!r}", next=f"dtt config explain {close}" if close else "dtt config explain"
        )
    print(text)
    if names:
        print(f"  stage    {names[0]}; --stage NAME shows the value in another")
