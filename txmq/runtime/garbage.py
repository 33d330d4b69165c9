"""The door to Python's garbage collector, for a process that serves from a large heap."""

from __future__ import annotations

import gc
from typing import Final

_NEVER: Final = 1 << 30


def collect_young_only() -> None:
    """Have the collector look at young objects only from now on, not now and then at the whole heap.

    A walk over the whole heap holds the interpreter's lock for its length, which grows with what the process remembers
    (docs/benchmarks.md, "Stalls of the loop"). Objects that form a cycle and have grown old are never freed then, so
    what a process makes again and again must not be such: ``tests/unit/runtime/test_garbage.py`` holds that.
    """
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, _NEVER)
