"""Whether a server's binlog is still the one in which a position was read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from txmq.binlog.decoded_changes import Ddl, DdlKind, Origin
from txmq.binlog.errors import SourceError
from txmq.binlog.position import Flavor, Position
from txmq.binlog.source.options import SourceOptions
from txmq.binlog.source.server import Server, fingerprint
from txmq.errors import ConfigError


class Told(Server):
    """A server that says what a test has written down: its files with their sizes, and GTIDs at the position."""

    def __init__(self, files: Sequence[tuple[str, int]], found: str | None) -> None:
        super().__init__(SourceOptions(name="test", server_id=9, captures=lambda table: True))
        self.origin = Origin("mariadb", "here")
        self._listed, self._found = files, found

    def rows(self, sql: str, *parameters: object) -> Sequence[Any]:
        return self._listed if sql.startswith("SHOW BINARY LOGS") else [(self._found,)]


class Asked(Server):
    """A server that answers by the beginning of a statement, and has some variables."""

    def __init__(self, flavor: Flavor, answers: Mapping[str, Sequence[Any]], **variables: str) -> None:
        super().__init__(SourceOptions(name="test", server_id=9, captures=lambda table: True))
        self.origin = Origin(flavor, "here")
        self._answers, self._variables = answers, variables

    def rows(self, sql: str, *parameters: object) -> Sequence[Any]:
        if sql.startswith("SHOW GLOBAL VARIABLES"):
            name = str(parameters[0]).replace("\\", "")
            return [(name, self._variables[name])] if name in self._variables else []
        known = (rows for start, rows in self._answers.items() if sql.startswith(start))
        if (found := next(known, None)) is None:
            raise SourceError("no such statement") from Exception(1064, "You have an error in your SQL syntax")
        return found


SERVER_UUID = "3e11fa47-71ca-11e1-9e33-c80aa9429562"
LOGS = {"SHOW BINARY LOGS": [("binlog.000002", 900, "No"), ("binlog.000003", 700, "No")]}


def test_the_end_is_that_of_the_last_file() -> None:
    assert Asked("mysql", LOGS, gtid_executed=f"{SERVER_UUID}:1-5").end_position() == Position(
        "mysql", f"{SERVER_UUID}:1-5", 0, "binlog.000003", 700, "here"
    )
    found = Asked("mariadb", LOGS, gtid_binlog_pos="0-1-7").end_position(is_exact=False)
    assert (found.gtids, found.file, found.offset) == ("0-1-7", "binlog.000003", 700)


@pytest.mark.parametrize("variable", ["gtid_executed", "gtid_purged"])
def test_gtids_with_tags_are_refused_by_name(variable: str) -> None:
    server = Asked("mysql", LOGS, **{variable: f"{SERVER_UUID}:1-5:audit:1"})
    ask = server.end_position if variable == "gtid_executed" else server.oldest_position
    with pytest.raises(SourceError, match=rf"{variable} is {SERVER_UUID}:1-5:audit:1, and GTIDs with tags"):
        ask()


@pytest.mark.parametrize("statement", ["SHOW MASTER STATUS", "SHOW BINARY LOG STATUS"])
def test_filters_are_asked_for_in_each_versions_words(statement: str) -> None:
    server = Asked("mysql", {statement: [("binlog.000003", 700, "shop", "", "")]})
    with pytest.raises(SourceError, match="binlog-do-db is shop"):
        server.check_filters()


@pytest.mark.parametrize("name", ["log_slave_updates", "log_replica_updates"])
@pytest.mark.parametrize("statement", ["SHOW ALL SLAVES STATUS", "SHOW REPLICA STATUS", "SHOW SLAVE STATUS"])
def test_replica_that_keeps_nothing_is_refused(statement: str, name: str) -> None:
    answers: dict[str, Sequence[Any]] = {"SHOW MASTER STATUS": [], statement: [("connecting",)]}
    with pytest.raises(SourceError, match=f"set {name}=ON"):
        Asked("mysql", answers, **{name: "OFF"}).check_filters()
    Asked("mysql", answers, **{name: "ON"}).check_filters()


CASCADE = {"SELECT constraint_schema": [("shop", "items", "of_order")]}


@pytest.mark.parametrize("native", [{}, {"innodb_native_foreign_keys": "ON"}])
def test_cascades_within_innodb_are_refused(native: dict[str, str]) -> None:
    with pytest.raises(SourceError, match=r"shop\.items \(of_order\)"):
        Asked("mysql", CASCADE, **native).changed(REFERENCE)


def test_cascades_above_innodb_are_taken() -> None:
    Asked("mysql", CASCADE, innodb_native_foreign_keys="OFF").changed(REFERENCE)


REFERENCE = Ddl(DdlKind.ALTER, "ALTER TABLE items ADD FOREIGN KEY (o) REFERENCES orders (id)", "shop")
FILES = (("binlog.000002", 900), ("binlog.000003", 900))


def position(gtids: str, file: str = "binlog.000003", **more: Any) -> Position:
    """A position that was saved in a file."""
    given: dict[str, Any] = {"file": file, "offset": 500, "server": "here"}
    return Position("mariadb", gtids, **given | more)


@pytest.mark.parametrize(
    ("saved", "files", "found"),
    [
        (position("0-1-7"), FILES, "0-1-7"),
        (position(""), FILES, ""),
        (position("0-1-7", rows=3, partial="0-1-8"), FILES, "0-1-8"),
        (position("0-1-7,1-2-9"), FILES, "0-1-4,1-2-9"),  # domain 0 was read from further on
        (position("0-1-7", file="binlog.000001"), FILES, None),  # purged
        (position("0-1-7", file="other.000009"), FILES, None),  # the server's log-bin was changed
        (position("0-1-7"), [("binlog.000003", 5 << 30)], None),  # offsets of events have 32 bits
        (position("0-1-7", server=""), FILES, None),
    ],
)
def test_position_in_the_same_binlog_is_taken(
    saved: Position, files: Sequence[tuple[str, int]], found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Told(files, found)
    monkeypatch.setattr(server, "_knows", lambda gtids: True)
    server.check_position(saved)


@pytest.mark.parametrize(
    ("saved", "found"),
    [
        (position("0-1-7"), None),  # nothing ends there
        (position("0-1-7"), "0-1-6"),
        (position("0-1-7"), "0-1-8"),
        (position("0-1-7"), "0-2-7"),
        (position("0-1-7"), ""),
        (position(""), "0-1-1"),
        (position("0-1-7", rows=3, partial="0-1-8"), "0-1-7"),
        (position("0-1-7", file="binlog.000004"), None),
    ],
)
def test_position_in_a_binlog_that_was_reset_is_refused(saved: Position, found: str | None) -> None:
    with pytest.raises(SourceError, match="it was reset"):
        Told(FILES, found).check_position(saved)


class Answering:
    """A connection of a server that cannot run here: it answers as its manual says."""

    def __init__(self, variables: dict[str, str], rows: Sequence[tuple[str, ...]]) -> None:
        self._variables, self._rows = list(variables.items()), rows
        self.description, self.rowcount = ("x",), 0

    def cursor(self) -> Answering:
        """Its own."""
        return self

    def execute(self, statement: str, *_: Any) -> None:
        """Choose the answer."""
        self._found: Sequence[Any] = self._variables if statement.startswith("SHOW VARIABLES") else self._rows

    def fetchall(self) -> Sequence[Any]:
        """The answer."""
        return self._found

    def close(self) -> None:
        """Nothing."""


GALERA = [("wsrep_cluster_state_uuid", "3fd1a2b4-0000-11ee-8000-0242ac120002")]


@pytest.mark.parametrize(
    ("variables", "rows", "expected"),
    [
        ({"wsrep_on": "ON", "server_uid": "x"}, GALERA, "galera 3fd1a2b4-0000-11ee-8000-0242ac120002"),
        ({"server_uuid": "u-u", "datadir": "/var/lib/mysql/"}, [], "mysql u-u /var/lib/mysql/"),
        ({"wsrep_on": "OFF", "server_uid": "nrT/K=", "datadir": "/d/"}, [], "mariadb nrT/K= /d/"),
        ({"hostname": "db1", "port": "3306", "datadir": "/d ä/"}, [], "mariadb db1:3306 /d%20%C3%A4/"),
    ],
)
def test_a_server_is_told_by_what_no_copy_has(
    variables: dict[str, str], rows: Sequence[tuple[str, ...]], expected: str
) -> None:
    connection: Any = Answering(variables, rows)
    assert fingerprint(connection) == expected


def test_a_node_outside_of_its_cluster_is_nobody() -> None:
    zero = [("wsrep_cluster_state_uuid", "00000000-0000-0000-0000-000000000000")]
    connection: Any = Answering({"wsrep_on": "ON"}, zero)
    with pytest.raises(ConfigError, match="no Galera cluster"):
        fingerprint(connection)


def test_a_long_directory_fits_and_still_tells() -> None:
    connections: list[Any] = [Answering({"server_uuid": "u", "datadir": f"{'/f' * 200}/{name}"}, []) for name in "ab"]
    found = {fingerprint(connection) for connection in connections}
    assert len(found) == 2
    assert all(one.startswith("mysql sha256:") and len(one) <= 200 for one in found)
