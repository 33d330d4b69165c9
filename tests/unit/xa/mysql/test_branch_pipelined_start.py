"""XA START in one packet with the first statement: what the connection gets, and what is known of the branch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tools.simulated.clock import SimClock
from txmq.errors import RolledBackError
from txmq.runtime.call_limits import CallLimit
from txmq.testing.eventually import eventually
from txmq.xa.database.dialects import MYSQL
from txmq.xa.database.marker_table import MarkerTable
from txmq.xa.database.strand_connection import ThreadConnection
from txmq.xa.mysql.branch import JOINED_SIZE_BYTES_MAX, MySQLBranch, PipelinedStart
from txmq.xa.two_phase.resource_ports import PrepareUnknownError

START = "XA START 'x'"


class Refused(Exception):
    """In place of a driver's error."""


class Connection:
    """A driver's: notes texts; ``answers`` says how many statements of a text are answered, ``error`` what fails."""

    def __init__(self) -> None:
        self.texts: list[Any] = []
        self.asked: list[Any] = []
        self.answers, self.is_closed = 99, False
        self.error: Refused | None = None
        self.fails_at = 0
        self.unread = 0

    def query(self, text: Any) -> None:
        """The first statement of a text."""
        self.texts.append(text)
        self.unread = (text if isinstance(text, str) else text.decode()).count(";")
        self._one()

    def send_query(self, text: Any) -> None:
        """Its answer must be read."""
        self.asked.append(text)

    def next_result(self) -> int:
        """The following ones."""
        if self.unread == 0 or self.answers == 0:
            return -1
        self.unread -= 1
        self._one()
        return 0

    def affected_rows(self) -> int:
        """Of the last one."""
        return 1

    def close(self) -> None:
        """Note it."""
        self.is_closed = True

    def _one(self) -> None:
        self.answers -= 1
        if self.error is not None and self.fails_at == 0:
            raise self.error
        self.fails_at -= 1


def fails(connection: Connection, at: int, code: int) -> None:
    """One of the next answers is a refusal."""
    connection.fails_at, connection.error = at, Refused(code, "why")


def branch_on(connection: Any, given_back: list[Any]) -> MySQLBranch:
    """A branch that starts late."""
    table = MarkerTable("m", MYSQL, "%s")
    table.has_key = True
    server = SimpleNamespace(takes_packets=True, connection_id=7)
    session: Any = SimpleNamespace(connection=connection, table=table, server=server, committed_at=0.0)
    resource: Any = SimpleNamespace(
        name="a", uuid="a" * 32, has_marker=True, clock=SimClock(), give_back=given_back.append
    )
    return MySQLBranch(resource, session, "00000000000000c1-b1-1-1", 1, CallLimit(), is_own=True, pipelines_start=True)


@pytest.mark.parametrize("text", ["INSERT 1", b"INSERT 1", bytearray(b"INSERT 1")])
def test_first_statement_takes_it_along_and_others_go_alone(text: Any) -> None:
    connection = Connection()
    PipelinedStart(connection, START)
    assert connection.texts == []
    for _ in range(2):
        connection.query(text)
    assert connection.texts == [b"XA START 'x'; INSERT 1", text]
    assert (connection.unread, vars(connection).keys() & {"query", "send_query"}) == (0, set())


def test_results_behind_the_first_statement_are_left_to_its_sender() -> None:
    connection = Connection()
    PipelinedStart(connection, START)
    connection.query("INSERT 1; INSERT 2")
    assert (connection.unread, connection.next_result(), connection.next_result()) == (1, 0, -1)


def test_a_text_that_is_no_statement_is_answered_for_itself() -> None:
    connection = Connection()
    PipelinedStart(connection, START)
    connection.answers = 1
    connection.query("-- nothing")
    assert connection.texts[1:] == ["-- nothing"]


def test_a_long_text_goes_alone() -> None:
    connection, text = Connection(), "I" * (JOINED_SIZE_BYTES_MAX + 1)
    PipelinedStart(connection, START)
    connection.query(text)
    assert connection.texts == [START, text]


def test_it_goes_in_front_of_what_is_sent_without_waiting() -> None:
    connection = Connection()
    late = PipelinedStart(connection, START)
    for _ in range(2):
        late.send_query("SELECT 1")
    assert (connection.texts, connection.asked) == ([START], ["SELECT 1", "SELECT 1"])
    late.query("SELECT 2")
    assert connection.texts == [START, "SELECT 2"]


def test_branch_that_was_never_used_ends_without_a_statement() -> None:
    connection, given_back = Connection(), list[Any]()
    branch = branch_on(connection, given_back)
    assert branch.roll_back(prepared=False)
    connection.query("of the next one")
    assert (connection.texts, len(given_back)) == (["of the next one"], 1)
    assert not branch.ended_by_body


def test_connection_whose_first_call_was_abandoned_is_not_reused() -> None:
    connection, given_back = Connection(), list[Any]()
    there = ThreadConnection(lambda: connection)
    branch = branch_on(there, given_back)
    there.is_left = True  # its task was cancelled; the thread has yet to make the call
    assert branch.roll_back(prepared=False)
    assert given_back == []
    eventually(lambda: connection.is_closed, "the connection is closed")


def test_branch_without_statement_begins_with_the_packet_that_prepares_it() -> None:
    connection, given_back = Connection(), list[Any]()
    branch = branch_on(connection, given_back)
    branch.end_body()
    branch.prepare()
    assert branch.commit()
    assert [str(text).count("XA START") for text in connection.texts] == [1, 0]
    assert (connection.unread, len(given_back)) == (0, 1)


def test_refused_start_is_no_end_by_the_body() -> None:
    connection, given_back = Connection(), list[Any]()
    branch = branch_on(connection, given_back)
    fails(connection, 0, 1400)
    with pytest.raises(Refused):
        connection.query("INSERT 1")
    connection.error = None
    assert branch.roll_back(prepared=False)
    assert (len(connection.texts), connection.is_closed, given_back) == (1, True, [])
    assert not branch.ended_by_body


def test_first_statement_that_fails_leaves_a_branch_to_roll_back() -> None:
    connection, given_back = Connection(), list[Any]()
    branch = branch_on(connection, given_back)
    fails(connection, 1, 1062)
    with pytest.raises(Refused):
        connection.query("INSERT 1")
    connection.error = None
    assert branch.roll_back(prepared=False)
    assert [str(text)[:8] for text in connection.texts[1:]] == ["XA END X", "XA ROLLB"]
    assert len(given_back) == 1


@pytest.mark.parametrize(("code", "told"), [(1400, RolledBackError), (2013, PrepareUnknownError)])
def test_only_a_refused_start_says_that_nothing_is_prepared(code: int, told: type[Exception]) -> None:
    connection = Connection()
    branch = branch_on(connection, [])
    branch.end_body()
    fails(connection, 0, code)
    with pytest.raises(told):
        branch.prepare()
    assert branch.roll_back(prepared=True) is (told is RolledBackError)
    assert (len(connection.texts) > 1) is (told is PrepareUnknownError)
