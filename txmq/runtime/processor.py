"""The door to the processor: whether others want it."""

from __future__ import annotations

import resource

_THREAD = getattr(resource, "RUSAGE_THREAD", None)  # Linux


def preemptions() -> int:
    """How often the system took the processor from the calling thread while it had work: for another thread, or
    because a quota was used up. Always 0 where the system does not say it.

    Source: getrusage(2), ``ru_nivcsw``.
    """
    return 0 if _THREAD is None else resource.getrusage(_THREAD).ru_nivcsw
