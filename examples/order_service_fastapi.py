"""An order service with FastAPI and MySQL: an order is accepted with its row and its message, or not at all.

::

    pip install '.[mysql]' fastapi uvicorn
    export ORDERS_DB='{"host": "127.0.0.1", "user": "shop", "passwd": "...", "db": "shop"}'   # for MySQLdb.connect
    txmq broker &
    uvicorn --factory examples.order_service_fastapi:create_app &
    curl --retry 5 --retry-connrefused -X PUT localhost:8000/orders/42 \\
        -H 'content-type: application/json' -d '{"customer": "ada"}'

The customer's side chooses the order's number, so that a request may be repeated: the same number twice is one order.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import MySQLdb
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel

import txmq
from txmq import LastResource

ORDERS = "CREATE TABLE IF NOT EXISTS orders_fastapi (id INT PRIMARY KEY, customer VARCHAR(40)) ENGINE=InnoDB"


class Order(BaseModel):
    """The body of a request."""

    customer: str


class Service:
    """The part that does not know of HTTP."""

    def __init__(self, bootstrap: str, arguments: dict[str, Any]) -> None:
        self.client = txmq.connect(bootstrap, name="order-service")
        self.producer = self.client.producer()
        self.orders_db = LastResource("orders-db", connect=lambda: MySQLdb.connect(**arguments))
        connection = MySQLdb.connect(**arguments)
        connection.cursor().execute(ORDERS)
        connection.close()
        self.client.topics.ensure("orders", partitions=4)
        self.orders_db.install(self.client)

    def take(self, number: int, customer: str) -> str:
        """The row and the message; the transaction's id.

        Raises:
            MySQLdb.IntegrityError: the order exists; nothing happened.
            MySQLdb.OperationalError: the database cannot be reached; nothing happened.
            txmq.RolledBackError: nothing happened, it may be tried again; so does txmq.BrokerAwayError, which is told
                within a second, if possible before the row.
            txmq.OutcomeUnknownError: the database or the broker was lost at the decision.
        """
        with self.producer.transaction(self.orders_db, timeout=10.0) as tx:
            cursor = tx.connection(self.orders_db).cursor()
            cursor.execute("INSERT INTO orders_fastapi VALUES (%s, %s)", (number, customer))
            event = json.dumps({"order": number, "customer": customer})
            tx.send("orders", event.encode(), key=str(number).encode())
        return tx.txid

    def close(self) -> None:
        """End in order."""
        self.producer.close()
        self.orders_db.close()
        self.client.close()


def create_app() -> FastAPI:
    """For ``uvicorn --factory``."""
    arguments = json.loads(os.environ["ORDERS_DB"])
    bootstrap = os.environ.get("TXMQ_BOOTSTRAP", "txmq://127.0.0.1:8123")

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.service = Service(bootstrap, arguments)
        yield
        app.state.service.close()

    app = FastAPI(lifespan=lifespan)

    @app.put("/orders/{number}", status_code=201)
    def take(number: int, order: Order) -> dict[str, str]:  # not async: it runs in a thread, and may wait there
        try:
            return {"outcome": "committed", "txid": app.state.service.take(number, order.customer)}
        except MySQLdb.IntegrityError:
            raise HTTPException(409, "this order exists") from None
        except (
            txmq.RolledBackError,
            MySQLdb.OperationalError,
        ) as error:  # nothing happened: no broker, no database, ...
            raise HTTPException(503, str(error), {"retry-after": "1"}) from error
        except txmq.OutcomeUnknownError as error:  # the order's number makes asking again safe
            raise HTTPException(504, {"outcome": "unknown", "txid": error.txid}) from error

    @app.get("/transactions/{txid}")
    def outcome(txid: str) -> dict[str, str]:
        try:
            return {"outcome": app.state.service.client.outcome(txid).value}
        except txmq.BrokerAwayError as error:
            raise HTTPException(503, str(error), {"retry-after": "1"}) from error

    return app
