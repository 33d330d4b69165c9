"""An order service with psycopg alone, on PostgreSQL: messages by the outbox, in psycopg's own transaction.

::

    pip install '.[postgres]'
    txmq broker &
    txmq topic create orders --partitions 4
    python examples/order_service_psycopg.py 'host=127.0.0.1 dbname=shop user=shop password=...' &
    curl --retry 5 --retry-connrefused -X PUT localhost:8000/orders/42 \\
        -d '{"customer": "ada", "articles": ["tea", "cup"]}'

The request commits; it needs no broker. A relay in the process takes what was committed to the broker.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import psycopg
from psycopg.errors import ForeignKeyViolation, UniqueViolation

import txmq
from txmq.errors import OutboxFullError

TABLES = """
CREATE TABLE IF NOT EXISTS shop_customers (name varchar(40) PRIMARY KEY, orders integer NOT NULL);
CREATE TABLE IF NOT EXISTS shop_articles (name varchar(40) PRIMARY KEY);
CREATE TABLE IF NOT EXISTS shop_orders (number integer PRIMARY KEY,
    customer varchar(40) NOT NULL REFERENCES shop_customers, nth integer NOT NULL);
CREATE TABLE IF NOT EXISTS shop_lines (number integer REFERENCES shop_orders,
    article varchar(40) REFERENCES shop_articles, PRIMARY KEY (number, article));
INSERT INTO shop_customers VALUES ('ada', 0), ('ben', 0), ('cleo', 0) ON CONFLICT DO NOTHING;
INSERT INTO shop_articles VALUES ('cup'), ('tea') ON CONFLICT DO NOTHING;
"""
LOCK_WAIT_S = int(os.environ.get("REQUEST_S", "10"))

outbox = txmq.Outbox("orders-db")


class RefusedError(Exception):
    """An order that cannot be taken."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Orders:
    """The part that does not know of HTTP. Thread safety: any thread."""

    def __init__(self, database: str) -> None:
        self._database = database

    def connect(self) -> psycopg.Connection[Any]:
        """A new connection."""
        return psycopg.connect(self._database, options=f"-c lock_timeout={LOCK_WAIT_S}s")

    def prepare(self) -> None:
        """Create the tables, and what the shop begins with; harmless to repeat."""
        with self.connect() as connection:
            connection.execute(TABLES)
            outbox.install(connection)

    def take(self, number: int, customer: str, articles: list[str]) -> list[str]:
        """The order, and a line for each article that there is; the articles that there are not.

        Raises:
            UniqueViolation: the order exists; nothing happened.
            RefusedError: there is no such customer, or none of the articles; nothing happened.
        """
        with self.connect() as connection:  # its end commits
            changed = "UPDATE shop_customers SET orders = orders + 1 WHERE name = %s RETURNING orders"
            row = connection.execute(changed, (customer,)).fetchone()  # the lock that keeps a customer's order
            if row is None:
                raise RefusedError(404, "no such customer")
            connection.execute("INSERT INTO shop_orders VALUES (%s, %s, %s)", (number, customer, row[0]))
            unit = secrets.randbits(63)  # readers see this order's messages all or none
            _send(connection, unit, customer, order=number, nth=row[0])
            missing = []
            for article in articles:
                try:
                    with connection.transaction():  # a savepoint: a line that fails takes its message along
                        _send(connection, unit, customer, order=number, article=article)
                        connection.execute("INSERT INTO shop_lines VALUES (%s, %s)", (number, article))
                except ForeignKeyViolation:
                    missing.append(article)
            if missing and missing == articles:
                raise RefusedError(422, "no such article")
        return missing


def _send(connection: psycopg.Connection[Any], unit: int, customer: str, **event: object) -> None:
    outbox.send(connection, "orders", json.dumps(event).encode(), key=customer.encode(), unit=unit)


class Request(BaseHTTPRequestHandler):
    """``PUT /orders/42``."""

    orders: Orders
    protocol_version = "HTTP/1.1"

    def do_PUT(self) -> None:
        """Take an order."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        status, answer = self._answer(int(self.path.rpartition("/")[2]), body["customer"], body["articles"])
        said = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def _answer(self, number: int, customer: str, articles: list[str]) -> tuple[int, object]:
        try:
            return 201, {"missing": self.orders.take(number, customer, articles)}
        except UniqueViolation:
            return 409, "this order exists"
        except RefusedError as error:
            return error.status, str(error)
        except (psycopg.OperationalError, OutboxFullError):  # ask again with the same number
            return 503, "no order is taken now"


def main(database: str, port: str = "8000", bootstrap: str = "txmq://127.0.0.1:8123") -> None:
    """Serve, until Ctrl-C."""
    Request.orders = orders = Orders(database)
    orders.prepare()
    with (
        txmq.connect(bootstrap, name="order-service", lazy=True) as client,
        client.relay(outbox, connect=orders.connect),
        ThreadingHTTPServer(("127.0.0.1", int(port)), Request) as server,
    ):
        server.serve_forever()


if __name__ == "__main__":
    if len(sys.argv) < 2:
        print(f"usage: {sys.argv[0]} CONNINFO [PORT [BOOTSTRAP]]", file=sys.stderr)
        sys.exit(2)
    try:
        main(*sys.argv[1:])
    except psycopg.OperationalError as error:
        sys.exit(f"cannot open the database: {' '.join(str(error).split())}")
