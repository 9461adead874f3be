"""Keys of earlier versions: ignored at their default, refused by name otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from dtt.base.errors import ConfigError
from dtt.config.explain import all_fields
from dtt.config.load import load_job, resolve
from dtt.config.removed import REMOVED, REMOVED_VALUES

VALUES = {
    "optim.cautious_weight_decay": True, "optim.ns_steps": 7, "guard.rewind_around": 5,
    "train.finish_by": "07:00", "train.remat_every": 2, "launch.lead_seconds": 300,
    "launch.nccl_logs": True, "guard.spike_sigmas": 5.0, "guard.max_skips": 3,
    "train.batch_schedule.lr_rule": "sqrt",
    "export.out": "out", "launch.nsys": True,
    "optim.groups.decay": "60%",
    "tokenize.local": "/scratch", "checkpoint.on_full": "wait", "launch.template": "a",
    "optim.ns_coefficients": "polar-express",
}  # fmt: skip
"""A value of each removed key that is not its default."""


def test_each_removed_key_is_tried_and_none_exists() -> None:
    assert {".".join(key) for key in REMOVED} == VALUES.keys()
    assert not {key for key, _, _ in all_fields()} & REMOVED.keys()


@pytest.mark.parametrize("key", VALUES)
def test_a_removed_key_is_refused_with_what_replaces_it_unless_it_has_its_default(
    key: str,
) -> None:
    default, instead = REMOVED[tuple(key.split("."))]
    listed = key.startswith("optim.groups.")

    def argument(value: Any) -> str:
        text = yaml.safe_dump(value).splitlines()[0]
        return f"optim.groups=[{{match: embed, decay: {text}}}]" if listed else f"{key}={text}"

    without = ["optim.groups=[{match: embed}]"] if listed else []
    expected = resolve(None, without, env={}).config
    assert resolve(None, [argument(default)], env={}).config == expected
    with pytest.raises(ConfigError) as error:
        resolve(None, [argument(VALUES[key])], env={})
    assert f"{key} no longer exists" in str(error.value)
    assert instead in str(error.value)
    _, alternative, replacement = instead.replace("'", "").rpartition(", or ")
    if alternative or "=" in instead:
        resolve(None, [replacement], env={})


@pytest.mark.parametrize(("key", "value"), REMOVED_VALUES)
def test_a_removed_value_is_refused_with_what_replaces_it(key: tuple[str, ...], value: str) -> None:
    *section, last = key
    given = f"{'.'.join(section)}={{{last}: {value}}}"
    with pytest.raises(ConfigError, match=f"{'.'.join(key)}={value} no longer exists") as error:
        resolve(None, [given], env={})
    instead = REMOVED_VALUES[key, value]
    assert instead in str(error.value)
    resolve(None, [instead.partition(", with")[0].replace("'", "")], env={})


def test_a_job_with_such_a_key_loads_if_it_has_its_default(tmp_path: Path) -> None:
    groups = "groups: [{match: embed, lr: 0.1, decay: null}]"
    (tmp_path / "config.yaml").write_text(
        f"optim: {{ns_steps: 5, {groups}}}\ntrain:\n  finish_by: null\n"
    )
    load_job(tmp_path)
    (tmp_path / "config.yaml").write_text(f"optim: {{{groups.replace('null', '60%')}}}\n")
    with pytest.raises(ConfigError, match="decay"):
        load_job(tmp_path)
    (tmp_path / "config.yaml").write_text("optim:\n  ns_steps: 7\n")
    with pytest.raises(ConfigError, match=r"ns_steps no longer exists(.|\n)*config\.yaml:2"):
        load_job(tmp_path)
