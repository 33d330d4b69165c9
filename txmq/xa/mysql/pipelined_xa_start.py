"""XA START in one packet with the statement after it: a round trip less.

Theory of operation. The driver's connection gets another ``query``, and another ``send_query``, until one of the two is
called: for the first statement of the body, or for the end of a branch that has none. Cursors send all that they are
given by ``query``. The server answers XA START first, which is read here; the caller reads the answer to what it sent.
The server does nothing after a statement that fails.

In ``txmq.aio``, where each round trip is a turn of the connection's thread, that is 6 to 15 % of the processor time of
a transaction; with threads some 10 us (docs/benchmarks.md, "XA: what is left"). For connections that have answered a
moment ago, because one that the server has ended dooms the block that finds it out.

Invariants:
    * nothing is sent on the connection before XA START, and that is sent once;
    * a text that gives no answer after XA START, or that is long, is sent by itself: its own answer, or error, is what
      the caller gets in any case.
"""

from __future__ import annotations

from typing import Any, Final

from txmq.runtime.crashpoints import crash_point, is_armed

JOINED_SIZE_BYTES_MAX: Final = 64 << 10  # of what a packet of any server surely takes


class PipelinedStart:
    """See the module's docstring. Used by one thread at a time, as the connection is.

    Args:
        connection: the driver's own (mysqlclient), which takes several statements in one text.
        start: XA START with its xid.

    Attributes:
        is_sent: XA START was sent, whatever came of it.
        error: what was raised in place of its answer.
    """

    __slots__ = ("_connection", "_start", "error", "is_sent")

    def __init__(self, connection: Any, start: str) -> None:
        self._connection, self._start = connection, start
        self.is_sent = False
        self.error: Exception | None = None
        connection.query, connection.send_query = self.query, self.send_query

    def cancel(self) -> None:
        """Give the connection its own methods back."""
        added = vars(self._connection)
        added.pop("query", None)
        added.pop("send_query", None)

    def query(self, query: str | bytes | bytearray) -> None:
        """In place of the connection's."""
        if self.is_sent:  # a caller has kept this one, or an interrupt has left it
            self._send(query)
            return
        text = query.encode() if isinstance(query, str) else bytes(query)
        if is_armed() or len(text) > JOINED_SIZE_BYTES_MAX:
            self._begin(self._start)
            crash_point("client.xa.branch_started")
            self._send(query)
            return
        self._begin(b"%b; %b" % (self._start.encode("ascii"), text))
        if self._connection.next_result() != 0:
            self._send(query)

    def send_query(self, query: str | bytes) -> None:
        """In place of the connection's: its caller reads one answer."""
        if not self.is_sent:
            self._begin(self._start)
        type(self._connection).send_query(self._connection, query)

    def _begin(self, text: str | bytes) -> None:
        self.is_sent = True
        self.cancel()
        try:
            self._send(text)
        except Exception as error:
            self.error = error
            raise

    def _send(self, text: str | bytes | bytearray) -> None:
        type(self._connection).query(self._connection, text)
