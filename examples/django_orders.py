"""Rows of Django's ORM and a message, both or neither, on Django's own database connection.

``together`` is all there is to it: it lends Django's connection to a transaction of txmq's. Works the same in a view.
Start a broker with ``txmq broker``, then, with what Django's DATABASES takes, as JSON::

    python examples/django_orders.py '{"HOST": "127.0.0.1", "USER": "shop", "PASSWORD": "...", "NAME": "shop"}'
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import django
import MySQLdb
from django.conf import settings
from django.db import connection, models, transaction

import txmq
from txmq.client.transaction import Transaction
from txmq.xa import LastResource


@contextmanager
def together(producer: txmq.Producer, orders_db: LastResource) -> Iterator[Transaction]:
    """A block in which what the ORM writes and what the producer sends commit together.

    The connection leaves autocommit for the block; ``transaction.atomic`` inside becomes a savepoint. An exception
    rolls rows and messages back.
    """
    connection.ensure_connection()
    transaction.set_autocommit(False)
    try:
        with producer.transaction(orders_db.using(connection.connection), timeout=10.0) as tx:
            yield tx
    finally:
        transaction.set_autocommit(True)


def main(database: str, count: str = "10", bootstrap: str = "txmq://127.0.0.1:8123") -> None:
    """Take ``count`` orders."""
    given = json.loads(database)
    settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.mysql", **given}}, USE_TZ=True)
    django.setup()

    class Order(models.Model):  # type: ignore[misc]  # Django has no types
        customer = models.CharField(max_length=40)

        class Meta:
            app_label, db_table = "shop", "orders_django"

    if "orders_django" not in connection.introspection.table_names():  # your project has migrations for this
        with connection.schema_editor() as editor:
            editor.create_model(Order)
    connection.close()
    with txmq.connect(bootstrap) as client, client.producer() as producer:
        # The resolver needs connections of its own: ``connect`` makes them with Django's own settings.
        orders_db = LastResource("orders-db", connect=lambda: MySQLdb.connect(**_arguments()))
        orders_db.install(client)
        client.topics.ensure("orders", partitions=4)
        for number in range(int(count)):
            with together(producer, orders_db), transaction.atomic():
                order = Order.objects.create(customer=f"customer-{number}")
                producer.send("orders", f"created {order.pk}".encode(), key=order.customer.encode())
            print(f"order {order.pk} of {order.customer}")
        print(f"{Order.objects.count()} orders")


def _arguments() -> dict[str, Any]:
    arguments: dict[str, Any] = connection.get_connection_params()
    return arguments | {"read_timeout": 30}


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(f"usage: {sys.argv[0]} DJANGO_DATABASE_AS_JSON [COUNT [BOOTSTRAP]]")
    try:
        main(*sys.argv[1:])
    except txmq.BrokerAwayError as error:
        sys.exit(f"the broker is away: {error}")
