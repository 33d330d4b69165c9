"""The log of positions while the broker has given the reader up as gone."""

from __future__ import annotations

from typing import Any, cast

from tools.simulated.stand_in import StandIn
from txmq.binlog.config import BinlogSettings
from txmq.binlog.publish.position_log import PositionLog
from txmq.binlog.publish.published import GENESIS
from txmq.errors import UnknownGroupError, UnknownTopicError
from txmq.model import Message


class Group:
    """A group of which nothing is known at first: the broker was frozen for longer than its members may be silent."""

    def __init__(self) -> None:
        self.asked = 0
        self.assignment: list[tuple[str, int]] = []
        self.name = "reader"

    def describe(self, group: str) -> dict[str, Any]:
        self.asked += 1
        if not self.assignment:
            raise UnknownGroupError(f"no group {group!r} has members or saved offsets")
        return {"partitions": [{"topic": "positions", "owner": "reader", "offset": None}]}

    def poll(self, timeout: float) -> list[Message]:
        if self.asked < 2:
            return []
        self.assignment = [("positions", 0)]
        return [Message("positions", 0, 0, None, GENESIS, {}, None, 0, None)]


def _missing(topic: str) -> None:
    raise UnknownTopicError(topic)


def test_reader_that_was_given_up_joins_again_and_goes_on() -> None:
    group = Group()
    topics = StandIn(refresh=_missing, ensure=lambda *_, **__: None)
    client = StandIn(
        topics=topics, groups=group, consumer=lambda *_, **__: group, offsets=lambda *_: StandIn(end=1),
    )  # fmt: skip
    settings = cast("BinlogSettings", StandIn(
        name="shop", group="binlog-shop", position_topic="positions", parked_topic="parked",
        publish=StandIn(session_timeout_ms=1000),
    ))  # fmt: skip
    log = PositionLog(client, settings, lambda: False)
    assert log.take() is None  # the first message says that nothing was published
    assert group.asked >= 2
