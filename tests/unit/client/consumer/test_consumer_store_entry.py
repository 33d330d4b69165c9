"""A consumer enters its offset store once, and waits for one that does not answer."""

from __future__ import annotations

from typing import Any

import pytest

from tests.logged import said
from tools.simulated.clock import SimClock
from txmq.client.consumer.consumer import StoreEntry
from txmq.client.consumer.offsets.offset_store import NoOffsetStore
from txmq.errors import OffsetStoreAwayError, StorageError
from txmq.runtime.logging import get_logger


class Store(NoOffsetStore):
    """Raises what it was given, then lets consumers in."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.calls = list(errors), list[str]()
        self.then: Any = lambda: None

    def enter(self, group: str) -> None:
        """Count it."""
        self.calls.append(f"enter {group}")
        if self.errors:
            raise self.errors.pop(0)
        self.then()

    def leave(self, group: str) -> None:
        """Count it."""
        self.calls.append(f"leave {group}")


def entry(store: Store | None) -> StoreEntry:
    """Of a consumer of the group g."""
    return StoreEntry(store, "g", SimClock(), get_logger())


def test_store_that_is_away_is_told_once_and_entered_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    store = Store(OffsetStoreAwayError("no answer"), OffsetStoreAwayError("no answer"))
    entered = entry(store)
    assert [entered.enter() for _ in range(4)] == [False, False, True, True]
    assert store.calls == ["enter g"] * 3
    assert [(line["event"].partition(":")[0], line.get("error")) for line in said(caplog)] == [
        ("the offset store does not answer", "no answer"), ("the offset store is there", None),
    ]  # fmt: skip
    entered.leave()
    entered.leave()
    assert store.calls[3:] == ["leave g"]


def test_store_that_refuses_is_not_entered() -> None:
    store = Store(StorageError("no such table"))
    refused = entry(store)
    with pytest.raises(StorageError, match="no such table"):
        refused.enter()
    refused.leave()
    assert store.calls == ["enter g"]


def test_store_that_answers_after_the_end_is_left() -> None:
    store = Store()
    late = entry(store)
    store.then = late.leave
    assert late.enter() is False
    assert store.calls == ["enter g", "leave g"]


def test_broker_needs_no_entry() -> None:
    assert entry(None).enter() is True
