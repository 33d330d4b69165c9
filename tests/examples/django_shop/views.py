"""The shop: one client a process, made when it is first needed, and three views under ATOMIC_REQUESTS."""

from __future__ import annotations

from functools import cache
from typing import Any

from django.conf import settings
from django.db import transaction
from django.http import HttpResponse
from django.urls import path

import txmq
from examples.django_last_resource import new_connection, together
from tests.examples.django_shop.models import Order
from txmq import LastResource

orders_db = LastResource("orders-db", connect=new_connection)
TOPIC = "orders"


@cache
def client() -> txmq.Client:
    """This process's client."""
    opened = txmq.connect(settings.BROKER)
    opened.topics.ensure(TOPIC)
    return opened


@cache
def producer() -> txmq.Producer:
    """This process's producer."""
    return client().producer()


@transaction.non_atomic_requests  # type: ignore[untyped-decorator]  # ``together`` is the transaction
def take(_request: Any, customer: str) -> HttpResponse:
    """Take an order."""
    with together(producer(), orders_db) as tx:
        Order.objects.create(customer=customer)
        tx.send(TOPIC, customer.encode())
    return HttpResponse(tx.outcome.value)


@transaction.non_atomic_requests  # type: ignore[untyped-decorator]
def fail(_request: Any, customer: str) -> HttpResponse:
    """Take an order, and find out too late."""
    with together(producer(), orders_db) as tx:
        Order.objects.create(customer=customer)
        tx.send(TOPIC, customer.encode())
        raise ValueError(customer)


def inside(request: Any, customer: str) -> HttpResponse:
    """As ``take``, inside of the transaction that ATOMIC_REQUESTS makes."""
    response: HttpResponse = take(request, customer)
    return response


urlpatterns = [path("take/<customer>", take), path("fail/<customer>", fail), path("inside/<customer>", inside)]
