"""`dtt config show | explain`, and the page made from the same facts."""

from __future__ import annotations

from support.running import ROOT, Dtt

from dtt.config import explain
from dtt.config.base import field_docs
from dtt.config.load import resolve
from dtt.config.run import RunConfig


def test_every_key_is_documented() -> None:
    bare = [
        ".".join(key)
        for key, cls, name in explain.all_fields()
        if name != "type" and not field_docs(cls).get(name)
    ]
    assert bare == []


def test_show_is_a_config_that_resolves_to_itself(dtt: Dtt) -> None:
    shown = dtt("config", "show", "-c", "quickstart", "train.steps=70").stdout
    assert all(origin in shown for origin in ("quickstart.yaml:", "# argument", "# default"))
    (dtt.folder / "shown.yaml").write_text(shown)
    again = resolve(dtt.folder / "shown.yaml", env={}).config
    assert again == resolve("quickstart", ["train.steps=70"], env={}).config


def test_explain_prints_type_default_value_and_origin(dtt: Dtt) -> None:
    stdout = dtt("config", "explain", "train.steps", "-c", "quickstart").stdout
    assert "Optimizer steps of the whole run" in stdout
    assert "default  1000" in stdout
    assert "quickstart.yaml:" in stdout
    assert "optim.momentum" in dtt("config", "explain", "optim").stdout
    wrong = dtt("config", "explain", "train.stps", expect=2)
    assert "dtt config explain train.steps" in wrong.stderr


def test_explain_describes_the_selected_type(dtt: Dtt) -> None:
    (dtt.folder / "cosine.yaml").write_text("schedule: {type: cosine}")
    used = dtt("config", "explain", "schedule.floor", "-c", "cosine.yaml").stdout
    assert "default  0.1" in used
    unused = dtt("config", "explain", "schedule.decay", "-c", "cosine.yaml").stdout
    assert "not used" in unused
    assert (
        "type: cosine  (now)"
        in dtt("config", "explain", "schedule.type", "-c", "cosine.yaml").stdout
    )
    assert "project" in dtt("config", "explain", "track").stdout


def test_a_default_is_that_of_the_section_around_it() -> None:
    config = RunConfig()
    said = explain.explain("optim.adamw.lr", config, {})
    assert said is not None
    assert f"default  {config.optim.adamw.lr}" in said  # type: ignore[union-attr]


def test_the_reference_has_every_key_of_every_type() -> None:
    page = (ROOT / "docs/config.md").read_text()  # another test compares it with the code
    missing = [key for key, _, name in explain.all_fields() if f"`{name}`" not in page]
    assert [key for key in missing if key[-1] != "type" and key not in explain.sections()] == []
    for type_ in ("muon", "adamw", "wsd", "cosine", "bpe", "file", "wandb", "tensorboard"):
        assert f"with `type: {type_}`" in page
