"""Random configurations, of which each layout computes what one process does.

pytest runs it only when it is named: `MINUTES=60 SEED=7 ./env.sh pytest -n 0 -s
tests/verify/nightly_random.py`. CI has a minute of it.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest
from support.random_configurations import configurations

from dtt.verify import run
from dtt.verify.layout_runs import CannotRun, LayoutRuns
from dtt.verify.shrink import shrink

SEED = int(os.environ.get("SEED", "1"))
MINUTES = float(os.environ.get("MINUTES", "1"))


@pytest.mark.timeout(0)
def test_random_configurations_compute_what_one_process_does(tmp_path: Path) -> None:
    """Each is compared on one layout; every third also resumes, and every ninth is exported."""
    end = time.monotonic() + 60 * MINUTES
    done, refused = 0, 0
    noise: dict[str, float] = {}
    for number, (arguments, cfg) in enumerate(configurations(SEED)):
        if time.monotonic() > end:
            break
        checks = run.LETTERS[: 8 if number % 9 == 0 else 7 if number % 3 == 0 else 6]
        shutil.rmtree(tmp_path / "case", ignore_errors=True)
        try:
            case = LayoutRuns(tmp_path / "case", shrink(cfg), checks)
            result = run.verify(arguments, cfg, case, parts=False)
        except CannotRun as error:
            print(f"{number} refused: {error}  {arguments}")
            refused += 1
            continue
        if result.failed is not None:
            raise run.explain(result, tmp_path)
        print(f"{number} verified  {arguments}", flush=True)
        done += 1
        for one in result.found.values():
            for letter, size in one.noise.items():
                noise[letter] = max(size, noise.get(letter, 0.0))
    print(f"{done} verified, {refused} refused by dtt, largest differences {noise}")
    assert done
