"""``txmq.sqlalchemy.DatabaseOffsetStore``: its table, and what it takes; on servers: tests/services/consumer."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, MetaData, create_engine, make_url, text
from sqlalchemy.exc import PendingRollbackError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.schema import CreateTable

import txmq
from txmq.client.consumer.offsets.offset_store import OffsetPosition, StoredOffset
from txmq.errors import ConfigError, FencedError
from txmq.sqlalchemy import DatabaseOffsetStore

GROUP, SLOT = "billing", ("orders", 0)
NAMES = {"pk": "pk_%(table_name)s"}
ASKED = (
    "SELECT c.cid, c.name, c.type, c.'notnull', c.dflt_value, c.pk FROM pragma_table_info('txmq_offset') AS c",
    "SELECT name FROM sqlite_master WHERE sql LIKE '%WITHOUT ROWID%'",
)


class Shop:
    """A file with offsets and rows."""

    def __init__(self, path: Path, metadata: MetaData, **named: Any) -> None:
        self.engine: Engine = create_engine(f"sqlite:///{path}")
        self.store = DatabaseOffsetStore(metadata, lambda: sqlite3.connect(path, timeout=0.2), **named)
        metadata.create_all(self.engine)
        with self.engine.begin() as connection:
            connection.execute(text("CREATE TABLE orders (id INTEGER)"))
        self.store.load(GROUP, SLOT, 2)

    def save(self, given: Any, offset: int, generation: int = 2) -> None:
        """A row and an offset, in the transaction of what is given."""
        given.execute(text(f"INSERT INTO orders VALUES ({offset})"))
        connection = self.store.connection_of(given)
        self.store.save_in(connection, GROUP, OffsetPosition(SLOT, generation, offset), None)

    def found(self) -> tuple[list[int], int | None]:
        """Rows, and the offset."""
        with self.engine.connect() as connection:
            rows = connection.execute(text("SELECT id FROM orders ORDER BY id")).scalars().all()
        saved: StoredOffset | None = self.store.saved(GROUP, SLOT)
        return list(rows), None if saved is None else saved.offset


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    made = Shop(tmp_path / "shop.db", MetaData())
    yield made
    made.store.leave(GROUP)
    made.engine.dispose()


@pytest.mark.parametrize("metadata", [MetaData(), MetaData(naming_convention=NAMES)])
def test_table_in_sqlite_is_that_of_install(metadata: MetaData, tmp_path: Path) -> None:
    txmq.DatabaseOffsetStore(lambda: sqlite3.connect(tmp_path / "plain.db")).install()
    plain, engine = sqlite3.connect(tmp_path / "plain.db"), create_engine("sqlite://")
    DatabaseOffsetStore(metadata, lambda: sqlite3.connect(":memory:"))
    metadata.create_all(engine)
    with engine.connect() as connection:
        for question in ASKED:
            found = {tuple(row) for row in plain.execute(question)}
            assert found
            assert {tuple(row) for row in connection.execute(text(question))} == found
    plain.close()
    engine.dispose()


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("mysql", "aside MEDIUMTEXT CHARACTER SET utf8mb4"),
        ("postgresql", 'consumer_group VARCHAR(200) COLLATE "C" NOT NULL'),
    ],
)
def test_table_of_servers_is_in_their_words(name: str, wanted: str) -> None:
    table = DatabaseOffsetStore(MetaData(), lambda: None).offsets
    assert wanted in str(CreateTable(table).compile(dialect=make_url(f"{name}://").get_dialect()()))


def test_table_with_capitals_is_refused() -> None:
    with pytest.raises(ConfigError, match="lower case"):
        DatabaseOffsetStore(MetaData(), lambda: None, table="Offsets")


def test_rows_and_offset_commit_together_or_neither(shop: Shop) -> None:
    with Session(shop.engine) as session:
        shop.save(session, 1)
        session.rollback()
        assert shop.found() == ([], None)
        shop.save(session, 2)
        session.commit()
    assert shop.found() == ([2], 2)
    with shop.engine.begin() as connection:
        shop.save(connection, 3)
    scoped = scoped_session(sessionmaker(shop.engine))
    shop.save(scoped, 4)
    scoped.commit()
    scoped.remove()
    assert shop.found() == ([2, 3, 4], 4)


def test_refused_transaction_cannot_commit_until_rolled_back(shop: Shop) -> None:
    with Session(shop.engine) as session:
        with pytest.raises(FencedError):
            shop.save(session, 1, generation=1)
        for call in (lambda: session.execute(text("SELECT 1")), session.commit):
            with pytest.raises(PendingRollbackError):
                call()
        session.rollback()
        shop.save(session, 2)
        session.commit()
    assert shop.found() == ([2], 2)


def test_refusal_in_a_savepoint_ends_what_is_around_it(shop: Shop) -> None:
    with Session(shop.engine) as session:
        session.execute(text("INSERT INTO orders VALUES (7)"))
        with pytest.raises(FencedError), session.begin_nested():
            shop.save(session, 1, generation=1)
        with pytest.raises(PendingRollbackError):
            session.commit()
    assert shop.found() == ([], None)


def test_engine_in_autocommit_is_refused(shop: Shop) -> None:
    engine = shop.engine.execution_options(isolation_level="AUTOCOMMIT")
    with Session(engine) as session, pytest.raises(ConfigError, match="autocommit"):
        shop.store.save_in(shop.store.connection_of(session), GROUP, OffsetPosition(SLOT, 2, 1), None)
    assert shop.found() == ([], None)


def test_session_with_binds_needs_the_engine_of_the_rows(tmp_path: Path, shop: Shop) -> None:
    binds: Any = {shop.store.offsets: shop.engine}
    with Session(binds=binds) as session:
        with pytest.raises(ConfigError, match=r"the session has binds: .* DatabaseOffsetStore\(\.\.\., bind=engine\)"):
            shop.store.connection_of(session)
        other = Shop(tmp_path / "other.db", MetaData(), bind=shop.engine)
        other.store.save_in(other.store.connection_of(session), GROUP, OffsetPosition(SLOT, 2, 5), None)
        session.commit()
    other.store.leave(GROUP)
    other.engine.dispose()
    assert shop.found() == ([], 5)


def test_what_is_asynchronous_needs_a_consumer_of_aio(shop: Shop) -> None:
    session = AsyncSession(create_async_engine("sqlite+aiosqlite://"))
    with pytest.raises(ConfigError, match=r"AsyncSession is asynchronous: a consumer of txmq\.aio takes it"):
        shop.store.connection_of(session)


def test_metadata_has_one_table_of_a_name() -> None:
    metadata = MetaData(schema="shop")
    assert str(DatabaseOffsetStore(metadata, lambda: None).offsets) == "shop.txmq_offset"
    with pytest.raises(ConfigError, match=r"the metadata has a table shop\.txmq_offset: give table="):
        DatabaseOffsetStore(metadata, lambda: None)
