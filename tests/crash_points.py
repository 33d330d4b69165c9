"""What happens in a test when its own process reaches a crash point."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from txmq.runtime import crashpoints
from txmq.runtime.crashpoints import SimulatedCrash


@contextmanager
def hooked(hook: Callable[[str], None]) -> Iterator[None]:
    """Call ``hook(name)`` at each point."""
    crashpoints.set_hook(hook)
    try:
        yield
    finally:
        crashpoints.set_hook(None)


@contextmanager
def at_moment(point: str, work: Callable[[], object]) -> Iterator[None]:
    """Do something once, the first time a point is reached."""
    todo = [work]

    def hook(name: str) -> None:
        if name == point and todo:
            todo.pop()()

    with hooked(hook):
        yield


@contextmanager
def at_point(point: str, error: BaseException, nth: int = 1) -> Iterator[list[str]]:
    """Raise ``error`` when a point is reached the nth time; yields the points reached."""
    reached: list[str] = []

    def hook(name: str) -> None:
        reached.append(name)
        if name == point and reached.count(name) == nth:
            raise error

    with hooked(hook):
        yield reached


@contextmanager
def crash_at(point: str) -> Iterator[list[str]]:
    """The process dies at a point."""
    with at_point(point, SimulatedCrash(point)) as reached:
        yield reached
