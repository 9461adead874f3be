"""What was freed is handed out again without going back to the system in between."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource
from dtt.base import malloc

def touched():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytearray(2**28)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

touched()
by_default = touched()
malloc.keep_freed_memory()
touched()
print(by_default, touched())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc")
def test_pages_of_freed_memory_are_not_faulted_in_again() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True
    )
    by_default, kept = map(int, done.stdout.split())
    assert kept < 100 < by_default
