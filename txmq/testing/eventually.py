"""Wait in a test for something that another thread or process does, by looking again until a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable

WITHIN_S = 180.0  # many times what anything takes: a busy machine must not fail a test
_LOOK_AGAIN_S = 0.005


def eventually(
    condition: Callable[[], object],
    what: str | Callable[[], object],
    within_s: float = WITHIN_S,
    failure: Callable[[str], Exception] = AssertionError,
) -> None:
    """Return as soon as ``condition`` is true.

    Args:
        condition: is called again and again; what it raises is passed on.
        what: what is waited for, in words; a function is called only for the error.
        within_s: how long to wait.
        failure: makes the error of a wait that has failed.

    Raises:
        AssertionError: (or what ``failure`` makes) the condition did not become true in time.
    """
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise failure(f"not within {within_s:g} s: {what() if callable(what) else what}")
        time.sleep(_LOOK_AGAIN_S)
