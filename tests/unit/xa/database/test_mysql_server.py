"""What MySQL 8 does differently from MariaDB, by its manual: told from answers, since no MySQL runs here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from txmq.errors import ConfigError
from txmq.xa.database.dbapi import run
from txmq.xa.database.dialects import MYSQL, code_of
from txmq.xa.database.mysql_server import listed_xids, send, why_no_xa
from txmq.xid import Xid


class Refused(Exception):
    """In place of a driver's error."""


class Scripted:
    """A connection that answers as it was told: by statement, rows or an exception."""

    def __init__(self, **answers: Any) -> None:
        self.answers = {name.replace("_", " "): rows for name, rows in answers.items()}
        self.said: list[str] = []
        self.description: object = None
        self.rowcount = 0
        self._rows: list[Any] = []

    def cursor(self) -> Scripted:
        """Itself."""
        return self

    def execute(self, statement: str) -> None:
        """Look the answer up by the statement's beginning."""
        self.said.append(statement)
        answer = next(rows for name, rows in self.answers.items() if statement.startswith(name))
        if isinstance(answer, Exception):
            raise answer
        self._rows, self.description = answer, ("column",)

    def fetchall(self) -> list[Any]:
        """The rows."""
        return self._rows

    def close(self) -> None:
        """Nothing to let go of."""

    commit = rollback = close


@pytest.mark.parametrize("said", [str, str.encode], ids=["text", "use_unicode=False"])
def test_mysql_lists_xids_in_hex_on_request(said: Callable[[str], str | bytes]) -> None:
    mysql = Scripted(XA_RECOVER=[(7, 2, 1, said("0xff0027")), (1, 1, 0, said("0x61"))])
    assert listed_xids(mysql, is_mariadb=False) == [Xid(7, b"\xff\x00", b"'"), Xid(1, b"a", b"")]
    assert mysql.said == ["XA RECOVER CONVERT XID"]


def test_mariadb_lists_xids_as_bytes() -> None:
    mariadb = Scripted(XA_RECOVER=[(7, 2, 1, b"\xff\x00'")])
    assert listed_xids(mariadb, is_mariadb=True) == [Xid(7, b"\xff\x00", b"'")]
    assert mariadb.said == ["XA RECOVER"]


@pytest.mark.parametrize("code", [1401, 1227])
def test_the_privilege_that_mysql_wants_for_recovery_is_named(code: int) -> None:
    mysql = Scripted(XA_RECOVER=Refused(code, "XAER_RMERR: Fatal error occurred in the transaction branch"))
    with pytest.raises(ConfigError, match="GRANT XA_RECOVER_ADMIN"):
        listed_xids(mysql, is_mariadb=False)


def test_another_error_of_recovery_is_the_drivers() -> None:
    with pytest.raises(Refused):
        listed_xids(Scripted(XA_RECOVER=Refused(2013, "lost")), is_mariadb=True)


@pytest.mark.parametrize(
    ("rows", "is_refused"), [([("wsrep_on", "ON")], True), ([("wsrep_on", "OFF")], False), ([], False)]
)
def test_galera_is_refused(rows: list[Any], is_refused: bool) -> None:
    assert (why_no_xa(Scripted(SHOW_VARIABLES=rows)) is not None) is is_refused


@pytest.mark.parametrize(
    ("variables", "weak"),
    [
        ({"innodb_flush_log_at_trx_commit": "1"}, None),
        ({"innodb_flush_log_at_trx_commit": "1", "log_bin": "OFF", "sync_binlog": "0"}, None),
        ({"innodb_flush_log_at_trx_commit": "1", "log_bin": "ON", "sync_binlog": "1"}, None),
        ({"innodb_flush_log_at_trx_commit": "1", "log_bin": "ON", "sync_binlog": "0"}, "sync_binlog = 0"),
        ({"innodb_flush_log_at_trx_commit": "1", "innodb_flush_method": "nosync"}, "innodb_flush_method = nosync"),
        ({"innodb_flush_log_at_trx_commit": "2"}, "innodb_flush_log_at_trx_commit = 2"),
        ({}, "innodb_flush_log_at_trx_commit = None"),
    ],
)
@pytest.mark.parametrize("encode", [str, str.encode])
def test_weak_durability_is_told_from_the_variables(variables: dict[str, str], weak: str | None, encode: Any) -> None:
    found = MYSQL.weakness(
        Scripted(SHOW_VARIABLES=[(encode(name), encode(value)) for name, value in variables.items()])
    )
    assert found is None if weak is None else (found or "").startswith(weak)


def test_rows_of_a_cursor_that_makes_dicts_are_rows() -> None:
    assert run(Scripted(SELECT=[{"a": 1, "b": 2}]), "SELECT 1") == ([(1, 2)], 0)


class Statements:
    """A connection that fails at one statement."""

    def __init__(self, fails_at: int) -> None:
        self.fails_at, self.left = fails_at, 0

    def _one(self) -> None:
        self.fails_at -= 1
        if self.fails_at < 0:
            raise Refused(1399, "no")
        self.left -= 1

    def query(self, text: str) -> None:
        """The first statement of a text."""
        self.left = text.count(";") + 1
        self._one()

    def next_result(self) -> int:
        """The following ones."""
        if self.left == 0:
            return -1
        self._one()
        return 0

    def affected_rows(self) -> int:
        """Of the last one."""
        return 5


@pytest.mark.parametrize("in_one_packet", [True, False])
@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_what_was_done_before_a_failure_is_told(in_one_packet: bool, fails_at: int) -> None:
    counts, error = send(Statements(fails_at), ("A", "B", "C"), in_one_packet=in_one_packet)
    assert counts == [5] * fails_at
    assert error is not None
    assert code_of(error) == 1399
    assert send(Statements(9), ("A", "B", "C"), in_one_packet=in_one_packet) == ([5, 5, 5], None)


def test_an_error_without_number_has_no_code() -> None:
    assert code_of(ValueError()) is None
    assert code_of(ValueError("text")) is None


def test_importing_the_resources_needs_no_driver() -> None:
    code = "import sys, txmq.xa; sys.exit('MySQLdb' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
