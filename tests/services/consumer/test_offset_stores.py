"""Every offset store keeps the one contract: the broker's, MySQL's, the file's; and wrong ones are found out."""

from __future__ import annotations

import itertools
import json
import sqlite3
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import MySQLdb
import psycopg
import pytest
from sqlalchemy import MetaData, create_engine
from sqlalchemy.orm import Session

import txmq
from tests.open_files import open_files
from tests.services.sqlalchemy.databases import postgresql_url
from tools.simulated.clock import SimClock
from tools.simulated.disk import SimDisk
from txmq.client.consumer.offsets import database_store
from txmq.client.consumer.offsets.database_store import DatabaseOffsetStore
from txmq.client.consumer.offsets.file_store import FileOffsetStore
from txmq.client.consumer.offsets.offset_store import (
    BrokerOffsetStore,
    OffsetPosition,
    OffsetStore,
    OffsetStoreOfMany,
    StoredOffset,
)
from txmq.errors import (
    ConfigError,
    CorruptRecordError,
    DirectoryInUseError,
    FencedError,
    OffsetStoreAwayError,
    StorageError,
)
from txmq.model import TopicPartition
from txmq.sqlalchemy import DatabaseOffsetStore as SessionOffsetStore
from txmq.testing.offset_store_contract import (
    GROUP,
    OTHERS,
    SLOT,
    OffsetStoreContract,
    OffsetStoreWithTransactionsContract,
)
from txmq.testing.processes.broker import BrokerProcess, free_port
from txmq.testing.processes.mariadb import MariaDB
from txmq.testing.processes.postgresql import PostgreSQL
from txmq.xa.database import dbapi

TOPICS = {"orders": 12, "Orders": 2, "orders.1": 2, "order_": 2, "order-": 2}
_numbers = itertools.count(1)


class BrokerMember:
    """A member of a group, typed by hand."""

    def __init__(self, client: txmq.Client, group: str) -> None:
        self._connection, self._group, self.name = client.new_connection(), group, f"m{next(_numbers)}"
        self.store = BrokerOffsetStore(self._save)
        self.generations: dict[TopicPartition, int] = {}

    def join(self) -> None:
        """Take everything."""
        view = self._call("join", [], topics=",".join(TOPICS))
        for topic, partition, generation, offset, deferred in view["assigned"]:
            found = None if offset is None else StoredOffset(offset, deferred)
            self.store.handed_over((topic, partition), generation, found)
            self.generations[topic, partition] = generation

    def leave(self) -> None:
        """As if it had been taken for gone; its store goes on."""
        self._call("leave", [])

    def close(self) -> None:
        """The test is over."""
        self._connection.close()

    def _save(self, positions: Sequence[OffsetPosition]) -> list[TopicPartition]:
        rows = [[*position.slot, *position[1:4]] for position in positions]
        return [(topic, partition) for topic, partition, _ in self._call("save", rows)["refused"]]

    def _call(self, action: str, rows: list[Any], **words: str) -> Any:
        extensions = {"member": self.name, **words}
        body = [json.dumps(rows).encode()]
        return json.loads(
            self._connection.call("group", action, self._group, timeout=30.0, extensions=extensions, body=body)
        )


class TestBrokerOffsetStore(OffsetStoreContract):
    """The default."""

    keeps_log = False

    @pytest.fixture(autouse=True)
    def _opened(self, shared_broker: BrokerProcess) -> Iterator[None]:
        with txmq.connect(shared_broker.address) as self.client:
            for topic, partitions in TOPICS.items():
                self.client.topics.create(topic, partitions=partitions)
            self.members: dict[str, BrokerMember] = {}
            self.former: list[BrokerMember] = []
            yield
            for member in self.members.values():
                member.leave()
            for member in self.former:
                member.close()
            for topic in TOPICS:
                self.client.topics.delete(topic)

    def open(self) -> OffsetStore:
        return BrokerOffsetStore(lambda _positions: [])

    def next_owner(self, slot: TopicPartition, group: str = GROUP) -> tuple[OffsetStore, int]:
        """The one before leaves, another one joins."""
        before = self.members.pop(group, None)
        if before is not None:
            before.leave()
        member = self.members[group] = BrokerMember(self.client, group)
        self.former.append(member)
        member.join()
        return member.store, member.generations[slot]


class ManyTogether(OffsetStoreContract):
    """Many partitions are loaded as each of them would be."""

    def test_many_are_found_and_fenced_as_each_would_be(self) -> None:
        saved, never, fenced = SLOT, *OTHERS[:2]
        paused, old = self.owner(saved)
        assert not paused.save(GROUP, [OffsetPosition(saved, old, 7, "w")])
        _, outdated = self.owner(fenced)
        self.owner(fenced)
        store = self.open()
        assert isinstance(store, OffsetStoreOfMany)
        wanted = [(slot, self.next_owner(slot)[1]) for slot in (saved, never)]
        assert store.load_many(GROUP, [*wanted, (fenced, outdated)]) == {saved: StoredOffset(7, "w"), never: None}
        assert list(paused.save(GROUP, [OffsetPosition(saved, old, 9)])) == [saved]
        for slot, generation in wanted:
            assert not store.save(GROUP, [OffsetPosition(slot, generation, 8)])


class DatabaseStoreContract(ManyTogether, OffsetStoreWithTransactionsContract):
    """On a real database: ``new_connection`` gives the application's."""

    def new_connection(self) -> Any:
        """A connection that waits a second for a lock."""
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def _installed(self, _database: None) -> Iterator[None]:
        self.table = f"txmq_offset_{next(_numbers)}"
        self.stores: list[DatabaseOffsetStore] = []
        self.connections: list[Any] = []
        for _ in range(2):
            self.open().install()  # type: ignore[attr-defined]
        yield
        for store in self.stores:
            store.leave(GROUP)
        for connection in self.connections:
            with suppress(Exception):  # it was closed by the store
                connection.close()

    def open(self) -> OffsetStore:
        store = DatabaseOffsetStore(self.new_connection, table=self.table)
        self.stores.append(store)
        return store

    def connect(self) -> Any:
        self.connections.append(self.new_connection())
        return self.connections[-1]

    def test_a_table_that_is_missing_is_said_at_once(self) -> None:
        with pytest.raises(StorageError, match=r"nowhere: its table is missing.*call install\(\)"):
            DatabaseOffsetStore(self.new_connection, table="nowhere").enter(GROUP)

    def test_connection_in_autocommit_is_refused_unless_it_is_in_transaction(self) -> None:
        store, generation = self.with_transactions()
        connection = self.connect()
        self.turn_autocommit_on(connection)
        connection.cursor().execute("BEGIN")
        store.save_in(connection, GROUP, OffsetPosition(SLOT, generation, 3), None)
        connection.cursor().execute("ROLLBACK")
        with pytest.raises(ConfigError, match="autocommit"):
            store.save_in(connection, GROUP, OffsetPosition(SLOT, generation, 4), None)
        assert store.saved(GROUP, SLOT) is None

    def turn_autocommit_on(self, connection: Any) -> None:
        """As the driver calls it."""
        connection.autocommit = True


class TestSQLiteOffsetStore(DatabaseStoreContract):
    """On a file."""

    busy_timeout_s = 0.2

    @pytest.fixture
    def _database(self, tmp_path: Path) -> None:
        self.path = tmp_path / "shop.db"

    def new_connection(self) -> Any:
        return sqlite3.connect(self.path, timeout=self.busy_timeout_s)

    def _race(self) -> None:
        self.busy_timeout_s = 60.0  # SQLite's waits grow to 100 ms, and the file is free for 100 us at a time
        super()._race()

    def turn_autocommit_on(self, connection: Any) -> None:
        connection.isolation_level = None


class TestPostgreSQLOffsetStore(DatabaseStoreContract):
    """On a real PostgreSQL, through psycopg."""

    @pytest.fixture
    def _database(self, postgresql: PostgreSQL) -> None:
        self.postgresql = postgresql

    def new_connection(self) -> Any:
        return psycopg.connect(self.postgresql.conninfo())


class TestSessionOffsetStore(TestPostgreSQLOffsetStore):
    """The same, in sessions of SQLAlchemy."""

    @pytest.fixture(autouse=True)
    def _engine(self, postgresql: PostgreSQL) -> Iterator[None]:
        self.engine = create_engine(postgresql_url(postgresql))
        yield
        self.engine.dispose()

    def open(self) -> OffsetStore:
        store = SessionOffsetStore(MetaData(), self.new_connection, table=self.table)
        self.stores.append(store)
        return store

    def connect(self) -> Any:
        self.connections.append(Session(self.engine))
        return self.connections[-1]

    def test_connection_in_autocommit_is_refused_unless_it_is_in_transaction(self) -> None:
        store, generation = self.with_transactions()
        session = Session(self.engine.execution_options(isolation_level="AUTOCOMMIT"))
        with session, pytest.raises(ConfigError, match="autocommit"):
            self.save_in(store, session, OffsetPosition(SLOT, generation, 4), None)
        assert store.saved(GROUP, SLOT) is None


class TestDatabaseOffsetStore(DatabaseStoreContract):
    """On a real MariaDB."""

    @pytest.fixture
    def _database(self, mariadb: MariaDB) -> None:
        self.mariadb = mariadb

    def new_connection(self) -> Any:
        return self.mariadb.connect()

    def turn_autocommit_on(self, connection: Any) -> None:
        connection.autocommit(True)

    def test_no_transaction_stays_open_between_two_calls(self) -> None:
        store, generation = self.owner()
        store.enter(GROUP)
        assert not store.save(GROUP, [OffsetPosition(SLOT, generation, 1)])
        assert isinstance(store, DatabaseOffsetStore)
        calls: tuple[Callable[[], object], ...] = (partial(store.enter, GROUP), partial(store.saved, GROUP, SLOT))
        for call in calls:
            call()
            with closing(self.mariadb.connect(autocommit=True)) as connection:
                connection.query("SET SESSION lock_wait_timeout = 5")
                connection.query(f"ALTER TABLE {self.table} COMMENT 'not locked'")

    def test_many_are_loaded_by_two_statements(self, monkeypatch: pytest.MonkeyPatch) -> None:
        store, statements = self.open(), list[str]()
        assert isinstance(store, DatabaseOffsetStore)
        store.enter(GROUP)

        def counted(connection: Any, sql: str, parameters: Sequence[Any] = ()) -> tuple[list[Any], int]:
            statements.append(sql)
            return dbapi.run(connection, sql, parameters)

        monkeypatch.setattr(database_store, "run", counted)
        found = store.load_many(GROUP, [(("orders", number), 1) for number in range(600)])
        assert (len(found), [sql[:6] for sql in statements]) == (600, ["BEGIN", "INSERT", "SELECT"])

    def test_a_table_name_is_a_name(self) -> None:
        with pytest.raises(ConfigError, match="table"):
            DatabaseOffsetStore(self.mariadb.connect, table="x; DROP TABLE y")

    def test_a_lost_connection_is_made_again(self) -> None:
        store, generation = self.owner()
        assert isinstance(store, DatabaseOffsetStore)
        assert store._own is not None
        self.mariadb.execute(f"KILL {store._own.thread_id()}")
        with pytest.raises(StorageError):
            store.save(GROUP, [OffsetPosition(SLOT, generation, 1)])
        assert not store.save(GROUP, [OffsetPosition(SLOT, generation, 1)])


class TestFileOffsetStore(ManyTogether):
    """A group of one."""

    @pytest.fixture(autouse=True)
    def _opened(self, tmp_path: Path) -> Iterator[None]:
        self.path = tmp_path / "deep" / "billing.offsets"
        self.store = FileOffsetStore(str(self.path))
        self.store.enter(GROUP)
        yield
        self.store.leave(GROUP)

    def open(self) -> OffsetStore:
        return self.store

    def test_another_life_finds_what_was_saved(self) -> None:
        store, generation = self.owner()
        store.save(GROUP, [OffsetPosition(SLOT, generation, 7, "w")])
        self.store.leave(GROUP)
        self.store = FileOffsetStore(str(self.path))
        self.store.enter(GROUP)
        assert self.store.load(GROUP, SLOT, generation + 1) == StoredOffset(7, "w")

    def test_second_member_is_refused_in_this_process_and_in_another(self) -> None:
        with pytest.raises(DirectoryInUseError):
            self.store.enter(GROUP)
        with pytest.raises(DirectoryInUseError, match="held by process"):
            FileOffsetStore(str(self.path)).enter(GROUP)

    def test_a_refused_or_left_file_is_not_held_open(self) -> None:
        self.store.leave(GROUP)
        self.path.write_bytes(b"damaged")
        with pytest.raises(CorruptRecordError):
            self.store.enter(GROUP)
        assert open_files(self.path.parent) == []

    def test_file_of_another_group_or_an_older_generation_is_refused(self) -> None:
        _, generation = self.owner()
        with pytest.raises(FencedError, match="generation"):
            self.store.load(GROUP, SLOT, generation - 1)
        self.store.leave(GROUP)
        with pytest.raises(ConfigError, match="other"):
            FileOffsetStore(str(self.path)).enter("other")
        self.store.enter(GROUP)

    def test_every_flipped_bit_is_found(self) -> None:
        store, generation = self.owner()
        store.save(GROUP, [OffsetPosition(SLOT, generation, 7, "w")])
        self.store.leave(GROUP)
        whole = self.path.read_bytes()
        for position in range(len(whole)):
            damaged = bytearray(whole)
            damaged[position] ^= 1 << (position % 8)
            self.path.write_bytes(damaged)
            with pytest.raises(CorruptRecordError):
                FileOffsetStore(str(self.path)).enter(GROUP)
        self.path.write_bytes(whole[:-5])
        with pytest.raises(CorruptRecordError):
            FileOffsetStore(str(self.path)).enter(GROUP)
        self.path.write_bytes(whole)
        self.store.enter(GROUP)

    def test_a_newer_format_is_left_alone(self) -> None:
        line = json.dumps({"format": 3, "group": GROUP, "partitions": []}).encode()
        path = self.path.with_name("newer")
        path.write_bytes(b"%b\n%08x\n" % (line, zlib.crc32(line)))
        with pytest.raises(StorageError, match="another txmq"):
            FileOffsetStore(str(path)).enter(GROUP)


def _on(disk: SimDisk) -> FileOffsetStore:
    store = FileOffsetStore("offsets", disk=disk)
    store.enter(GROUP)
    return store


def test_file_after_any_crash_has_the_last_or_current_save() -> None:
    """Whatever the disk kept of what was not synced: the file is whole, and no older than the last answer."""
    from tools.simulated.crash_images import enumerate_images

    disk = SimDisk(record=True)
    store = _on(disk)
    store.load(GROUP, SLOT, 1)
    for offset in range(1, 6):
        store.save(GROUP, [OffsetPosition(SLOT, 1, offset)])
        disk.note(("saved", offset))
    assert disk.trace is not None
    count = 0
    for _label, image in enumerate_images(disk.trace):
        told = [note[1] for note in image.notes if isinstance(note, tuple) and note[0] == "saved"]
        found = _on(image).load(GROUP, SLOT, 2)
        least = max(told, default=0)
        assert (found.offset if found else 0) in (least, least + 1), _label
        count += 1
    assert count > 30


# --- wrong ones ------------------------------------------------------------------------------------------------------


class Careless:
    """Saves whatever it is told, as MetaQ's stores did."""

    is_shared = True

    def __init__(self) -> None:
        self.kept: dict[tuple[str, TopicPartition], StoredOffset] = {}
        self.newest: dict[tuple[str, TopicPartition], int] = {}

    def enter(self, group: str) -> None:
        """Nothing."""

    def load(self, group: str, slot: TopicPartition, generation: int) -> StoredOffset | None:
        """No fence."""
        return self.kept.get((group, slot))

    def save(self, group: str, positions: Sequence[OffsetPosition]) -> Collection[TopicPartition]:
        """No check."""
        for position in positions:
            self.kept[group, position.slot] = StoredOffset(position.offset, position.deferred)
        return []

    def leave(self, group: str) -> None:
        """Nothing."""


class FencesWhenSaving(Careless):
    """The newest generation is known from saves only: a member that has loaded and not saved yet fences nobody."""

    def save(self, group: str, positions: Sequence[OffsetPosition]) -> Collection[TopicPartition]:
        """The highest generation so far may save."""
        refused = []
        for position in positions:
            key = (group, position.slot)
            if position.generation < self.newest.get(key, 0):
                refused.append(position.slot)
            else:
                self.newest[key] = position.generation
                super().save(group, [position])
        return refused


class ForgetsDeferred(FencesWhenSaving):
    """Fences as it should, and keeps the offset alone."""

    def load(self, group: str, slot: TopicPartition, generation: int) -> StoredOffset | None:
        """Fence, then read."""
        self.newest[group, slot] = generation
        return super().load(group, slot, generation)

    def save(self, group: str, positions: Sequence[OffsetPosition]) -> Collection[TopicPartition]:
        """Without the text."""
        known = [p for p in positions if self.newest.get((group, p.slot)) == p.generation]
        super().save(group, [position._replace(deferred=None) for position in known])
        return [position.slot for position in positions if position not in known]


def failures(store: OffsetStore) -> set[str]:
    """The tests of the contract that a store does not pass."""
    failed = set()
    for name in (name for name in dir(OffsetStoreContract) if name.startswith("test_")):
        contract = type("Contract", (OffsetStoreContract,), {"open": lambda _self: store})()
        store.__init__()  # type: ignore[misc]
        try:
            getattr(contract, name)()
        except AssertionError:
            failed.add(name)
    return failed


@pytest.fixture
def for_resolvers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The race ends soon where nobody is ever fenced."""
    monkeypatch.setattr("txmq.testing.offset_store_contract.WAIT_S", 0.2)


@pytest.mark.usefixtures("for_resolvers")
def test_a_store_that_does_not_fence_fails_the_contract() -> None:
    found = failures(Careless())
    assert "test_who_was_fenced_saves_nothing" in found
    assert "test_what_was_never_loaded_cannot_be_saved" in found
    assert "test_what_the_new_owner_read_stays_true_while_the_old_one_saves_on" in found


@pytest.mark.usefixtures("for_resolvers")
def test_store_that_fences_late_or_loses_deferred_state_fails_contract() -> None:
    found = failures(FencesWhenSaving())
    assert "test_loading_fences_also_where_nothing_was_saved" in found
    found = failures(ForgetsDeferred())
    assert "test_the_next_owner_finds_what_the_one_before_saved_and_what_it_had_deferred" in found
    assert "test_who_was_fenced_saves_nothing" not in found


def test_store_tells_what_its_database_refuses(mariadb: MariaDB, postgresql: PostgreSQL) -> None:
    """Found: a wrong password was told as a database that is away."""
    where, conninfo = mariadb.connect_arguments(), postgresql.conninfo()
    wrong = {"user": "nobody", "passwd": "geheim"}
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: MySQLdb.connect(**where | wrong), "user or password are refused.*'nobody'@"),
        (lambda: MySQLdb.connect(**where | {"db": "nowhere"}), "no such database.*'nowhere'"),
        (lambda: MySQLdb.connect(**where), r"its table is missing.*install\(\)"),
        (lambda: psycopg.connect(conninfo, user="nobody"), 'user or password are refused.*port .*"nobody"'),
        (lambda: psycopg.connect(conninfo, dbname="nowhere"), 'no such database.*"nowhere"'),
        (lambda: psycopg.connect(conninfo), r"its table is missing.*install\(\)"),
        (lambda: psycopg.connect(conninfo, prot=1), "correct the program"),
    ]
    for connect, words in refused:
        with pytest.raises(StorageError, match=words) as caught:
            DatabaseOffsetStore(connect, table="nothing").enter(GROUP)
        assert not caught.value.retriable
        assert not any(secret in str(caught.value) for secret in ("geheim", "\n"))
    port = free_port()
    for away in (
        lambda: MySQLdb.connect(host="127.0.0.1", port=port), lambda: psycopg.connect(f"host=127.0.0.1 port={port}"),
    ):  # fmt: skip
        with pytest.raises(OffsetStoreAwayError, match="onnect"):
            DatabaseOffsetStore(away).enter(GROUP)


def test_store_that_is_refused_asks_more_and_more_rarely(tmp_path: Path) -> None:
    asked, clock, file = list[float](), SimClock(), tmp_path / "nowhere" / "shop.db"

    def connect() -> sqlite3.Connection:
        asked.append(clock.monotonic())
        return sqlite3.connect(file)

    store, begun = DatabaseOffsetStore(connect), clock.monotonic()
    store._clock = clock
    for _ in range(60):
        with pytest.raises(StorageError, match="no such database"):
            store.saved(GROUP, SLOT)
        clock.advance(1.0)
    assert [at - begun for at in asked] == [0, 1, 3, 7, 15, 31]
    file.parent.mkdir()
    store.install()
    assert store.saved(GROUP, SLOT) is None
