"""What a MySQL branch makes of the answers to its last packet: which of them say that nothing is prepared."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from txmq.errors import HeuristicError, RolledBackError, TransactionError
from txmq.runtime.call_limits import CallLimit
from txmq.xa.database.dialects import MYSQL
from txmq.xa.database.marker_table import MarkerTable
from txmq.xa.mysql.branch import MySQLBranch
from txmq.xa.two_phase.resource_ports import PrepareUnknownError

MARKER, END, PREPARE = range(3)
TXID = "00000000000000c1-b1-1-1"


class Refused(Exception):
    """In place of a driver's error."""


class Connection:
    """Answers every statement with one row, up to the one that fails."""

    def __init__(self) -> None:
        self.left, self.error = 99, Refused()
        self.unread = 0
        self.texts: list[str] = []

    def query(self, text: str) -> None:
        """The first statement of a text."""
        self.texts.append(text)
        self.unread = text.count(";") + 1
        self._one()

    def next_result(self) -> int:
        """The following ones."""
        if self.unread == 0:
            return -1
        self._one()
        return 0

    def affected_rows(self) -> int:
        """Of the last one."""
        return 1

    def close(self) -> None:
        """Nothing to let go of."""

    def _one(self) -> None:
        self.left, self.unread = self.left - 1, self.unread - 1
        if self.left < 0:
            raise self.error


def branch_on(connection: Connection, *, is_packed: bool, has_key: bool = False) -> MySQLBranch:
    """A branch whose body is over."""
    table = MarkerTable("m", MYSQL, "%s")
    table.has_key = has_key
    session: Any = SimpleNamespace(
        connection=connection, table=table, server=SimpleNamespace(takes_packets=is_packed, connection_id=7),
    )  # fmt: skip
    resource: Any = SimpleNamespace(name="a", uuid="a" * 32, has_marker=True)
    branch = MySQLBranch(resource, session, TXID, 1, CallLimit(), is_own=False)
    branch.end_body()
    return branch


@pytest.mark.parametrize(
    ("fails_at", "code", "packed", "one_by_one"),
    [
        # the server's own refusal of what comes before XA PREPARE: it did nothing after it
        (END, 1397, HeuristicError, HeuristicError),
        (END, 1399, HeuristicError, HeuristicError),
        (MARKER, 1399, RolledBackError, RolledBackError),
        (MARKER, 1062, RolledBackError, RolledBackError),
        (MARKER, 1317, RolledBackError, RolledBackError),
        (END, 1614, RolledBackError, RolledBackError),
        (END, 4025, RolledBackError, RolledBackError),
        # no answer, or that of a session that has ended: whether the rest of the packet was carried out is not known
        (MARKER, 2006, PrepareUnknownError, RolledBackError),
        (MARKER, 2013, PrepareUnknownError, RolledBackError),
        (MARKER, 1927, PrepareUnknownError, RolledBackError),
        (END, 4031, PrepareUnknownError, RolledBackError),
        (END, 5014, PrepareUnknownError, RolledBackError),
        (END, None, PrepareUnknownError, RolledBackError),
        # XA PREPARE's own
        (PREPARE, 1402, RolledBackError, RolledBackError),
        (PREPARE, 1399, RolledBackError, RolledBackError),
        (PREPARE, 1180, PrepareUnknownError, PrepareUnknownError),
        (PREPARE, 2013, PrepareUnknownError, PrepareUnknownError),
    ],
)
@pytest.mark.parametrize(("is_packed", "has_key"), [(True, False), (True, True), (False, True)])
def test_only_the_servers_own_refusal_says_that_nothing_is_prepared(
    fails_at: int, code: int | None, packed: type[TransactionError], one_by_one: type[TransactionError],
    is_packed: bool, has_key: bool,
) -> None:  # fmt: skip
    connection = Connection()
    branch = branch_on(connection, is_packed=is_packed, has_key=has_key)
    connection.left, connection.error = fails_at, Refused(*([] if code is None else [code]), "why")
    with pytest.raises(TransactionError) as caught:
        branch.prepare()
    assert type(caught.value) is (packed if is_packed else one_by_one)
    assert caught.value.__cause__ is connection.error


@pytest.mark.parametrize(("is_packed", "has_key"), [(True, False), (True, True), (False, True)])
def test_what_is_answered_to_the_end_is_prepared(is_packed: bool, has_key: bool) -> None:
    connection = Connection()
    branch = branch_on(connection, is_packed=is_packed, has_key=has_key)
    connection.left = 3
    branch.prepare()
    assert (connection.left, connection.unread) == (0, 0)


@pytest.mark.parametrize("code", [1048, 1452])
def test_marker_kept_out_by_the_server_is_sent_with_conditions(code: int) -> None:
    connection = Connection()
    branch = branch_on(connection, is_packed=True, has_key=True)
    connection.left, connection.error = MARKER, Refused(code, "kept out")
    with pytest.raises(RolledBackError) as caught:
        branch.prepare()
    assert caught.value.__cause__ is connection.error
    kept_out, conditional = connection.texts[-2:]
    assert "VALUES" in kept_out
    assert "SELECT" in conditional
    assert "XA PREPARE" in kept_out
    assert "XA PREPARE" in conditional


@pytest.mark.parametrize("fails_at", [END, PREPARE])
def test_only_a_marker_kept_out_is_sent_again(fails_at: int) -> None:
    connection = Connection()
    branch = branch_on(connection, is_packed=True, has_key=True)
    sent = len(connection.texts)
    connection.left, connection.error = fails_at, Refused(1452, "of a later statement")
    with pytest.raises(TransactionError):
        branch.prepare()
    assert len(connection.texts) == sent + 1
