"""What a forked dtt would compute anew in each process, computed once by the server that forks.

The documentation of keys is parsed from the source of 60 classes, and the types of keys follow from
their annotations: together a quarter of the CPU time of a short training run, whose report has
both. This module is imported by the server (see `forked`), never by tests.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

from dtt.config.base import Section, field_docs
from dtt.config.explain import key_types, sections


def classes(base: type[Section] = Section) -> Iterator[type[Section]]:
    """Yield all classes of sections that have been imported."""
    for cls in base.__subclasses__():
        yield cls
        yield from classes(cls)


for section in classes():
    field_docs(section)
key_types()
sections()
# A collection in a process would touch all that was imported, and so copy the memory that it shares
# with the server: 0.3 s of CPU time.
gc.collect()
gc.freeze()
