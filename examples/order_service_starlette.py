"""An order service with Starlette and SQLite, on ``txmq.aio``: row and message, or neither.

::

    pip install '.[aio]' starlette uvicorn
    export ORDERS_DB=/tmp/shop.db
    txmq broker &
    uvicorn --factory examples.order_service_starlette:create_app &
    curl --retry 5 --retry-connrefused -X PUT localhost:8000/orders/42 -d '{"customer": "ada"}'
"""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import txmq.aio
from txmq import LastResource


def prepare(database: str, orders_db: LastResource) -> None:
    """Create the tables; harmless to repeat."""
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE IF NOT EXISTS orders_starlette (id INTEGER PRIMARY KEY, customer TEXT)")
    orders_db.install()


async def take(request: Request) -> JSONResponse:
    """``PUT /orders/42``: the row and the message."""
    number, customer = request.path_params["number"], (await request.json())["customer"]
    producer, orders_db = request.app.state.producer, request.app.state.orders_db
    async with producer.transaction(orders_db, timeout=10.0) as tx:
        await tx.connection(orders_db).execute("INSERT INTO orders_starlette VALUES (?, ?)", (number, customer))
        event = json.dumps({"order": number, "customer": customer})
        await producer.send("orders", event.encode(), key=str(number).encode())
    return JSONResponse({"outcome": "committed", "txid": tx.txid}, 201)


async def exists(_request: Request, _error: Exception) -> JSONResponse:
    """The number was taken before."""
    return JSONResponse({"error": "this order exists"}, 409)


async def nothing_happened(_request: Request, error: Exception) -> JSONResponse:
    """It may be tried again."""
    return JSONResponse({"error": str(error)}, 503, {"retry-after": "1"})


async def not_known(_request: Request, error: Exception) -> JSONResponse:
    """The order's number makes asking again safe."""
    return JSONResponse({"outcome": "unknown", "txid": getattr(error, "txid", None)}, 504)


def create_app() -> Starlette:
    """For ``uvicorn --factory``."""
    database = os.environ["ORDERS_DB"]
    bootstrap = os.environ.get("TXMQ_BOOTSTRAP", "txmq://127.0.0.1:8123")

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        orders_db = LastResource("orders-db", connect=lambda: sqlite3.connect(database, timeout=30.0))
        async with await txmq.aio.connect(bootstrap, name="order-service") as client, client.producer() as producer:
            await client.topics.ensure("orders", partitions=4)
            await asyncio.to_thread(prepare, database, orders_db)
            app.state.producer, app.state.orders_db = producer, orders_db
            yield
        orders_db.close()

    return Starlette(
        routes=[Route("/orders/{number:int}", take, methods=["PUT"])],
        lifespan=lifespan,
        exception_handlers={
            sqlite3.IntegrityError: exists,
            sqlite3.OperationalError: nothing_happened,
            txmq.RolledBackError: nothing_happened,
            txmq.OutcomeUnknownError: not_known,
        },
    )
