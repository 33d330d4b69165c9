"""Where a first reader begins, with XA transactions of a server that goes on meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from tests.services.binlog.scripted import DOMAIN, SERVER, TABLES, Script, ScriptedSource, part
from tools.simulated.clock import SimClock
from tools.simulated.stand_in import AnyClass
from txmq.binlog import reader
from txmq.binlog.decoded_changes import RowChange, TransactionPart, XaEnd, XaPrepare
from txmq.binlog.position import Position
from txmq.binlog.reader import BinlogReader
from txmq.xid import Xid, xid_sql

A, B = Xid(1, b"a", b""), Xid(1, b"b", b"")
END_A, END_B = XaEnd(A, True), XaEnd(B, False)
ROW = [RowChange("c", TABLES[0], None, (1, "v"))]


class BusyServer(ScriptedSource):
    """A server whose binlog grows while it is asked which XA transactions are prepared.

    Args:
        parts: the binlog, a transaction each.
        ends: how many of them it has; each later one from the next ``prepared`` on.
    """

    def __init__(self, parts: list[TransactionPart], ends: list[int]) -> None:
        script = Script(1, 0)
        script.transactions = [[one] for one in parts]
        super().__init__(script, lambda: None)
        self._parts, self._ends = parts, ends

    def current_position(self) -> Position:
        return Position("mariadb", f"{DOMAIN}-{SERVER}-{self._ends[0]}")

    def prepared(self) -> list[str]:
        if len(self._ends) > 1:
            self._ends.pop(0)
        held = [one.xa for one in self._parts[: self._ends[0]] if one.xa is not None]
        ended = {xa.xid for xa in held if isinstance(xa, XaEnd)}
        return [xid_sql(xa.xid) for xa in held if xa.xid not in ended]


class Taken(AnyClass):
    """A publisher that keeps what it is given."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.parts: list[TransactionPart] = []
        self.snapshot = None

    def open(self) -> None:
        """Nothing was published before."""

    def begin(self, position: Position, snapshot: Any = None) -> None:
        """See ``BatchingPublisher``."""
        assert snapshot is None
        self.begun.append(position.gtids)

    def publish(self, one: TransactionPart) -> None:
        """See ``BatchingPublisher``."""
        self.parts.append(one)

    def refuse_failed(self) -> None:
        """See ``BatchingPublisher``."""

    def close(self) -> None:
        """See ``BatchingPublisher``."""


@pytest.mark.parametrize(
    ("parts", "ends", "begins"),
    [
        ([part(1), part(2, ROW, xa=XaPrepare(A)), part(3, xa=END_A), part(4, ROW)], [2, 3], 3),
        ([part(1), part(2, ROW, xa=XaPrepare(A)), part(3, xa=END_A), part(4, ROW)], [1, 3], 1),
        ([part(1, xa=XaPrepare(A)), part(2, xa=XaPrepare(B)), part(3, xa=END_A), part(4, xa=END_B)], [1, 1, 3, 4], 4),
        ([part(1), part(2, ROW), part(3, ROW), part(4)], [2, 3], 2),
    ],
    ids=["ends while it is listed", "begins and ends meanwhile", "ends while another is prepared", "is of no XA"],
)
def test_now_is_a_position_at_which_nothing_is_prepared(
    parts: list[TransactionPart], ends: list[int], begins: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "LISTED_S", 0.0)
    monkeypatch.setattr(reader, "PREPARED_S", 0.0)
    taken = Taken()
    reading = BinlogReader(lambda: source, SimClock())
    source = BusyServer(parts, ends)
    source._ended = reading.stop
    reading.run(taken)
    assert taken.begun == [f"{DOMAIN}-{SERVER}-{begins}"]
    assert taken.parts == parts[begins:]
