"""An order service with Flask and SQLite: an order is accepted with its row and its message, or not at all.

::

    pip install . flask
    export ORDERS_DB=/tmp/shop.db
    txmq broker &
    flask --app examples.order_service_flask init-db
    flask --app examples.order_service_flask run &
    curl --retry 5 --retry-connrefused -X PUT localhost:5000/orders/42 \\
        -H 'content-type: application/json' -d '{"customer": "ada"}'

The customer's side chooses the order's number, so that a request may be repeated: the same number twice is one order.
"""

from __future__ import annotations

import json
import os
import sqlite3
import sys
from typing import Any

from flask import Flask, request

import txmq
from txmq import LastResource

Answer = tuple[dict[str, Any], int] | tuple[dict[str, Any], int, dict[str, str]]


def create_app() -> Flask:
    """One application, with one client, producer and resource for all its threads. It starts without a broker too."""
    app = Flask(__name__)
    database = os.environ["ORDERS_DB"]
    client = txmq.connect(os.environ.get("TXMQ_BOOTSTRAP", "txmq://127.0.0.1:8123"), name="order-service", lazy=True)
    producer = client.producer()
    orders_db = LastResource("orders-db", connect=lambda: sqlite3.connect(database, timeout=30.0))

    @app.cli.command("init-db")
    def init_db() -> None:
        """Create the tables and the topic; harmless to repeat."""
        try:
            connection = sqlite3.connect(database)
            connection.execute("CREATE TABLE IF NOT EXISTS orders_flask (id INTEGER PRIMARY KEY, customer TEXT)")
            connection.close()
            client.topics.ensure("orders", partitions=4)
            orders_db.install(client)
        except txmq.BrokerAwayError as error:
            sys.exit(f"the broker is away: {error}")
        except sqlite3.OperationalError as error:
            sys.exit(f"cannot open the database: {error}")

    @app.put("/orders/<int:number>")
    def take(number: int) -> Answer:
        customer = request.get_json()["customer"]
        with producer.transaction(orders_db, timeout=10.0) as tx:
            tx.connection(orders_db).execute("INSERT INTO orders_flask VALUES (?, ?)", (number, customer))
            event = json.dumps({"order": number, "customer": customer})
            tx.send("orders", event.encode(), key=str(number).encode())
        return {"outcome": "committed", "txid": tx.txid}, 201

    @app.get("/transactions/<txid>")
    def outcome(txid: str) -> Answer:
        return {"outcome": client.outcome(txid).value}, 200

    @app.errorhandler(sqlite3.IntegrityError)
    def exists(error: Exception) -> Answer:
        return {"error": "this order exists"}, 409

    @app.errorhandler(txmq.RolledBackError)
    @app.errorhandler(txmq.BrokerAwayError)
    @app.errorhandler(sqlite3.OperationalError)
    def nothing_happened(error: Exception) -> Answer:
        return {"error": str(error)}, 503, {"retry-after": "1"}

    @app.errorhandler(txmq.OutcomeUnknownError)
    def not_known(error: txmq.OutcomeUnknownError) -> Answer:  # the order's number makes asking again safe
        return {"outcome": "unknown", "txid": error.txid}, 504

    return app
