"""A coroutine that is cancelled at one of its awaits."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from types import coroutine
from typing import Any, TypeVar

T = TypeVar("T")


@coroutine
def cancelled_at(work: Coroutine[Any, Any, T], number: int) -> Generator[Any, None, T]:
    """Run ``work`` as a task, which is cancelled when it waits for the ``number``-th time."""
    waits, error = 0, None
    while True:
        try:
            waits_for = work.send(None) if error is None else work.throw(error)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        waits += 1
        if waits == number:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
        error = None
        try:
            yield waits_for
        except BaseException as thrown:  # noqa: BLE001  goes on in ``work``
            error = thrown
