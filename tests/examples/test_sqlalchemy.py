"""The SQLAlchemy recipe keeps what its page says, on an engine of SQLite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine, func, select
from sqlalchemy.exc import IntegrityError, InvalidRequestError
from sqlalchemy.orm import Session

import txmq
from examples.sqlalchemy_orders import Base, Order, detached, together
from txmq.testing.processes.broker import BrokerProcess


class Shop:
    """The application: an engine, a producer, and the engine's database as a resource."""

    def __init__(self, broker: BrokerProcess, path: Path) -> None:
        self.url = f"sqlite:///{path}"
        self.engine = create_engine(self.url)
        Base.metadata.create_all(self.engine)
        self.client = txmq.connect(broker.address)
        self.producer = self.client.producer()
        self.db = txmq.LastResource("orders-db", connect=lambda: detached(self.engine))
        self.db.install(self.client)
        self.client.topics.ensure("orders")

    def order(self, session: Session, customer: str) -> None:
        session.add(Order(customer=customer))
        session.flush()
        self.producer.send("orders", customer.encode())

    def take(self, engine: Engine, customer: str, at_end: Callable[[Session], None] = Session.flush) -> None:
        """One block of one order."""
        with together(engine, self.producer, self.db) as session:
            self.order(session, customer)
            at_end(session)

    def order_within(self, session: Session, customer: str) -> None:
        """An order that fails inside a savepoint."""
        with session.begin_nested():
            self.order(session, customer)
            fail(session)

    def told(self) -> tuple[int, list[bytes | None]]:
        """How many rows, and the messages."""
        with Session(self.engine) as session:
            rows = session.scalar(select(func.count()).select_from(Order)) or 0
        return rows, [message.value for message in self.client.browse("orders")]

    def close(self) -> None:
        self.producer.close()
        self.db.close()
        self.client.close()
        self.engine.dispose()


@pytest.fixture
def shop(broker: BrokerProcess, tmp_path: Path) -> Iterator[Shop]:
    made = Shop(broker, tmp_path / "shop.db")
    yield made
    made.close()


def fail(_session: Session) -> None:
    raise KeyError


def committed_and_failed(session: Session) -> None:
    session.commit()
    fail(session)


def repeat(session: Session) -> None:
    """A row whose key is taken."""
    taken = session.scalars(select(Order.id)).first()
    session.expunge_all()
    session.add(Order(id=taken, customer="eve"))
    session.flush()


def test_rows_and_messages_are_there_together_or_not_at_all(shop: Shop) -> None:
    shop.take(shop.engine, "ada")
    with pytest.raises(KeyError):
        shop.take(shop.engine, "ben", fail)
    assert shop.told() == (1, [b"ada"])


def test_duplicate_key_takes_back_rows_and_messages(shop: Shop) -> None:
    shop.take(shop.engine, "ada")
    for _ in range(3):
        with pytest.raises(IntegrityError):
            shop.take(shop.engine, "ben", repeat)
    assert shop.told() == (1, [b"ada"])
    assert not list(shop.client.transactions.list("heuristic"))


def test_messages_go_with_a_session_that_was_rolled_back(shop: Shop) -> None:
    def go_on(session: Session) -> None:
        with pytest.raises(IntegrityError):
            repeat(session)
        session.rollback()

    for at_end in (go_on, Session.rollback):
        with pytest.raises(InvalidRequestError, match="messages go, too"):
            shop.take(shop.engine, "ada", at_end)
    assert shop.told() == (0, [])


def test_commit_in_the_body_waits_for_the_end(shop: Shop) -> None:
    shop.take(shop.engine, "ada", Session.commit)
    with pytest.raises(KeyError):
        shop.take(shop.engine, "ben", committed_and_failed)
    assert shop.told() == (1, [b"ada"])


def test_a_nested_transaction_takes_back_its_rows_alone(shop: Shop) -> None:
    with together(shop.engine, shop.producer, shop.db) as session:
        shop.order(session, "ada")
        with pytest.raises(KeyError):
            shop.order_within(session, "ben")
    assert shop.told() == (1, [b"ada", b"ben"])


def test_block_on_an_autocommit_engine_of_sqlite_is_whole(shop: Shop) -> None:
    engine = create_engine(shop.url, isolation_level="AUTOCOMMIT")
    with pytest.raises(KeyError):
        shop.take(engine, "ada", fail)
    shop.take(engine, "ben")
    engine.dispose()
    assert shop.told() == (1, [b"ben"])
