"""A drainer that is called all the time (``pump``), beside the one that a resolver's rounds call.

It removes what is placed in the commit in which it numbers the next rows, and reads them there: one commit a page, in
two packets where the connection takes several statements in one. It keeps the turn until it gives it away.
"""

from __future__ import annotations

from typing import Any

from txmq.runtime.crashpoints import crash_point
from txmq.xa.database.outbox_series import OutboxRow
from txmq.xa.database.outbox_tables import OutboxTables
from txmq.xa.last_resource.drainer import IN_FLIGHT_BYTES_MAX, IN_FLIGHT_MAX, LEASE_MS, PAGE_SIZE_MAX, Agreed, Drainer
from txmq.xa.last_resource.resolving import ResolvingConnection


class TurnDrainer(Drainer):
    """See the module's docstring. Used by one thread at a time."""

    _is_at_end = False  # all that had numbers were sent
    _held_until = 0.0  # the turn is ours for longer
    _given = 0  # numbers, when they were compared

    @property
    def is_flying(self) -> bool:
        """Whether answers are to come, or rows to be taken away that were answered."""
        return bool(self._flying or self._drained)

    def turn(self, database: ResolvingConnection) -> int | None:
        """Send a page of what waits, if any does, and take the answers that come soon.

        Returns:
            How many rows were sent; None if another process has the turn.

        Raises: as ``round``.
        """
        try:
            return self._turn(database, self._outbox_of(database))
        except BaseException:
            self._land()
            raise

    def let_go(self, database: ResolvingConnection) -> None:
        """Leave the turn to others. Raises as ``round``."""
        if self._held_until:
            self._held_until = 0.0
            self._outbox_of(database).let_go(database.connection, self._state.holder)

    @property
    def has_turn(self) -> bool:
        """Whether it has the turn to drain, or had it."""
        return bool(self._held_until)

    def _turn(self, database: ResolvingConnection, outbox: OutboxTables) -> int | None:
        connection, state = database.connection, self._state
        self._count(connection, outbox)
        self._look_if_tripped(connection, outbox)
        if not (state.size.rows or self._flying or self._drained or outbox.has_waiting(connection)):
            return 0
        if not self._hold(connection, outbox):
            self._land()
            return None
        if not self._is_compared:
            self._compare(database, outbox)
        sent = self._send_next(connection, outbox)
        self._settle(connection, outbox)
        return sent

    def _hold(self, connection: Any, outbox: OutboxTables) -> bool:
        now = self._clock.monotonic()
        if now >= self._held_until:
            is_ours = outbox.hold(connection, self._state.holder, LEASE_MS)
            self._held_until = now + LEASE_MS / 2000 if is_ours else 0.0
        return bool(self._held_until)

    def _compare(self, database: ResolvingConnection, outbox: OutboxTables) -> Agreed:
        agreed = super()._compare(database, outbox)
        self._is_at_end, self._given = False, agreed.given
        return agreed

    def _send_next(self, connection: Any, outbox: OutboxTables) -> int:
        """As ``_send``, for ``turn``; how many."""
        if not (self._is_at_end or self._is_behind or outbox.numbered(connection, self._sent_through, 1, self.series)):
            self._is_at_end, self._sent_through = True, max(self._sent_through, self._given)
        may_take = self._is_at_end and not self._is_behind and not self._left_to_others()
        if may_take and (rows := self._take(connection, outbox)) is not None:
            is_next = not rows or rows[0].number == self._sent_through + 1
            most = self._session.request_size_bytes_max
            # Otherwise another drainer has numbered rows, too, which are first; or one is to be parked.
            self._is_at_end = is_next and all(len(row.batches) <= most for row in rows)
            if rows and rows[0].number <= self._sent_through:  # the database was restored: compared in the next turn
                self._land()
            elif rows and self._is_at_end:
                self._submit(rows)
                self._sent_through, self._page_size = rows[-1].number, min(2 * self._page_size, PAGE_SIZE_MAX)
            return len(rows)
        self._is_at_end, before = False, self._sent_through
        if not self._send(connection, outbox) and self._drained:  # they took the room
            self._delete(connection, outbox)
            self._send(connection, outbox)
        return self._sent_through - before

    def _take(self, connection: Any, outbox: OutboxTables) -> list[OutboxRow] | None:
        if self._drained:
            crash_point("client.outbox.answered")
        flying = self._flying
        # Rows beyond the numbers that may be given are not read: one that waits at the broker holds up all behind it.
        given = self._sent_through + 1 - flying[0].row.number if flying else 0
        room = max(min(self._page_size, IN_FLIGHT_MAX - given), 0)
        if sum(len(flight.row.batches) for flight in flying) > IN_FLIGHT_BYTES_MAX:
            room = 0
        rows = outbox.take(connection, self.series, room, self._drained)
        if self._drained:
            crash_point("client.outbox.deleted")
        self._removed()
        if rows:
            crash_point("client.outbox.numbered")
        return rows
