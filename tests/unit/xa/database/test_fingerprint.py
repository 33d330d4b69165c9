"""A copy of a database: what its rows prove, and what their absence does not."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.logged import said
from txmq.errors import ConfigError
from txmq.xa import LastResource
from txmq.xa.broker_port import cluster_of
from txmq.xa.database.dialects import MYSQL, POSTGRESQL, SQLITE, Dialect
from txmq.xa.database.fingerprint import fingerprint
from txmq.xa.resolver import Resolver

from ..support import NAME, LastResourceFixture, abandon


def copied(world: LastResourceFixture) -> Path:
    """A copy of the file, at another place."""
    path = world.path.parent / "staging" / "orders.db"
    path.parent.mkdir(exist_ok=True)
    shutil.copy(world.path, path)
    return path


def resource_at(path: Path) -> LastResource:
    """The resource, as somebody sees it whose configuration leads there."""
    return LastResource(NAME, connect=lambda: sqlite3.connect(path, timeout=0.05))


def resolve(world: LastResourceFixture, path: Path, rounds: int = 1) -> None:
    """A resolver over that file."""
    resolver = Resolver(world.home, [resource_at(path)])
    for _ in range(rounds):
        resolver.run_once()
    resolver.close()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings so far."""
    return [line["event"] for line in said(caplog) if line["level"] == "warning"]


def test_copy_proves_no_rollback_and_logs_it_once(world: LastResourceFixture, caplog: pytest.LogCaptureFixture) -> None:
    """A resolver on a staging copy, with production's broker, rolled back what production was about to commit."""
    txid = abandon(world, b"left")
    resolve(world, copied(world), rounds=3)
    assert world.home.states() == {txid: "prepared"}
    with closing(sqlite3.connect(copied(world))) as copy:
        assert copy.execute("SELECT * FROM txmq_marker").fetchall() == []
    assert warnings(caplog).count("rollback not proved") == 1
    resolve(world, world.path)
    assert world.home.states() == {txid: "rolled-back"}


def test_a_committed_marker_proves_a_commit_wherever_it_is(world: LastResourceFixture) -> None:
    """Behind more undecided ones than a round has patience for."""
    absent = [abandon(world, b"%d" % number) for number in range(5)]
    committed = abandon(world, b"left", "client.tx.db_committed")
    resolve(world, copied(world))
    assert world.home.states() == dict.fromkeys(absent, "prepared") | {committed: "committed"}


def test_a_rolled_back_marker_proves_nothing_in_a_copy(world: LastResourceFixture) -> None:
    txid = abandon(world, b"left")
    path = copied(world)
    with closing(sqlite3.connect(path)) as copy, copy:
        copy.execute("INSERT INTO txmq_marker VALUES (?, 'rolled-back', 0, 0, 0)", (txid,))
    resolve(world, path)
    assert world.home.states() == {txid: "prepared"}


def test_an_adopted_copy_is_the_database_from_then_on(world: LastResourceFixture) -> None:
    txid = abandon(world, b"left")
    path = copied(world)
    resource_at(path).install(world.home)
    resolve(world, path)
    assert world.home.states() == {txid: "prepared"}, "to install is not to adopt"
    resource_at(path).install(world.home, adopt=True)
    resolve(world, path)
    assert world.home.states() == {txid: "rolled-back"}


@pytest.mark.parametrize("how", ["renamed", "vacuumed"])
def test_file_that_was_put_in_its_place_is_another_one(world: LastResourceFixture, how: str) -> None:
    txid = abandon(world, b"left")
    resource = world.new_resource()
    resolver = Resolver(world.home, [resource])
    resolver._resource_resolvers[0]._open()  # type: ignore[union-attr]
    other = copied(world)
    if how == "vacuumed":
        other.unlink()
        with world.outside() as connection:
            connection.execute(f"VACUUM INTO '{other}'")
    other.rename(world.path)
    for _ in range(2):
        resolver.run_once()
    resolver.close()
    resolve(world, world.path)
    assert world.home.states() == {txid: "prepared"}


def test_a_resolver_that_was_there_before_sees_what_was_adopted(world: LastResourceFixture) -> None:
    """Its connection led to the file that had been in that place, and stayed open for ever."""
    txid = abandon(world, b"left")
    resolver = Resolver(world.home, [world.new_resource()])
    resolver._resource_resolvers[0]._open()  # type: ignore[union-attr]
    copied(world).rename(world.path)
    resolver.run_once()
    assert world.home.states() == {txid: "prepared"}
    resource_at(world.path).install(adopt=True)
    resolver.run_once()
    assert world.home.states() == {txid: "rolled-back"}
    resolver.close()


def test_moved_file_is_another_one_until_adopted(world: LastResourceFixture) -> None:
    txid = abandon(world, b"left")
    moved = world.path.rename(world.path.parent / "moved.db")
    resolve(world, moved)
    assert world.home.states() == {txid: "prepared"}
    resource_at(moved).install(adopt=True)
    resolve(world, moved)
    assert world.home.states() == {txid: "rolled-back"}


def test_blocks_go_on_in_a_copy_and_it_is_said(world: LastResourceFixture, caplog: pytest.LogCaptureFixture) -> None:
    resource = resource_at(copied(world))
    for value in (b"1", b"2"):
        with world.block(resource=resource) as tx:
            tx.connection(resource).execute("INSERT INTO orders (value) VALUES (?)", (value,))
            tx.send("orders", value)
    assert world.home.values("orders") == [b"1", b"2"]
    [line] = warnings(caplog)
    assert line.startswith("not the known server")
    resource.close()


@pytest.mark.parametrize("what", ["DROP TABLE txmq_marker_server", "DELETE FROM txmq_marker_server"])
def test_database_of_an_older_txmq_is_refused_until_reinstalled(world: LastResourceFixture, what: str) -> None:
    txid = abandon(world, b"left")
    with world.outside() as connection:
        connection.execute(what)
    with pytest.raises(ConfigError, match="call install"):
        world.new_resource().enlist(cluster_of(world.home))
    resolve(world, world.path)
    assert world.home.states() == {txid: "prepared"}
    installed = world.new_resource()
    installed.install(world.home)
    assert installed.uuid == world.resource.uuid
    resolve(world, world.path)
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
