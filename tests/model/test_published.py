"""The shipped models are what the config.json of the published ones says."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml

from dtt.config.model import ModelConfig
from dtt.config.shipped import shipped_configs
from dtt.model import families
from dtt.model.families import multimodal

LINES = Path(__file__).with_name("published.jsonl").read_text().splitlines()
"""A config.json as it is published, with the name of the shipped model, in each line."""
PUBLISHED: dict[str, dict[str, Any]] = {one.pop("name"): one for one in map(json.loads, LINES)}


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("version", ["as published", "as this transformers has it"])
def test_a_shipped_model_is_the_published_one(name: str, version: str) -> None:
    config = PUBLISHED[name]
    if version != "as published":
        built: Any = transformers.AutoConfig.for_model(**config)
        config = built.to_dict()
    text = (shipped_configs() / "models" / f"{name}.yaml").read_text()
    cfg = ModelConfig(**yaml.safe_load(text)["model"])
    family = families.get(cfg.family)
    found = dataclasses.replace(family.from_hf_config(multimodal.text_config(config)), dropout=0.0)
    assert found == family.architecture(cfg, cfg.vocab_size or 0, 1024)
