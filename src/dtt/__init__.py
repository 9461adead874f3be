"""Distributed Transformer Training: from raw text to a released checkpoint.

`import dtt` is light: a name of its interface is loaded at its first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtt.config.action import Action as Action
    from dtt.config.model import Family as Family
    from dtt.config.objective import Objective as Objective
    from dtt.config.optim import Optimizer as Optimizer
    from dtt.config.schedule import RunFacts as RunFacts
    from dtt.config.schedule import Schedule as Schedule
    from dtt.config.sources import Documents as Documents
    from dtt.config.sources import Rows as Rows
    from dtt.config.sources import Source as Source
    from dtt.library import Job as Job
    from dtt.library import evaluate as evaluate
    from dtt.library import export as export
    from dtt.library import generate as generate
    from dtt.library import load as load
    from dtt.library import load_model as load_model
    from dtt.library import open_job as open_job
    from dtt.library import train as train

__version__ = "0.1.0"

INTERFACE = {
    "Action": "dtt.config.action",
    "Context": "dtt.model.token_context",
    "Documents": "dtt.config.sources",
    "Family": "dtt.config.model",
    "Job": "dtt.library",
    "MicroBatch": "dtt.data.samples.loader",
    "Model": "dtt.model.contract",
    "Objective": "dtt.config.objective",
    "Optimizer": "dtt.config.optim",
    "Param": "dtt.params.table",
    "Params": "dtt.params.table",
    "Rows": "dtt.config.sources",
    "RunFacts": "dtt.config.schedule",
    "RunView": "dtt.train.actions.action",
    "Schedule": "dtt.config.schedule",
    "Source": "dtt.config.sources",
    "StepView": "dtt.train.actions.action",
    "evaluate": "dtt.library",
    "export": "dtt.library",
    "generate": "dtt.library",
    "load": "dtt.library",
    "load_model": "dtt.library",
    "open_job": "dtt.library",
    "train": "dtt.library",
}
"""Names that `import dtt` offers, with their modules: they stay, as others build on them."""


def __getattr__(name: str) -> Any:
    if name not in INTERFACE:
        raise AttributeError(f"module 'dtt' has no attribute {name!r}")
    return getattr(importlib.import_module(INTERFACE[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *INTERFACE})
