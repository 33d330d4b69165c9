"""Finds a position at which no XA transaction is prepared: there a reader may begin that knows nothing of before.

Theory of operation. The rows of an XA transaction stand in the binlog at its prepare. A reader that begins between
prepare and XA COMMIT would have to publish rows that it has not read. So the binlog is read from a first position on. A
transaction that ends without having been prepared after that position was prepared at every position before its end.
The first position holds if there is none, and none is listed (XA RECOVER) that was prepared before. Else it is the
first one after the last of them at which all that was prepared has ended.

Invariant: the server writes prepare and end into its binlog before it lists what they say. So whoever lists first, and
then reads to the binlog's end, has the prepare of everything that is listed, and the end of everything that is not.
"""

from __future__ import annotations

from collections.abc import Iterable

from txmq.binlog.decoded_changes import TransactionPart, XaEnd, XaPrepare
from txmq.binlog.position import GtidSet, Position
from txmq.xid import xid_sql


class UnpreparedSearch:
    """See the module's docstring. No I/O.

    Args:
        first: no position before it is wanted.
    """

    def __init__(self, first: Position) -> None:
        self._found: Position | None = first
        self._prepared, self._open = set[str](), set[str]()
        self.read: GtidSet = first.gtid_set

    def take(self, part: TransactionPart) -> None:
        """The next part of the binlog."""
        self.read = part.gtids
        if isinstance(part.xa, XaPrepare):
            xid = xid_sql(part.xa.xid)
            self._prepared.add(xid)
            self._open.add(xid)
        elif isinstance(part.xa, XaEnd):
            xid = xid_sql(part.xa.xid)
            self._open.discard(xid)
            if xid not in self._prepared:
                self._found = None
            if self._found is None and not self._open:
                self._found = part.after

    def waits_for(self, listed: Iterable[str]) -> list[str]:
        """Those that must end before a position is found; none once it is.

        Args:
            listed: what was prepared before the last part was read.
        """
        earlier = [xid for xid in listed if xid not in self._prepared]
        return earlier or ([] if self._found is not None else sorted(self._open))

    @property
    def found(self) -> Position | None:
        """The position, if nothing is waited for."""
        return self._found
