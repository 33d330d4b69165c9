"""What of a sync can be audited: a spool that is not empty is waited for, and what keeps no order is not called so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from txmq.binlog.config import BinlogSettings, PublishSettings
from txmq.binlog.errors import BinlogError
from txmq.binlog.position import MariadbGtids, MysqlGtids, Position
from txmq.binlog.publish.published import Published, SpoolHeld
from txmq.errors import ConfigError
from txmq.spark.audit import binlog
from txmq.spark.audit.audit import InDoubt

SETTINGS = BinlogSettings(name="s")


class Clock:
    """Time passes by sleeping."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def held(messages: int | None) -> Published:
    """A position, with what waits in its spool."""
    spool = None if messages is None else SpoolHeld("here", "s.spool", messages)
    return replace(Published("id", Position("mariadb", "0-1-7")), spool=spool)


def asked(monkeypatch: pytest.MonkeyPatch, answers: Iterator[Published]) -> Published:
    """The position that is audited up to, after so many answers; waits for a second."""
    monkeypatch.setattr(binlog, "newest_published", lambda *_: next(answers))
    client: Any = None
    clock: Any = Clock()
    return binlog.sent(client, SETTINGS, clock, 1000)


@pytest.mark.parametrize("waiting", [[None], [0], [3, 3, 0]])
def test_position_counts_when_all_up_to_it_is_sent(waiting: list[int | None], monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(monkeypatch, iter([held(messages) for messages in waiting])) == held(waiting[-1])


def test_spool_that_does_not_empty_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BinlogError, match=r"3 events wait in the spool s\.spool of here"):
        asked(monkeypatch, iter([held(3)] * 100))


@pytest.mark.parametrize(
    ("listed", "waited_s"),
    [([[]], 0.0), ([["a", "b"], ["b", "c"], ["c"]], 0.4), ([["a"]] * 9, 1.0)],
    ids=["nothing", "until those of the beginning have ended", "no longer than is given"],
)
def test_what_is_in_doubt_at_first_is_waited_for(listed: list[list[str]], waited_s: float) -> None:
    clock, answers = Clock(), iter(listed)
    read: Any = SimpleNamespace(clock=clock, pending=lambda: [InDoubt(txid, 0, 0, "") for txid in next(answers)])
    binlog.wait_for_pending(read, 1000)
    assert clock.now == pytest.approx(waited_s)


def test_topic_of_which_too_much_was_removed_is_refused() -> None:
    binlog.refuse_removed("t", {0: (0, 0), 1: (0, 9)})
    with pytest.raises(ConfigError, match="retention has emptied partition 1 of t"):
        binlog.refuse_removed("t", {0: (2, 9), 1: (9, 9)})
    with pytest.raises(ConfigError, match="retention has removed messages of partition 0 of t"):
        binlog.refuse_removed("t", {0: (2, 9), 1: (0, 9)})


@pytest.mark.parametrize(
    ("by", "topic", "has_order"),
    [
        ("key", "{name}.{database}", True), ("table", "{name}.{database}.{table}", True),
        ("table", "{name}.{database}", False), ("transaction", "{name}.{database}.{table}", False),
    ],
)  # fmt: skip
def test_order_is_audited_where_a_key_has_one(by: str, topic: str, has_order: bool) -> None:
    assert binlog.is_ordered(replace(SETTINGS, publish=PublishSettings(by=by, topic=topic))) == has_order


def test_window_begins_behind_what_either_side_lacks() -> None:
    one, other = MariadbGtids.parse("0-1-7,1-2-3"), MariadbGtids.parse("0-9-5,1-2-4,2-1-1")
    assert str(binlog._joined(one, other)) == "0-1-7,1-2-4,2-1-1"
    assert binlog._joined(one, MariadbGtids.parse("0-1-6")) is one
    uuid = "3e11fa47-71ca-11e1-9e33-c80aa9429562"
    wider = MysqlGtids.parse(f"{uuid}:1-9")
    assert binlog._joined(MysqlGtids.parse(f"{uuid}:1-5"), wider) is wider
