"""Which server a connection leads to."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from txmq.errors import ConfigError
from txmq.xa import LastResource
from txmq.xa.broker_port import cluster_of
from txmq.xa.database.dialects import MYSQL, POSTGRESQL, SQLITE, Dialect
from txmq.xa.database.fingerprint import fingerprint

from ..support import LastResourceFixture, abandon


@pytest.mark.parametrize("what", ["DROP TABLE txmq_marker_server", "DELETE FROM txmq_marker_server"])
def test_outbox_of_an_older_txmq_is_refused_until_reinstalled(tmp_path: Path, what: str) -> None:
    resource = LastResource("shop", connect=lambda: sqlite3.connect(tmp_path / "shop.db"), outbox=True)
    resource.install()
    with closing(sqlite3.connect(tmp_path / "shop.db")) as connection, connection:
        connection.execute(what)
    with pytest.raises(ConfigError, match="call install"):
        resource.enlist("")
    resource.install()
    resource.close()


def test_database_of_an_older_txmq_is_refused_until_reinstalled(world: LastResourceFixture) -> None:
    txid = abandon(world, b"left")
    with world.outside() as connection:
        connection.execute("DROP TABLE txmq_marker_token")
    with pytest.raises(ConfigError, match="call install"):
        world.new_resource().enlist(cluster_of(world.home))
    world.resolver().run_once()
    assert world.home.states() == {txid: "prepared"}
    installed = world.new_resource()
    installed.install(world.home)
    assert installed.uuid == world.resource.uuid
    world.resolver().run_once()
    assert world.home.states()[txid] == "rolled-back"


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
    ("dialect", "variables", "rows", "expected"),
    [
        (MYSQL, {"wsrep_on": "ON", "server_uid": "x"}, GALERA, "galera 3fd1a2b4-0000-11ee-8000-0242ac120002"),
        (MYSQL, {"server_uuid": "u-u", "datadir": "/var/lib/mysql/"}, [], "mysql u-u /var/lib/mysql/"),
        (MYSQL, {"wsrep_on": "OFF", "server_uid": "nrT/K=", "datadir": "/d/"}, [], "mariadb nrT/K= /d/"),
        (MYSQL, {"hostname": "db1", "port": "3306", "datadir": "/d ä/"}, [], "mariadb db1:3306 /d%20%C3%A4/"),
        (POSTGRESQL, {}, [("7123456789", "0000000A")], "postgresql 7123456789 0000000A"),
    ],
)
def test_a_server_is_told_by_what_no_copy_has(
    dialect: Dialect, variables: dict[str, str], rows: Sequence[tuple[str, ...]], expected: str
) -> None:
    connection: Any = Answering(variables, rows)
    assert fingerprint(connection, dialect) == expected


def test_a_node_outside_of_its_cluster_is_nobody() -> None:
    zero = [("wsrep_cluster_state_uuid", "00000000-0000-0000-0000-000000000000")]
    connection: Any = Answering({"wsrep_on": "ON"}, zero)
    with pytest.raises(ConfigError, match="no Galera cluster"):
        fingerprint(connection, MYSQL)


def test_a_long_path_fits_and_still_tells(tmp_path: Path) -> None:
    found = set()
    for name in ("a", "b"):
        folder = tmp_path.joinpath(*["f" * 100] * 3, name)
        folder.mkdir(parents=True)
        with closing(sqlite3.connect(folder / "x.db")) as connection:
            connection.execute("CREATE TABLE t (x)")
            found.add(fingerprint(connection, SQLITE))
    assert len(found) == 2
    assert all(one.startswith("sqlite sha256:") and len(one) <= 200 for one in found)
