"""The order service of order_service_fastapi.py, with ``async def`` endpoints: FastAPI, MySQL, and ``txmq.aio``.

::

    pip install '.[aio,mysql]' fastapi uvicorn
    export ORDERS_DB='{"host": "127.0.0.1", "user": "shop", "passwd": "...", "db": "shop"}'   # for MySQLdb.connect
    txmq broker &
    uvicorn --factory examples.order_service_fastapi_aio:create_app &
    curl --retry 5 --retry-connrefused -X PUT localhost:8000/orders/42 \\
        -H 'content-type: application/json' -d '{"customer": "ada"}'

The customer's side chooses the order's number, so that a request may be repeated: the same number twice is one order.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from typing import Any

import MySQLdb
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel

import txmq.aio
from txmq import LastResource

ORDERS = "CREATE TABLE IF NOT EXISTS orders_aio (id INT PRIMARY KEY, customer VARCHAR(40)) ENGINE=InnoDB"
BLOCKS_MAX = 64  # at once: each has a connection and a thread


class Order(BaseModel):
    """The body of a request."""

    customer: str


def prepare(arguments: dict[str, Any], orders_db: LastResource) -> None:
    """Create the tables; harmless to repeat."""
    with closing(MySQLdb.connect(**arguments)) as connection:
        connection.cursor().execute(ORDERS)
    orders_db.install()


class Service:
    """The part that does not know of HTTP; one for each loop."""

    def __init__(self, client: txmq.aio.Client, orders_db: LastResource) -> None:
        self.client, self.orders_db = client, orders_db
        self.producer, self._room = client.producer(), asyncio.Semaphore(BLOCKS_MAX)

    async def take(self, number: int, customer: str) -> str:
        """The row and the message; the transaction's id.

        Raises:
            MySQLdb.IntegrityError: the order exists; nothing happened.
            MySQLdb.OperationalError: the database cannot be reached; nothing happened.
            txmq.RolledBackError: nothing happened, it may be tried again; so does txmq.BrokerAwayError.
            txmq.OutcomeUnknownError: the database or the broker was lost at the decision.
        """
        async with self._room, self.producer.transaction(self.orders_db, timeout=10.0) as tx:
            await tx.connection(self.orders_db).execute("INSERT INTO orders_aio VALUES (%s, %s)", (number, customer))
            event = json.dumps({"order": number, "customer": customer})
            await self.producer.send("orders", event.encode(), key=str(number).encode())
        return tx.txid


@asynccontextmanager
async def serving(bootstrap: str, arguments: dict[str, Any]) -> AsyncIterator[Service]:
    """A service, until the application ends."""
    orders_db = LastResource("orders-db", connect=lambda: MySQLdb.connect(**arguments))
    async with await txmq.aio.connect(bootstrap, name="order-service") as client:
        await client.topics.ensure("orders", partitions=4)
        await asyncio.to_thread(prepare, arguments, orders_db)
        service = Service(client, orders_db)
        async with service.producer:
            yield service
    orders_db.close()


def create_app() -> FastAPI:
    """For ``uvicorn --factory``."""
    arguments = json.loads(os.environ["ORDERS_DB"])
    bootstrap = os.environ.get("TXMQ_BOOTSTRAP", "txmq://127.0.0.1:8123")

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with serving(bootstrap, arguments) as service:
            app.state.service = service
            yield

    app = FastAPI(lifespan=lifespan)

    @app.put("/orders/{number}", status_code=201)
    async def take(number: int, order: Order) -> dict[str, str]:
        try:
            return {"outcome": "committed", "txid": await app.state.service.take(number, order.customer)}
        except MySQLdb.IntegrityError:
            raise HTTPException(409, "this order exists") from None
        except (txmq.RolledBackError, MySQLdb.OperationalError) as error:  # nothing happened
            raise HTTPException(503, str(error), {"retry-after": "1"}) from error
        except txmq.OutcomeUnknownError as error:  # the order's number makes asking again safe
            raise HTTPException(504, {"outcome": "unknown", "txid": error.txid}) from error

    @app.get("/transactions/{txid}")
    async def outcome(txid: str) -> dict[str, str]:
        try:
            return {"outcome": (await app.state.service.client.outcome(txid)).value}
        except txmq.BrokerAwayError as error:
            raise HTTPException(503, str(error), {"retry-after": "1"}) from error

    return app
