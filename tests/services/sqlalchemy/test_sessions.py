"""``txmq.sqlalchemy`` on real servers: its tables, random programs, two phases, and the frameworks above it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import flask
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.operations import Operations
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import Engine, MetaData, create_engine, event, select, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Mapped, Session, mapped_column
from sqlmodel import Field, SQLModel
from sqlmodel import Session as ModelSession

import txmq
from tests.sqlalchemy_programs import Base, Order, Program, outbox
from tools.simulated.clock import SimClock
from txmq.client.relay.relay import Relay
from txmq.errors import OutboxFullError, TransactionStateError
from txmq.outbox.outbox import Outbox as PlainOutbox
from txmq.sqlalchemy import Outbox
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.database_programs import Ability
from txmq.testing.processes.mariadb import MariaDB
from txmq.testing.processes.postgresql import PostgreSQL

from .databases import mariadb_url, postgresql_url

SEEDS = 30
DRAIN_S = 60.0
COLUMNS = {
    "mysql": "SELECT table_name, column_name, column_type, is_nullable, column_key, extra, character_set_name, "
    "collation_name FROM information_schema.columns WHERE table_schema = DATABASE()",
    "postgresql": "SELECT table_name, column_name, data_type, character_maximum_length, is_nullable, collation_name, "
    "identity_generation, ordinal_position FROM information_schema.columns WHERE table_schema = 'public'",
}
REST = {
    "mysql": "SELECT table_name, index_name, column_name, non_unique FROM information_schema.statistics "
    "WHERE table_schema = DATABASE() "
    "UNION ALL SELECT table_name, engine, table_collation, 0 FROM information_schema.tables "
    "WHERE table_schema = DATABASE()",
    "postgresql": "SELECT indexdef, '' FROM pg_indexes WHERE schemaname = 'public' "
    "UNION ALL SELECT sequencename, CAST(cache_size AS TEXT) FROM pg_sequences",
}
OF_MARIADB = pytest.param("mariadb", marks=pytest.mark.needs(Ability.MARIADB_DIALECT))


@pytest.fixture(params=["mysql", OF_MARIADB, "postgresql"])
def engine(request: pytest.FixtureRequest, mariadb: MariaDB, postgresql: PostgreSQL) -> Iterator[Engine]:
    url = postgresql_url(postgresql) if request.param == "postgresql" else mariadb_url(mariadb, name=request.param)
    made = create_engine(url)
    yield made
    with made.begin() as connection:
        for table in ("orders", "orders_of_flask", "orders_of_sqlmodel", *outbox_tables()):
            connection.execute(text(f"DROP TABLE IF EXISTS {table}"))
    made.dispose()


def outbox_tables() -> list[str]:
    return ["txmq_outbox", "txmq_outbox_parked", "txmq_outbox_relay"]


def schema(engine: Engine) -> list[set[Any]]:
    kind = "postgresql" if engine.dialect.name == "postgresql" else "mysql"
    with engine.connect() as connection:
        return [{tuple(row) for row in connection.execute(text(asked[kind]))} for asked in (COLUMNS, REST)]


def install_plain(engine: Engine) -> None:
    connection = engine.raw_connection()
    PlainOutbox().install(connection)
    connection.close()


def differences(engine: Engine, metadata: MetaData) -> list[Any]:
    with engine.connect() as connection:
        return list(compare_metadata(MigrationContext.configure(connection), metadata))


def test_tables_of_the_metadata_are_those_of_install(engine: Engine) -> None:
    metadata = MetaData()
    Outbox(metadata)
    install_plain(engine)
    plain = schema(engine)
    assert len(plain[0]) == 24
    assert differences(engine, metadata) == []  # nothing for Alembic
    metadata.drop_all(engine)
    metadata.create_all(engine)
    assert schema(engine) == plain
    assert differences(engine, metadata) == []


def test_migration_of_alembic_makes_tables_and_relay_row(engine: Engine) -> None:
    with engine.begin() as connection:
        op = Operations(MigrationContext.configure(connection))
        Outbox(MetaData()).install(op.get_bind())
    metadata = MetaData()
    found = Outbox(metadata)
    assert differences(engine, metadata) == []
    with engine.connect() as connection:
        assert len(connection.execute(select(found.relay.c.uuid)).scalar_one()) == 32


def test_rows_are_messages_after_random_programs(engine: Engine) -> None:
    Base.metadata.create_all(engine)
    first = 1
    for seed in range(SEEDS):
        program = Program(seed, engine, first)
        program.run()
        first = program.next_id
        program.check()
        with engine.begin() as connection:
            connection.execute(outbox.messages.delete())
            connection.execute(text("DELETE FROM orders"))


def test_engine_in_autocommit_is_refused_by_the_commit(engine: Engine) -> None:
    Base.metadata.create_all(engine)
    with Session(engine.execution_options(isolation_level="AUTOCOMMIT")) as session:
        outbox.send(session, "orders", b"1")
        with pytest.raises(TransactionStateError, match="AUTOCOMMIT"):
            session.commit()
    with Session(engine) as session:
        assert session.scalars(select(outbox.messages.c.value)).all() == []


def test_two_phases_commit_rows_and_messages_together(mariadb: MariaDB) -> None:
    engine = create_engine(mariadb_url(mariadb))
    Base.metadata.create_all(engine)
    with Session(engine, twophase=True) as session:
        for number, end in ((1, session.commit), (2, session.rollback)):
            session.add(Order(id=number))
            outbox.send(session, "orders", b"%d" % number)
            if number == 1:
                session.prepare()
                with pytest.raises(TransactionStateError, match="has ended"):
                    outbox.send(session, "orders", b"late")
            end()
        assert session.scalars(select(Order.id)).all() == [1]
        assert session.scalars(select(outbox.messages.c.value)).all() == [b"1"]
    Base.metadata.drop_all(engine)
    engine.dispose()


def test_flask_sqlalchemy_sends_by_each_of_its_engines(engine: Engine) -> None:
    app = flask.Flask("shop")
    url = engine.url.render_as_string(hide_password=False)
    app.config |= {"SQLALCHEMY_DATABASE_URI": url, "SQLALCHEMY_BINDS": {"audit": "sqlite://"}}
    db = SQLAlchemy(app)
    assert "audit" in db.metadatas

    class FlaskOrder(db.Model):  # type: ignore[name-defined,misc]
        __tablename__ = "orders_of_flask"
        id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)

    orders = Outbox(db.metadata, codec="json")
    audits = Outbox(db.metadatas["audit"], "audit", codec="json")

    @app.post("/orders/<int:number>")
    def take(number: int) -> str:
        db.session.add(FlaskOrder(id=number))
        orders.send(db.session, "orders", {"id": number})
        audits.send(db.session, "audit", {"asked": number})
        db.session.commit()
        return "taken"

    with app.app_context():
        db.create_all()
    client = app.test_client()
    assert [client.post(f"/orders/{number}").status_code for number in (1, 1, 2)] == [200, 500, 200]
    with app.app_context():
        assert db.session.scalars(select(orders.messages.c.value)).all() == [b'{"id":1}', b'{"id":2}']
        with db.engines["audit"].connect() as connection:
            found = connection.scalars(select(audits.messages.c.value)).all()
        assert found == [b'{"asked":1}', b'{"asked":2}']
        db.session.remove()
        for one in db.engines.values():
            one.dispose()


class ModelBase(SQLModel):
    """With metadata of its own: that of SQLModel is everyone's."""

    metadata = MetaData()


class ModelOrder(ModelBase, table=True):
    """An order."""

    __tablename__ = "orders_of_sqlmodel"
    id: int | None = Field(default=None, primary_key=True)


models = Outbox(ModelBase.metadata)


def test_sqlmodel_sends_with_the_number_of_a_new_row(engine: Engine) -> None:
    ModelBase.metadata.create_all(engine)
    with ModelSession(engine) as session:
        order = ModelOrder()
        session.add(order)
        session.flush()
        models.send(session, "orders", b"%d" % (order.id or 0))
        session.commit()
        assert session.scalars(select(models.messages.c.value)).all() == [b"%d" % (order.id or 0)]


@pytest.mark.parametrize("level", ["READ COMMITTED", "SERIALIZABLE"])
def test_serializable_transaction_reads_nothing_that_others_write(engine: Engine, level: str) -> None:
    models = MetaData()
    chosen = Outbox(models)
    models.create_all(engine)
    statements: list[str] = []
    at_level = engine.execution_options(isolation_level=level)
    event.listen(at_level, "before_cursor_execute", lambda *one: statements.append(one[2].lower()))
    with Session(at_level) as session:
        chosen.send(session, "orders", b"x")
        session.commit()
    assert any("min(" in one for one in statements) == (level != "SERIALIZABLE")


def test_transaction_after_a_serializable_one_looks_for_room(engine: Engine) -> None:
    models = MetaData()
    chosen = Outbox(models, rows_max=1)
    models.create_all(engine)
    chosen._clock = clock = SimClock()
    for _ in range(3):
        clock.advance(0.1)
        with Session(engine.execution_options(isolation_level="SERIALIZABLE")) as session:
            chosen.send(session, "orders", b"x")
            session.commit()
    clock.advance(0.1)
    with Session(engine) as session:
        chosen.send(session, "orders", b"x")
        with pytest.raises(OutboxFullError):
            session.commit()


def test_messages_of_sessions_arrive_once_in_order(engine: Engine, broker: BrokerProcess) -> None:
    Base.metadata.create_all(engine)
    with txmq.connect(broker.address) as client:
        client.topics.create("orders")
        with Relay(client, outbox, lambda: detached(engine)) as relay, Session(engine) as session:
            assert list(outbox._wakes) == [relay.wake]
            for number in range(60):
                take(session, number)
            relay.drain(DRAIN_S)
            rows = session.scalars(select(Order.id).order_by(Order.id)).all()
        assert [int(message.value or b"") for message in client.browse("orders")] == rows
    assert len(rows) == 36
    assert not outbox._wakes


def take(session: Session, number: int) -> None:
    """An order; some are rolled back, some meet one that is there."""
    session.add(Order(id=number if number % 10 != 9 else 0))
    outbox.send(session, "orders", b"%d" % number, b"key")
    try:
        session.rollback() if number % 3 == 2 else session.commit()
    except IntegrityError:
        session.rollback()


def detached(engine: Engine) -> Any:
    """A connection that the pool no longer knows."""
    pooled = engine.raw_connection()
    connection = pooled.driver_connection
    pooled.detach()
    return connection
