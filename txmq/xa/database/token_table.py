"""The fencing tokens of a database: one row for each home of the broker's cluster (``xa/fencing.py`` has the laws).

Table::

    <table>_token    home (16 hex digits, primary key), accepted (the newest that is known to be accepted there; empty:
                     none is), drawn (after that one)
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Final, NamedTuple

from txmq.errors import ConfigError
from txmq.xa.database.dbapi import Connection, is_integrity_error, run, text
from txmq.xa.database.marker_table import ROLLED_BACK, MarkerTable, own_transaction, reading

_SEEN_SIZE: Final = 500  # markers that are looked at in one statement


class TokenRow(NamedTuple):
    """What stands in the row of a home: the token that is known to be accepted, and the one drawn after it."""

    accepted: str = ""
    drawn: str = ""


class _MovedError(Exception):
    """Another resolver was faster."""


class TokenTable:
    """The statements. Has no connection of its own and keeps no state.

    Args:
        markers: the table that it goes with.
    """

    def __init__(self, markers: MarkerTable) -> None:
        self._markers, self._name, self._mark = markers, f"{markers.name}_token", markers.mark

    def statement(self) -> str:
        """What creates it if it is missing."""
        d = self._markers.dialect
        columns = f"home {d.text} NOT NULL PRIMARY KEY, accepted {d.text} NOT NULL, drawn {d.text} NOT NULL"
        return f"CREATE TABLE IF NOT EXISTS {self._name} ({columns}){d.table_options}"

    def row(self, connection: Connection, home: str) -> TokenRow:
        """The tokens of a home; empty ones if none was drawn. Outside any transaction.

        Raises:
            the driver's error: the table is missing.
        """
        with reading(connection, self._markers.dialect):
            statement = f"SELECT accepted, drawn FROM {self._name} WHERE home = {self._mark}"  # noqa: S608
            rows, _ = run(connection, statement, (home,))
        return TokenRow(*map(text, rows[0])) if rows else TokenRow()

    def draw(
        self, connection: Connection, home: str, before: TokenRow, after: TokenRow, rolled_back: Sequence[str] = ()
    ) -> bool:
        """Put other tokens in the place of ``before``. Own transaction.

        Args:
            rolled_back: transactions whose rolled-back markers this one sees.

        Returns:
            False if others stand there, nothing was done.

        Raises:
            ConfigError: it does not see such a marker: another database answers than a moment ago.
        """
        try:
            with own_transaction(connection, self._markers.dialect, self._markers.place):
                self._replace(connection, home, before, after)
                self._require(connection, rolled_back)
        except _MovedError:
            return False
        except Exception as error:
            if before == TokenRow() and is_integrity_error(error):
                return False
            raise
        return True

    def _replace(self, connection: Connection, home: str, before: TokenRow, after: TokenRow) -> None:
        m, name = self._mark, self._name
        if before == TokenRow():
            run(connection, f"INSERT INTO {name} (home, accepted, drawn) VALUES ({m}, {m}, {m})", (home, *after))  # noqa: S608
            return
        statement = (
            f"UPDATE {name} SET accepted = {m}, drawn = {m} "  # noqa: S608
            f"WHERE home = {m} AND accepted = {m} AND drawn = {m}"
        )
        _, count = run(connection, statement, (*after, home, *before))
        if count != 1:
            raise _MovedError

    def _require(self, connection: Connection, rolled_back: Sequence[str]) -> None:
        left = iter(rolled_back)
        while some := list(islice(left, _SEEN_SIZE)):
            marks = ", ".join([self._mark] * len(some))
            where = f"outcome = '{ROLLED_BACK}' AND txid IN ({marks})"
            ((count,),), _ = run(connection, f"SELECT COUNT(*) FROM {self._markers.name} WHERE {where}", some)  # noqa: S608
            if int(count) != len(some):
                raise ConfigError("another database answers than a moment ago: rolled-back markers are not there")
