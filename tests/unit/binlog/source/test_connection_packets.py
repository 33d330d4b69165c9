"""Packets of the connection: cut anywhere, joined, ended, refused."""

from __future__ import annotations

import pytest

from txmq.binlog.errors import SourceAwayError, SourceError
from txmq.binlog.source import connection
from txmq.binlog.source.connection import Packets


def packet(payload: bytes, number: int = 0) -> bytes:
    return len(payload).to_bytes(3, "little") + bytes([number]) + payload


def error(code: int, text: str) -> bytes:
    return packet(b"\xff" + code.to_bytes(2, "little") + b"#HY000" + text.encode())


def events(made: Packets) -> list[bytes]:
    return list(iter(made.next, None))


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 100])
def test_events_come_whole_however_the_bytes_are_cut(size: int) -> None:
    wanted = [b"one", b"", b"x" * 300, b"last"]
    data = b"".join(packet(b"\0" + event) for event in wanted)
    made, found = Packets(), []
    for start in range(0, len(data), size):
        made.feed(data[start : start + size])
        found += events(made)
    assert found == wanted


def test_an_event_of_several_packets_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_FULL", 10)
    made = Packets()
    made.feed(packet(b"\0" + b"a" * 9) + packet(b"b" * 10, 1) + packet(b"", 2) + packet(b"\0next"))
    assert events(made) == [b"a" * 9 + b"b" * 10, b"next"]


def test_an_event_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_FULL", 10)
    monkeypatch.setattr(connection, "EVENT_BYTES_MAX", 25)
    made = Packets()
    made.feed(packet(b"\0" + b"a" * 9) + packet(b"b" * 10, 1) + packet(b"c" * 10, 2))
    with pytest.raises(SourceError, match="more than 25 bytes"):
        made.next()


@pytest.mark.parametrize(
    "text",
    [
        "Could not find first log file name in binary log index file; purged",
        "Could not find GTID state requested by slave in any binlog files. Probably the slave state is too old",
    ],
)
def test_a_purged_position_asks_for_a_snapshot(text: str) -> None:
    made = Packets()
    made.feed(error(1236, text))
    with pytest.raises(SourceError, match="begin anew with a snapshot"):
        made.next()


def test_other_reasons_of_the_server_are_told() -> None:
    made = Packets()
    made.feed(error(1236, "bogus data in log event"))
    with pytest.raises(SourceError, match="bogus data in log event"):
        made.next()


@pytest.mark.parametrize("data", [error(1053, "Server shutdown in progress"), packet(b"\xfe\0\0\0\0"), packet(b"")])
def test_an_end_of_the_stream_is_the_server_away(data: bytes) -> None:
    made = Packets()
    made.feed(data)
    with pytest.raises(SourceAwayError, match="has ended the stream"):
        made.next()
