"""What a relay says of a database that does not answer, or refuses."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.logged import said
from tools.simulated.clock import SimClock
from txmq.client.relay.database_side import RelayDatabase
from txmq.outbox.outbox import Outbox


def test_database_that_does_not_answer_is_told_once_then_rarely(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    clock, problems, file = SimClock(), list[Exception](), tmp_path / "shop.db"

    def connect() -> sqlite3.Connection:
        if problems:
            raise problems[0]
        return sqlite3.connect(file)

    def told(times: int) -> list[tuple[str, str]]:
        for _ in range(times):
            database.peek()
            clock.advance(1.0)
        return [(line["event"].partition(";")[0], line.get("error", "")) for line in said(caplog)]

    with closing(connect()) as connection:
        Outbox("orders").install(connection)
    database = RelayDatabase(Outbox("orders"), connect, clock)
    away = ("outbox's database does not answer", "Connection refused (111)")
    problems.append(ConnectionRefusedError(111, "Connection refused"))
    assert told(60) == [away]
    assert told(60) == [away]
    assert database.refusal is None
    problems.clear()
    assert told(2) == [("outbox's database is there", "")]
    database.close()
    problems.append(ConnectionRefusedError(111, "Connection refused"))
    assert told(2) == [away]
    problems[0] = sqlite3.OperationalError("unable to open database file")
    [(event, error)] = told(2)
    assert event == "outbox cannot be relayed until somebody corrects it"
    assert error.startswith("outbox 'orders': there is no such database: ")
    problems.clear()
    with closing(connect()) as connection:
        connection.execute("DROP TABLE txmq_outbox_parked")
        connection.commit()
    database.close()
    [(event, error)] = told(2)
    assert event == "outbox cannot be relayed until somebody corrects it"
    assert "install() the outbox once" in error


def test_relay_that_ends_waits_for_no_database_that_is_away() -> None:
    asked = list[int]()

    def connect() -> sqlite3.Connection:
        asked.append(1)
        raise TimeoutError

    database = RelayDatabase(Outbox("orders"), connect, SimClock())
    database.peek()
    database.unlock()
    database.release("one")
    assert len(asked) == 1
