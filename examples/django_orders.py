"""Rows of Django's ORM and their messages in one transaction, and the relay that takes them to the broker.

docs/how-to/django.md has the same as a project, with a relay in a process of its own. Start a broker with
``txmq broker``, then, with what Django's DATABASES takes, as JSON::

    pip install '.[django]'
    python examples/django_orders.py '{"ENGINE": "django.db.backends.sqlite3", "NAME": "/tmp/orders.db"}'
    python examples/django_orders.py '{"ENGINE": "django.db.backends.mysql", "USER": "shop", "PASSWORD": "...",
        "NAME": "shop"}'
"""

from __future__ import annotations

import json
import sys

import django
from django.conf import settings
from django.core.management import call_command
from django.db import OperationalError, connection, models, transaction

import txmq
import txmq.django


def main(database: str, count: str = "10", bootstrap: str = "txmq://127.0.0.1:8123") -> None:
    """Take ``count`` orders."""
    given = json.loads(database)
    settings.configure(
        DATABASES={"default": {"ENGINE": "django.db.backends.mysql", **given}},
        INSTALLED_APPS=["txmq.django"],
        TXMQ={"NAME": "orders"},
        USE_TZ=True,
    )
    django.setup()

    class Order(models.Model):  # type: ignore[misc]  # Django has no types
        customer = models.CharField(max_length=40)

        class Meta:
            app_label, db_table = "shop", "orders_django"

    call_command("migrate", verbosity=0)
    if "orders_django" not in connection.introspection.table_names():  # your project has migrations for this
        with connection.schema_editor() as editor:
            editor.create_model(Order)
    with txmq.connect(bootstrap) as client, txmq.django.relay(client) as relay:
        client.topics.ensure("orders", partitions=4)
        for number in range(int(count)):
            with transaction.atomic():
                order = Order.objects.create(customer=f"customer-{number}")
                txmq.django.send("orders", f"created {order.pk}".encode(), key=order.customer.encode())
            print(f"order {order.pk} of {order.customer}")
        relay.drain(timeout=30)
        print(f"{Order.objects.count()} orders, {relay.sent} messages sent now")


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
