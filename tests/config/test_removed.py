"""Keys of earlier versions: ignored at their default, refused by name, converted in a job."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from dtt.base.errors import ConfigError
from dtt.config.explain import all_fields
from dtt.config.load import load_job, resolve
from dtt.config.removed import REMOVED

VALUES = {"optim.cautious_weight_decay": True, "optim.ns_steps": 7}
"""A value of each removed key that is not its default."""


def test_each_removed_key_is_tried_and_none_exists() -> None:
    assert {".".join(key) for key in REMOVED} == VALUES.keys()
    assert not {key for key, _, _ in all_fields()} & REMOVED.keys()


@pytest.mark.parametrize("key", VALUES)
def test_a_removed_key_is_refused_with_what_replaces_it_unless_it_has_its_default(
    key: str, tmp_path: Path
) -> None:
    removed = REMOVED[tuple(key.split("."))]
    default = yaml.safe_dump(removed.default).split("\n")[0]
    assert resolve(None, [f"{key}={default}"], env={}).config == resolve(None, env={}).config
    with pytest.raises(ConfigError) as error:
        resolve(None, [f"{key}={yaml.safe_dump(VALUES[key]).splitlines()[0]}"], env={})
    assert f"{key} no longer exists" in str(error.value)
    assert removed.next in str(error.value)
    replacement = removed.next.rpartition(", or ")[2].replace("'", "")
    resolve(None, [replacement], env={})


def test_a_job_that_was_cautious_stays_cautious_in_all_groups_of_muon(tmp_path: Path) -> None:
    entries = [
        {"match": "layers.0.*.weight", "weight_decay": 0.3},
        {"match": "embed.weight", "optimizer": "adamw", "weight_decay": 0.2},
        {"match": "head.weight", "lr": 0.1},
    ]
    optim = {"weight_decay": 0.1, "cautious_weight_decay": True, "groups": entries}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"optim": optim}))
    found = load_job(tmp_path).optim
    assert found.weight_decay == "cautious 0.1"
    assert [entry.weight_decay for entry in found.groups] == ["cautious 0.3", 0.2, None]
    optim |= {"cautious_weight_decay": False, "ns_steps": 5}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"optim": optim}))
    assert load_job(tmp_path).optim.weight_decay == 0.1
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"optim": {"ns_steps": 7}}))
    with pytest.raises(ConfigError, match=r"ns_steps no longer exists(.|\n)*config\.yaml:2"):
        load_job(tmp_path)
