"""Whole lives of 300 random configurations. pytest runs it only when it is named:
`./env.sh pytest -n 0 -s tests/verify/nightly_lives.py`. It takes about an hour. CI has some.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from itertools import islice
from pathlib import Path

from support import lifecycle

COUNT = int(os.environ.get("LIVES", "300"))
SEED = int(os.environ.get("LIVES_SEED", "1"))


def test_what_the_check_accepts_works(tmp_path: Path) -> None:
    inputs: dict[str, Path] = {}
    refused: Counter[str] = Counter()
    broken: dict[str, str] = {}
    for number, (arguments, cfg) in enumerate(islice(lifecycle.draws(SEED), COUNT)):
        folder = tmp_path / "life"
        try:
            why = lifecycle.Life.of(cfg, folder, inputs).live()
            if why is not None:
                refused[why] += 1
            print(f"{number} {'ok' if why is None else 'refused: ' + why}  {arguments}", flush=True)
        except (AssertionError, Exception) as error:  # noqa: BLE001
            broken[arguments] = f"{type(error).__name__}: {error}"
            print(f"{number} BROKEN {arguments}\n    {broken[arguments]}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{COUNT - refused.total() - len(broken)} lived, {refused.total()} were refused")
    print("\n".join(f"{n} x {why}" for why, n in refused.items()))
    assert not broken
