"""Rows of SQLAlchemy's ORM and a message, both or neither, on SQLAlchemy's own connection.

``together`` is all there is to it: it lends a connection of the engine's pool to a transaction of txmq. Start a
broker with ``txmq broker``, then::

    pip install '.[mysql]' sqlalchemy
    python examples/sqlalchemy_orders.py 'mysql+mysqldb://shop:...@127.0.0.1/shop'
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Engine, String, create_engine, event, func, select
from sqlalchemy.exc import ArgumentError, InvalidRequestError, OperationalError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, SessionTransaction, mapped_column

import txmq
from txmq import LastResource


class Base(DeclarativeBase):
    """The application's tables."""


class Order(Base):
    """One order."""

    __tablename__ = "orders_sqlalchemy"
    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str] = mapped_column(String(40))


@contextmanager
def together(engine: Engine, producer: txmq.Producer, orders_db: LastResource) -> Iterator[Session]:
    """A session whose rows commit together with what the producer sends in the block.

    The end of the block commits, on the session's own connection. Inside it the session lives in a savepoint, so that
    neither its ``commit`` nor the rollback that follows a failed flush ends the transaction of the block.

    Raises:
        InvalidRequestError: the session was rolled back, and the body went on: rows are gone, so the messages go, too.
    """
    rolled_back: list[SessionTransaction] = []
    with engine.connect() as connection:
        lent = connection.connection.dbapi_connection
        connection.begin()  # says nothing to the database; the session joins it, by a savepoint
        with (
            producer.transaction(orders_db.using(lent), timeout=10.0),
            Session(connection, join_transaction_mode="create_savepoint", expire_on_commit=False) as session,
        ):
            event.listen(session, "after_soft_rollback", lambda _, ended: rolled_back.append(ended))
            yield session
            session.commit()
            if any(not ended.nested for ended in rolled_back):
                raise InvalidRequestError("the session was rolled back in a block of txmq: its messages go, too")


def detached(engine: Engine) -> Any:
    """A connection that the pool no longer knows: for the resolver, which keeps its own."""
    pooled = engine.raw_connection()
    connection = pooled.driver_connection
    pooled.detach()
    return connection


def main(url: str, count: str = "10", bootstrap: str = "txmq://127.0.0.1:8123") -> None:
    """Take ``count`` orders."""
    engine = create_engine(url)
    Base.metadata.create_all(engine)
    with txmq.connect(bootstrap) as client, client.producer() as producer:
        orders_db = LastResource("orders-db", connect=lambda: detached(engine))
        client.topics.ensure("orders", partitions=4)
        orders_db.install(client)
        for number in range(int(count)):
            with together(engine, producer, orders_db) as session:
                order = Order(customer=f"customer-{number}")
                session.add(order)
                session.flush()  # now it has its number
                producer.send("orders", f"created {order.id}".encode(), key=order.customer.encode())
                print(f"order {order.id} of {order.customer}")
        with Session(engine) as session:
            print(f"{session.scalar(select(func.count()).select_from(Order))} orders")
    engine.dispose()


if __name__ == "__main__":
    if len(sys.argv) < 2:
        print(f"usage: {sys.argv[0]} SQLALCHEMY_URL [COUNT [BOOTSTRAP]]", file=sys.stderr)
        sys.exit(2)
    try:
        main(*sys.argv[1:])
    except txmq.BrokerAwayError as error:
        sys.exit(f"the broker is away: {error}")
    except (ArgumentError, OperationalError) as error:
        sys.exit(f"cannot open the database: {error.args[0]}")
