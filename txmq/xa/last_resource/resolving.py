"""Values between a last resource and its resolver: a connection, and transactions that were left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from txmq.errors import BrokerError
from txmq.runtime.call_limits import CallLimit
from txmq.xa.database.connection_pool import close_connection
from txmq.xa.database.dbapi import is_integrity_error
from txmq.xa.database.marker_table import EXPIRED_SIZE, MarkerTable
from txmq.xa.database.token_table import TokenRow, TokenTable


def _nothing(_error: BrokerError | None = None) -> None:
    """Do nothing."""


class Unresolved(NamedTuple):
    """A transaction of this process whose end has yet to reach the broker."""

    txid: str
    outcome: str | None  # COMMITTED or ROLLED_BACK of ``marker_table``; None: the table must be asked
    deadline_ms: int
    on_resolved: Callable[[], None] = _nothing
    of: str | None = None  # the transaction of whose marker it is a part at another home
    on_contrary: Callable[[BrokerError], None] = _nothing  # ahead of ``on_resolved``: the broker's refusal

    @property
    def marker(self) -> str:
        """The transaction whose marker proves the outcome."""
        return self.of or self.txid


class ResolvingConnection(NamedTuple):
    """A connection of a resolver."""

    connection: Any
    table: MarkerTable
    uuid: str
    limit: CallLimit = CallLimit()  # without effect

    def is_duplicate(self, error: Exception) -> bool:
        """Whether an INSERT failed because the row is there."""
        return is_integrity_error(error)

    def token_row(self, home: str) -> TokenRow:
        """See ``Drawn``."""
        return TokenTable(self.table).row(self.connection, home)

    def draw_token(self, home: str, before: TokenRow, after: TokenRow, rolled_back: Sequence[str] = ()) -> bool:
        """See ``Drawn``."""
        return TokenTable(self.table).draw(self.connection, home, before, after, rolled_back)

    def committed_before(self, age_ms: int, after: str, limit: int) -> list[str]:
        """See ``Markers``."""
        return self.table.committed_before(self.connection, age_ms, after, limit)

    def delete_committed(self, txids: Sequence[str]) -> None:
        """See ``Markers``."""
        self.table.delete_committed(self.connection, txids)

    def delete_expired(self) -> bool:
        """Remove some rolled-back markers that are old enough; whether more may be left."""
        return self.table.delete_expired_rolled_back(self.connection) >= EXPIRED_SIZE

    def close(self) -> None:
        """End the session."""
        self.limit.end()
        close_connection(self.connection)
