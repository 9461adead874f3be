"""Every command of cli.md runs as it is printed.

`./env.sh pytest -n 0 tests/e2e/nightly_cli_page.py`
"""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e.test_pages import prepared, run_page  # noqa: F401  (a fixture)
from support.loopback_hub import LoopbackHub


@pytest.mark.timeout(1200)
def test_every_command_of_the_page_runs_as_printed(
    prepared: tuple[Path, LoopbackHub],  # noqa: F811
    tmp_path: Path,
) -> None:
    run_page("cli.md", prepared, tmp_path / "here")
