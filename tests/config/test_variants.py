"""A variant of dtt is a class in a module, and a line in the table of variants: nothing more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

KIND = '''
from typing import ClassVar, Literal
from dtt.config.objective import Objective
from dtt.config.optim import Optimizer
from dtt.config.schedule import Schedule
from dtt.config.sources import OneSource

class Ramp(Schedule):
    """A ramp."""
    type: Literal["ramp"] = "ramp"
    slope: float = 1.0

class Still(Optimizer):
    """No steps."""
    type: Literal["still"] = "still"

class Nothing(Objective):
    """No loss."""
    type: Literal["nothing"] = "nothing"

class Counting(OneSource):
    """Ids that count."""
    mask_documents: ClassVar[bool] = False
    eod_mask_loss: ClassVar[bool] = False
    type: Literal["counting"] = "counting"
    top: int = 300
    """Number of different ids."""

    def open_samples(self, run):
        from dtt.data.samples.protocol import OpenedSource, Vocabulary
        from dtt.data.samples.synthetic_source import SyntheticSource, numbers_tokenizer
        path = numbers_tokenizer(self.top)
        samples = SyntheticSource(self.top, run.train.seq_len, run.seed)
        vocabulary = Vocabulary(path, "0", self.top, 0)
        return OpenedSource(samples, None, f"top {self.top}", vocabulary, None)
'''
USE = """
import sys
from dtt.config.variants import VARIANTS
VARIANTS["data"]["counting"] = "counting:Counting"
VARIANTS["schedule"]["ramp"] = "counting:Ramp"
VARIANTS["optim"]["still"] = "counting:Still"
VARIANTS["objective"]["nothing"] = "counting:Nothing"
from dtt.base.errors import ConfigError
from dtt.config import explain
from dtt.config.load import resolve
from support.random_configurations import FEATURES
chosen = ["schedule.type=ramp", "schedule.slope=2.0", "optim.type=still", "objective.type=nothing"]
found = resolve(None, ["data.type=counting", "data.top=400", "train.seq_len=32", *chosen], env={})
print(explain.explain("data", found.config, found.layer).count("data.top"))
assert explain.show(found).count("slope: 2.0") == 1
assert not {"numpy", "torch", "pyarrow"} & set(sys.modules)
try:
    resolve(None, ["data.type=counting", "data.vocab_size=400"], env={})
except ConfigError as error:
    print(error)
assert ("data.type=counting",) in FEATURES["data"]
from dtt.data.samples.dataset import open_dataset
dataset = open_dataset(found.config)
print(dataset.manifest.sources[0].key, dataset.manifest.vocab_size, dataset.steps)
print(dataset.read(dataset.order(0, 3)).ids.shape)
"""


def test_a_variant_is_its_module_and_a_line_in_the_table(tmp_path: Path) -> None:
    (tmp_path / "counting.py").write_text(KIND)
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[1]}"}
    done = subprocess.run([sys.executable, "-c", USE], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "data.vocab_size: is for data.type=synthetic, not counting" in done.stdout
    assert done.stdout.startswith("1\n")
    assert done.stdout.endswith("top 400 400 1000\n(3, 33)\n")
