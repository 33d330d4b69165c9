"""Listeners: to return acknowledges, to raise retries, and who rejects does not acknowledge by returning."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from txmq.client.consumer_options import ConsumerOptions, ConsumerSettings
from txmq.client.failures import Failures
from txmq.client.listener import Listener
from txmq.client.share import Share
from txmq.client.tracker import Tracker
from txmq.model import Message
from txmq.runtime.logging import get_logger
from txmq.runtime.sim_clock import SimClock

SLOT = ("orders", 0)


class Letters:
    """What was buried."""

    def __init__(self) -> None:
        self.buried: list[int] = []

    def bury(self, message: Message, failures: int, reason: str) -> None:
        """One more."""
        self.buried.append(message.offset)


class Contents:
    """A retry store in memory, or none."""

    def __init__(self, *, is_kept: bool) -> None:
        self.is_kept = is_kept

    def update(self, message: Message, failures: int, reason: str) -> None:
        """It failed again."""

    def store(self, messages: list[Message], failures: int, reason: str) -> list[int | None] | None:
        """There is room."""
        return [None] * len(messages) if self.is_kept else None


class World:
    """A consumer with one message to take."""

    def __init__(self, max_retries: int, *, is_kept: bool) -> None:
        settings = ConsumerSettings("g", ("orders",), "earliest", max_retries, ConsumerOptions())
        client, log = SimpleNamespace(clock=SimClock()), get_logger()
        self.share, self.letters = Share(client, None, settings, log), Letters()
        self.share.aside = Contents(is_kept=is_kept)  # type: ignore[assignment]
        self.share.more, self.share.rejected = lambda: None, lambda _: False
        self.failures = Failures(self.share, self.letters, settings, client.clock, log)  # type: ignore[arg-type]
        self.tracker = self.share.trackers[SLOT] = Tracker(SLOT, 1, 0, 0)
        self.tracker.fetch = 1
        self.tracker.fetched(1, [Message("orders", 0, 0, b"k", b"v", {}, None, 0, None)])
        self.clock = client.clock

    def run(self, handle: Any) -> None:
        """Call a listener with one message."""

        def once(message: Message) -> None:
            self.share.is_closed = True
            handle(message)

        self.share.is_closed = False
        Listener(self.share, self.failures, self.clock, once).work()

    def reject(self, message: Message) -> None:
        """A listener that rejects, and returns."""
        self.failures.failed(message, "bad")


def test_what_a_listener_rejects_is_retried_and_not_acknowledged_by_its_return() -> None:
    world = World(1, is_kept=False)
    world.run(world.reject)
    assert (world.tracker.position, world.tracker.under_way, len(world.tracker.retries)) == (0, 1, 1)
    world.clock.advance(60.0)
    world.run(world.reject)
    assert (world.letters.buried, world.tracker.position) == ([0], 1)


def test_what_a_listener_rejects_stays_aside() -> None:
    world = World(0, is_kept=True)
    world.run(world.reject)
    assert (list(world.tracker.aside), world.tracker.position) == ([0], 1)
    world.clock.advance(600.0)
    world.run(world.reject)
    assert (list(world.tracker.aside), world.tracker.aside[0].failures) == ([0], 2)
    world.clock.advance(600.0)
    world.run(lambda _: None)
    assert world.tracker.aside == {}


@pytest.mark.parametrize("is_good", [True, False])
def test_to_return_acknowledges_and_to_raise_does_not(is_good: bool) -> None:
    world = World(1, is_kept=False)

    def handle(_: Message) -> None:
        if not is_good:
            raise ValueError

    world.run(handle)
    assert (world.tracker.position, len(world.tracker.retries)) == ((1, 0) if is_good else (0, 1))
