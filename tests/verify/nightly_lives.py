"""Whole lives of 300 random configurations. pytest runs it only when it is named:
`./env.sh pytest -n 0 -s tests/verify/nightly_lives.py`. It takes an hour on two free cores.
LIVES=20 LIVES_SEED=7 runs others. CI has some.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
from support import lifecycle

COUNT = int(os.environ.get("LIVES", "300"))
SEED = int(os.environ.get("LIVES_SEED", "1"))


@pytest.mark.timeout(0)
def test_what_the_check_accepts_works(tmp_path: Path) -> None:
    inputs: dict[str, Path] = {}
    refused: Counter[str] = Counter()
    broken = 0
    for number, (arguments, cfg) in enumerate(islice(lifecycle.draws(SEED), COUNT)):
        folder = tmp_path / "life"
        try:
            why = lifecycle.Life.of(cfg, folder, inputs).live()
            refused[why or ""] += 1
            print(f"{number} {'lived' if why is None else 'refused: ' + why}  {arguments}")
        except Exception as error:  # noqa: BLE001  all are printed
            broken += 1
            print(f"{number} broken: {type(error).__name__}: {error}\n  {arguments}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{refused.pop('', 0)} lived, {refused.total()} were refused, {broken} are broken")
    print("\n".join(f"{count} x {why}" for why, count in refused.items()))
    assert not broken
