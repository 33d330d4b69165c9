"""An order service with FastAPI and SQLAlchemy's AsyncSession on PostgreSQL (asyncpg): messages by the outbox.

::

    pip install '.[sqlalchemy,postgres]' asyncpg fastapi uvicorn
    export ORDERS_DB=postgresql://shop:...@127.0.0.1/shop
    txmq broker &
    txmq topic create orders --partitions 4
    uvicorn --factory examples.order_service_fastapi:create_app &
    curl --retry 5 --retry-connrefused -X PUT localhost:8000/orders/42 \\
        -H 'content-type: application/json' -d '{"customer": "ada", "articles": ["tea", "cup"]}'

The request commits its session; it needs no broker. A relay in the process takes what was committed to the broker.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psycopg
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel
from sqlalchemy import ForeignKey, String
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import txmq
from txmq.errors import OutboxFullError
from txmq.sqlalchemy import Outbox


class Base(DeclarativeBase):
    """The service's tables."""


class Customer(Base):
    """A customer; the row is the lock that keeps a customer's messages in order."""

    __tablename__ = "shop_customers"
    name: Mapped[str] = mapped_column(String(40), primary_key=True)
    orders: Mapped[int] = mapped_column(default=0)


class Article(Base):
    """What can be ordered."""

    __tablename__ = "shop_articles"
    name: Mapped[str] = mapped_column(String(40), primary_key=True)


class Order(Base):
    """A customer's ``nth`` order."""

    __tablename__ = "shop_orders"
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    customer: Mapped[str] = mapped_column(ForeignKey(Customer.name))
    nth: Mapped[int]


class Line(Base):
    """An article of an order."""

    __tablename__ = "shop_lines"
    number: Mapped[int] = mapped_column(ForeignKey(Order.number), primary_key=True)
    article: Mapped[str] = mapped_column(ForeignKey(Article.name), primary_key=True)


class NewOrder(BaseModel):
    """The body of a request."""

    customer: str
    articles: list[str] = []


outbox = Outbox(Base.metadata, "orders-db", codec="json")


async def take(session: AsyncSession, number: int, order: NewOrder) -> list[str]:
    """The order, and a line for each article that there is; the articles that there are not.

    Raises:
        IntegrityError: the order exists; nothing happened.
        HTTPException: there is no such customer, or none of the articles; nothing happened.
    """
    customer = await session.get(Customer, order.customer, with_for_update=True)
    if customer is None:
        raise HTTPException(404, "no such customer")
    key, nth = customer.name.encode(), customer.orders + 1
    customer.orders = nth
    session.add(Order(number=number, customer=customer.name, nth=nth))
    outbox.send(session, "orders", {"order": number, "nth": nth}, key=key)
    await session.flush()
    missing = []
    for article in order.articles:
        try:
            async with session.begin_nested():  # a line that fails takes its message along
                session.add(Line(number=number, article=article))
                outbox.send(session, "orders", {"order": number, "article": article}, key=key)
        except IntegrityError:
            missing.append(article)
    if missing and missing == order.articles:
        raise HTTPException(422, "no such article")
    await session.commit()
    return missing


async def prepare(engine: AsyncEngine) -> None:
    """Create the tables, and what the shop begins with; harmless to repeat."""
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    async with AsyncSession(engine) as session:
        if await session.get(Customer, "ada") is None:
            session.add_all(Customer(name=name) for name in ("ada", "ben", "cleo"))
            session.add_all(Article(name=name) for name in ("cup", "tea"))
            await session.commit()


def create_app() -> FastAPI:
    """For ``uvicorn --factory``."""
    database = os.environ["ORDERS_DB"]
    bootstrap = os.environ.get("TXMQ_BOOTSTRAP", "txmq://127.0.0.1:8123")
    request_s = float(os.environ.get("REQUEST_S", "10"))
    engine = create_async_engine(database.replace("postgresql:", "postgresql+asyncpg:"), pool_pre_ping=True)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await prepare(engine)
        with (
            txmq.connect(bootstrap, name="order-service", lazy=True) as client,
            client.relay(outbox, connect=lambda: psycopg.connect(database)),
        ):
            yield
        await engine.dispose()

    app = FastAPI(lifespan=lifespan)

    @app.put("/orders/{number}", status_code=201)
    async def put(number: int, order: NewOrder) -> dict[str, list[str]]:
        try:
            async with asyncio.timeout(request_s), AsyncSession(engine) as session:
                return {"missing": await take(session, number, order)}
        except IntegrityError:
            raise HTTPException(409, "this order exists") from None
        except (TimeoutError, DBAPIError, OSError, OutboxFullError) as error:  # ask again with the same number
            raise HTTPException(503, "no order is taken now", {"retry-after": "1"}) from error

    return app
