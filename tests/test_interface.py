"""What `import dtt` promises: these names, and no slow import before one of them is used."""

from __future__ import annotations

import subprocess
import sys

import dtt

PROMISED = {
    "Action", "Context", "Documents", "Family", "MicroBatch", "Model", "Objective",
    "Optimizer", "Param", "Params", "Rows", "RunFacts",
    "RunView", "Schedule", "Source", "StepView",
    "Job", "evaluate", "export", "generate", "load", "load_model", "open_job", "train",
}  # fmt: skip


def test_the_interface_has_its_promised_names() -> None:
    assert set(dtt.INTERFACE) == PROMISED
    assert set(dir(dtt)) >= PROMISED
    assert all(callable(getattr(dtt, name)) for name in PROMISED)


def test_the_import_is_light_and_so_is_a_configuration_with_an_own_schedule() -> None:
    script = (
        "import sys, dtt; light = {'pydantic', 'torch', 'numpy'} & sys.modules.keys()\n"
        "class Mine(dtt.Schedule): pass\n"
        "print(sorted(light), sorted({'torch', 'numpy'} & sys.modules.keys()))"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout
    assert said.split() == [b"[]", b"[]"]
