"""What every unit test gets: nothing of an earlier test goes on beside it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator

import pytest

from txmq.client.transaction import background_resolver
from txmq.client.transaction.background_resolver import BackgroundResolver

ENDED_S_MAX = 60.0


@pytest.fixture(autouse=True)
def no_resolver_outlives_its_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A client that is left open, as if its process had died, has a resolver that reaches points of the next test."""
    began: list[tuple[threading.Thread, weakref.ref[BackgroundResolver]]] = []

    def start_daemon(name: str, run: Callable[[], None]) -> None:
        thread = threading.Thread(target=run, name=name, daemon=True)
        began.append((thread, weakref.ref(run.__self__)))  # type: ignore[attr-defined]  # a method of the resolver
        thread.start()

    monkeypatch.setattr(background_resolver, "start_daemon", start_daemon)
    yield
    for thread, known in began:
        resolver = known()
        if resolver is not None and thread.is_alive():
            resolver.stop()
        del resolver
        thread.join(ENDED_S_MAX)
        assert not thread.is_alive(), f"{thread.name} goes on after its test"
