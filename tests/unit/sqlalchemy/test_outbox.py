"""What an outbox of sessions takes and refuses, and how its tables are made."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, Insert, MetaData, create_engine, delete, insert, select, text
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from txmq.errors import ConfigError, OutboxFullError
from txmq.outbox.outbox import Outbox as PlainOutbox
from txmq.sqlalchemy import Outbox

METADATA = MetaData()
OUTBOX = Outbox(METADATA, "orders-db")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = create_engine(f"sqlite:///{tmp_path / 'shop.db'}")
    METADATA.create_all(made)
    yield made
    made.dispose()


def rows(engine: Engine, outbox: Outbox = OUTBOX) -> list[tuple[Any, ...]]:
    found = outbox.messages.c
    with engine.connect() as connection:
        return [tuple(row) for row in connection.execute(select(found.topic, found.message_key, found.value))]


def test_importing_txmq_does_not_import_sqlalchemy() -> None:
    program = "import sys, txmq, txmq.client.client, txmq.outbox.outbox; sys.exit('sqlalchemy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"metadata": object()}, "Base.metadata"), ({"name": "a b"}, "outbox name"), ({"table": "a-b"}, "letters"),
        ({"codec": "yaml"}, "codec"), ({"metadata": METADATA}, "give table="),
        ({"table": "Waiting"}, "lower case"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused_with_advice(given: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Outbox(**{"metadata": MetaData(), **given})


def test_several_outboxes_have_tables_of_their_own(engine: Engine) -> None:
    metadata = MetaData()
    outboxes = [Outbox(metadata, "one", table="one"), Outbox(metadata, "two", table="two")]
    metadata.create_all(engine)
    with Session(engine) as session:
        for outbox in (*outboxes, OUTBOX):
            outbox.send(session, outbox.name, b"")
        session.commit()
    assert [rows(engine, outbox)[0][0] for outbox in (*outboxes, OUTBOX)] == ["one", "two", "orders-db"]


def test_relay_row_that_is_missing_comes_with_the_next_creation(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(delete(OUTBOX.relay))  # of a creation that failed MariaDB keeps the tables, and no row
    for _ in range(2):
        METADATA.create_all(engine)
        with engine.connect() as connection:
            assert len(connection.execute(select(OUTBOX.relay.c.id)).all()) == 1


def test_schema_of_the_metadata_is_the_tables() -> None:
    assert Outbox(MetaData(schema="shop")).table == "shop.txmq_outbox"
    assert Outbox(MetaData(schema="shop"), table="other.outbox").messages.fullname == "other.outbox"


@pytest.mark.parametrize(
    ("message", "match"),
    [
        (("a b", b""), "topic"),
        (("orders", "text"), r"is bytes, not str: give value\.encode\(\), or have JSON made"),
        (("orders", {"order": 7}), r'json\.dumps\(value\)\.encode\(\), or .*: Outbox\(\.\.\., codec="json"\)'),
        (("orders", b"", "key"), r"key of a message is bytes, not str: give key\.encode\(\)"),
    ],
)
def test_what_cannot_be_sent_is_refused_at_once(engine: Engine, message: Any, match: str) -> None:
    with Session(engine) as session:
        with pytest.raises(ConfigError, match=match):
            OUTBOX.send(session, *message)
        OUTBOX.send(session, "orders", b"1")
        session.commit()
    assert rows(engine) == [("orders", None, b"1")]


def test_what_is_no_session_is_refused(engine: Engine) -> None:
    for given in (engine, sessionmaker(engine), object()):
        with pytest.raises(ConfigError, match="a Session or an AsyncSession"):
            OUTBOX.send(given, "orders", b"")  # type: ignore[arg-type]


def test_message_has_its_key_headers_and_time(engine: Engine) -> None:
    outbox = Outbox(MetaData(), codec="json")
    with Session(engine) as session:
        outbox.send(session, "orders", {"id": 1}, b"ada", headers={"kind": b"\xff"})
        session.commit()
        row = session.execute(select(outbox.messages)).one()
        assert (row.message_key, row.value, row.headers) == (b"ada", b'{"id":1}', b'[["kind", "ff"]]')
        assert abs(row.created_ms / 1000 - session.execute(text("SELECT strftime('%s', 'now') + 0")).scalar_one()) < 60


def test_scoped_session_and_several_messages_are_taken(engine: Engine) -> None:
    session = scoped_session(sessionmaker(engine))
    OUTBOX.send_many(session, [("orders", b"1"), ("orders", b"2", b"key")])
    session.commit()
    session.remove()
    assert rows(engine) == [("orders", None, b"1"), ("orders", b"key", b"2")]


def test_session_that_routes_is_asked_for_an_insert(engine: Engine) -> None:
    class Routing(Session):
        def get_bind(self, mapper: Any = None, *, clause: Any = None, bind: Any = None, **_: Any) -> Any:
            return bind or (engine if isinstance(clause, Insert) else None)

    with Routing() as session:
        OUTBOX.send(session, "orders", b"1")
        session.commit()
    assert len(rows(engine)) == 1


def test_full_outbox_refuses_the_commit(engine: Engine) -> None:
    outbox = Outbox(MetaData(), rows_max=2)
    with Session(engine) as session:
        for _ in range(3):
            OUTBOX.send(session, "orders", b"")
            session.commit()
        outbox.send(session, "orders", b"")
        with pytest.raises(OutboxFullError, match="does a relay run"):
            session.commit()
        session.rollback()
    assert len(rows(engine)) == 3


def test_relay_row_is_made_with_the_tables(engine: Engine) -> None:
    with engine.connect() as connection:
        ((*row,),) = connection.execute(select(OUTBOX.relay))
    assert len(row[1]) == 32
    assert [row[0], *row[2:]] == [1, "", None, None, "", None, 0]


def test_install_is_idempotent_in_the_callers_transaction(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'new.db'}")
    for _ in range(2):
        with engine.begin() as connection:
            Outbox(MetaData()).install(connection)
    with engine.connect() as connection:
        assert len(connection.execute(select(OUTBOX.relay)).all()) == 1
    engine.dispose()


def test_install_makes_up_for_a_missing_relay_row(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(OUTBOX.relay.delete())
        OUTBOX.install(connection)
        assert len(connection.execute(select(OUTBOX.relay)).all()) == 1


def test_tables_of_another_shape_are_refused(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'other.db'}")
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE txmq_outbox_parked (id INTEGER)"))
        with pytest.raises(ConfigError, match="txmq_outbox_parked is not an outbox's"):
            OUTBOX.install(connection)
    engine.dispose()


def test_plain_outbox_writes_and_installs_to_the_same_tables(tmp_path: Path) -> None:
    path = tmp_path / "plain.db"
    connection = sqlite3.connect(path)
    OUTBOX.install(connection)
    PlainOutbox().send(connection, "orders", b"plain")
    connection.commit()
    connection.close()
    engine = create_engine(f"sqlite:///{path}")
    with Session(engine) as session:
        session.execute(insert(OUTBOX.messages).values(topic="orders", value=b"core", created_ms=0))
        session.commit()
    assert [value for _, _, value in rows(engine)] == [b"plain", b"core"]
    engine.dispose()
