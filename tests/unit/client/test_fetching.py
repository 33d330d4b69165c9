"""Where a consumer goes on whose offset is out of range."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from txmq.client.fetching import Fetching
from txmq.client.tracker import Tracker
from txmq.model import PartitionRange
from txmq.runtime.logging import get_logger
from txmq.runtime.sim_clock import SimClock
from txmq.runtime.threads import Condition

SLOT = ("orders", 0)


@pytest.mark.parametrize(
    ("asked", "meanwhile", "expected"),
    [(10, 10, 50), (200, 200, 50), (10, 150, 150), (10, 60, 60)],
    ids=["retention passed it", "the log is another", "it went on past the end that was told", "it went on"],
)
def test_the_oldest_message_there_is_comes_next_unless_it_went_on_meanwhile(
    asked: int, meanwhile: int, expected: int
) -> None:
    tracker = Tracker(SLOT, 1, asked, asked)

    def offsets(*_: object) -> PartitionRange:
        if meanwhile != asked:
            tracker.skip_to(meanwhile)
        return PartitionRange(*SLOT, 50, 100)

    client = SimpleNamespace(clock=SimClock(), offsets=offsets)
    fetching = Fetching(client, None, Condition(), {SLOT: tracker}, 1 << 20)  # type: ignore[arg-type]
    fetching._log = get_logger()
    fetching._go_to_start(tracker, asked)
    assert (tracker.next_fetch, tracker.position) == (expected, expected)
