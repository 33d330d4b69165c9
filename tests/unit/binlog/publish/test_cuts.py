"""Cuts say in which order the partitions of a topic have their messages."""

from __future__ import annotations

import pytest

from txmq.binlog.event_json import read_cut
from txmq.binlog.publish import cuts
from txmq.binlog.publish.cuts import Cuts
from txmq.binlog.publish.gathering import Outgoing


def message(partition: int, topic: str = "t", op: bytes = b"c") -> Outgoing:
    """A message without a cut."""
    return topic, partition, b"k", b"v", (("txmq.op", op),), 0


def cuts_of(messages: list[Outgoing]) -> list[str]:
    """The cut of each message; nothing for none."""
    return [dict(headers).get("txmq.cut", b"").decode() for _, _, _, _, headers, _ in messages]


def begun(*ends: int) -> Cuts:
    """Cuts of topics that end there."""
    return Cuts(lambda _: list(ends), "parked")


def test_last_message_of_each_partition_has_the_cut() -> None:
    made = begun(5, 0, 7)
    assert cuts_of(made.marked([message(0), message(2), message(0)])) == ["", "7,0,8", "7,0,8"]
    assert cuts_of(made.marked([message(1)])) == ["7,1,8"]
    assert made.of(["t", "u"]) == {"t": [7, 1, 8]}


def test_topics_are_counted_apart() -> None:
    assert cuts_of(begun(0).marked([message(0), message(0, "u"), message(0)])) == ["", "1", "2"]


def test_parked_changes_have_no_cut() -> None:
    assert cuts_of(begun(0).marked([message(0, "parked")])) == [""]


def test_statement_is_in_a_slice_without_changes() -> None:
    batch = [message(0), message(0, op=b"ddl"), message(1, op=b"ddl"), message(1), message(0, op=b"t")]
    assert cuts_of(begun(0, 0).marked(batch)) == ["1,0", "2,1", "2,1", "2,2", "3,2"]


@pytest.mark.parametrize("bound", ["SLICE_ROWS_MAX", "SLICE_BYTES_MAX"])
def test_slices_are_bounded(monkeypatch: pytest.MonkeyPatch, bound: str) -> None:
    monkeypatch.setattr(cuts, bound, 2)  # a message has one byte
    assert cuts_of(begun(0, 0).marked([message(0), message(1), message(0)])) == ["1,1", "1,1", "2,1"]


def test_header_that_is_no_cut_is_known() -> None:
    assert read_cut(b"12,0") == (12, 0)
    assert [read_cut(header) for header in (b"", b"1,", b"-1", b"one", b"1" * 20)] == [None] * 5
