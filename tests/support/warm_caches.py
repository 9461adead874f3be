"""What a forked dtt would compute anew in each process, computed once by the server that forks.

This module is imported by the server (see `forked`), never by tests.
"""

from __future__ import annotations

import gc

from dtt.config.explain import key_types, sections

key_types()
sections()
# A collection in a process would touch all that was imported, and so copy the memory that it shares
# with the server: 0.3 s of CPU time.
gc.collect()
gc.freeze()
