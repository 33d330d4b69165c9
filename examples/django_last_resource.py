"""Rows of Django's ORM and a message, both or neither, on Django's own database connection.

``together`` is all there is to it; docs/how-to/django.md says how it goes with views, hooks and tests. Start a broker
with ``txmq broker``, then, with what Django's DATABASES takes, as JSON::

    pip install django  # and mysqlclient, or psycopg
    python examples/django_last_resource.py '{"ENGINE": "django.db.backends.sqlite3", "NAME": "/tmp/shop.db"}'
    python examples/django_last_resource.py '{"ENGINE": "django.db.backends.mysql", "USER": "shop", "PASSWORD": "...",
        "NAME": "shop", "OPTIONS": {"read_timeout": 30}}'
    python examples/django_last_resource.py '{"ENGINE": "django.db.backends.postgresql", "USER": "shop",
        "PASSWORD": "...", "NAME": "shop"}'
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import django
from django.conf import settings
from django.db import DEFAULT_DB_ALIAS, Error, OperationalError, connection, connections, models, transaction

import txmq
from txmq import LastResource


class _TakenBackError(Exception):
    """``transaction.set_rollback(True)``, or a statement that failed and was caught: Django rolls back and goes on."""


@contextmanager
def together(
    producer: txmq.Producer, orders_db: LastResource, alias: str = DEFAULT_DB_ALIAS, timeout: float = 10.0
) -> Iterator[txmq.Transaction]:
    """A block in which what the ORM writes and what ``tx.send`` sends commit together; Django sees ``atomic(durable)``.

    ``transaction.atomic`` inside is a savepoint. Hooks of ``transaction.on_commit`` run after the commit; they are
    forgotten if the block rolls back. Inside of a TestCase nothing is ever committed: there the rows are a savepoint,
    and the messages a transaction of their own.

    Raises:
        RuntimeError: the block stands inside of another ``atomic``, such as that of ATOMIC_REQUESTS.
        txmq.RolledBackError: neither row nor message; a BrokerAwayError is one.
        txmq.OutcomeUnknownError: the connection was lost at the commit.
    """
    with (
        suppress(_TakenBackError),
        _lent(orders_db, connections[alias]) as lent,
        producer.transaction(*lent, timeout=timeout) as tx,
        transaction.atomic(alias, savepoint=not lent, durable=True),
    ):
        yield tx
        if connections[alias].needs_rollback:
            raise _TakenBackError


@contextmanager
def _lent(orders_db: LastResource, database: Any) -> Iterator[list[Any]]:
    """Django's connection as a resource of txmq, out of autocommit until the block is over."""
    if database.in_atomic_block:  # a TestCase's; any other one is refused by ``durable``
        yield []
        return
    database.set_autocommit(False)
    try:
        yield [orders_db.using(database.connection)]
    except BaseException:
        try:
            database.rollback()  # the rows are gone: this is for the hooks and flags that Django keeps
            database.set_autocommit(True)
        except Error:
            database.close()
        raise
    hooks, database.run_on_commit = database.run_on_commit, []
    try:
        database.set_autocommit(True)
    except Error:  # lost after the commit, so this is no failure of the block
        database.close()
    database.run_on_commit = hooks
    database.run_and_clear_commit_hooks()


def new_connection(alias: str = DEFAULT_DB_ALIAS) -> Any:
    """A connection by Django's settings that Django does not know of: for the resolver, which keeps its own."""
    database = connections[alias].copy()
    return database.get_new_connection(database.get_connection_params())


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
        orders_db = LastResource("orders-db", connect=new_connection)
        client.topics.ensure("orders", partitions=4)
        orders_db.install(client)
        for number in range(int(count)):
            with together(producer, orders_db) as tx:
                order = Order.objects.create(customer=f"customer-{number}")
                tx.send("orders", f"created {order.pk}".encode(), key=order.customer.encode())
            print(f"order {order.pk} of {order.customer}")
        print(f"{Order.objects.count()} orders")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        print(f"usage: {sys.argv[0]} DJANGO_DATABASE_AS_JSON [COUNT [BOOTSTRAP]]", file=sys.stderr)
        sys.exit(2)
    try:
        main(*sys.argv[1:])
    except txmq.BrokerAwayError as error:
        sys.exit(f"the broker is away: {error}")
    except (OperationalError, json.JSONDecodeError) as error:
        sys.exit(f"cannot open the database: {error}")
