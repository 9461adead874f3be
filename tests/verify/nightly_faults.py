"""All planted faults: `./env.sh pytest -n 0 -s tests/verify/nightly_faults.py`, ten minutes."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.verify_faults import FAULTS, faulty_runs

from dtt.config.load import resolve
from dtt.verify import run


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_by_the_check_of_its_kind(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fault = FAULTS[name]
    cfg = resolve(None, fault.keys.split(), env={}).config
    letters = "DLGNURSX" if "X" in fault.checks else "DLGNURS"
    letters = letters if set("SX") & set(fault.checks) else "DLGNUR"
    case = faulty_runs(name, tmp_path / "case", cfg, letters)
    result = run.verify(name, cfg, case, parts=False)
    assert result.failed is not None, "not found"
    difference = result.found[result.failed].difference
    assert difference is not None
    with capsys.disabled():
        print(f"\n{name}: {difference.check}: {difference.describe()}")
    # A save compares the copies of ranks, and ends the run before verify compares anything.
    refused = difference.check == "run" and "are not the same on all ranks" in difference.what
    assert refused or difference.check in fault.checks
