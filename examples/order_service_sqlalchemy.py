"""An order service with FastAPI and SQLAlchemy's AsyncSession on PostgreSQL (asyncpg): messages by the outbox.

::

    pip install '.[sqlalchemy,postgres]' asyncpg fastapi uvicorn
    export ORDERS_DB=postgresql://shop:...@127.0.0.1/shop
    txmq broker &
    txmq topic create orders --partitions 4
    uvicorn --factory examples.order_service_sqlalchemy:create_app &
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
from txmq.client.relay.relay import Relay
from txmq.sqlalchemy import Outbox

REQUEST_S = 10.0


class Base(DeclarativeBase):
    """The service's tables."""


class Article(Base):
    """What can be ordered."""

    __tablename__ = "articles"
    name: Mapped[str] = mapped_column(String(40), primary_key=True)


class Order(Base):
    """An order."""

    __tablename__ = "orders_async"
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    customer: Mapped[str] = mapped_column(String(40))


class Line(Base):
    """An article of an order."""

    __tablename__ = "order_lines"
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
    """
    key = str(number).encode()
    session.add(Order(number=number, customer=order.customer))
    outbox.send(session, "orders", {"order": number, "customer": order.customer}, key=key)
    await session.flush()
    missing = []
    for article in order.articles:
        try:
            async with session.begin_nested():  # a line that fails takes its message along
                session.add(Line(number=number, article=article))
                outbox.send(session, "orders", {"order": number, "article": article}, key=key)
        except IntegrityError:
            missing.append(article)
    await session.commit()
    return missing


async def prepare(engine: AsyncEngine) -> None:
    """Create the tables; harmless to repeat."""
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)


def create_app() -> FastAPI:
    """For ``uvicorn --factory``."""
    database = os.environ["ORDERS_DB"]
    bootstrap = os.environ.get("TXMQ_BOOTSTRAP", "txmq://127.0.0.1:8123")
    engine = create_async_engine(database.replace("postgresql:", "postgresql+asyncpg:"))

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await prepare(engine)
        with (
            txmq.connect(bootstrap, name="order-service", lazy=True) as client,
            Relay(client, outbox, lambda: psycopg.connect(database)),
        ):
            yield
        await engine.dispose()

    app = FastAPI(lifespan=lifespan)

    @app.put("/orders/{number}", status_code=201)
    async def put(number: int, order: NewOrder) -> dict[str, list[str]]:
        try:
            async with asyncio.timeout(REQUEST_S), AsyncSession(engine) as session:
                return {"missing": await take(session, number, order)}
        except IntegrityError:
            raise HTTPException(409, "this order exists") from None
        except (TimeoutError, DBAPIError, OSError) as error:  # ask again with the same number
            raise HTTPException(503, "the database does not answer", {"retry-after": "1"}) from error

    return app
