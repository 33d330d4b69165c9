"""Requests under ATOMIC_REQUESTS: some take an order, others fail when it is taken."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db import IntegrityError, transaction
from django.http import HttpResponse
from django.urls import path

from tests.services.django_app.shop.models import Order
from txmq.django import send

TOPIC = "orders"


def order(customer: str, using: str = "default") -> None:
    """A row and its message."""
    Order.objects.using(using).create(customer=customer)
    send(TOPIC, customer.encode(), customer[:1].encode(), using=using)


def take(_request: Any, customer: str) -> HttpResponse:
    """Take an order."""
    order(customer)
    return HttpResponse("taken")


def fail(_request: Any, customer: str) -> HttpResponse:
    """Take one, and find out too late."""
    order(customer)
    raise ValueError(customer)


def take_back(_request: Any, customer: str) -> HttpResponse:
    """Take one, and answer well though it is rolled back."""
    order(customer)
    transaction.set_rollback(True)
    return HttpResponse("not taken")


def perhaps(_request: Any, customer: str) -> HttpResponse:
    """Take one in a savepoint, which ends with the duplicate; the request goes on."""
    try:
        with transaction.atomic():
            send(TOPIC, b"never", b"n")
            order(customer)
    except IntegrityError:
        return HttpResponse("there already")
    return HttpResponse("taken")


urlpatterns = [
    path("take/<customer>", take), path("fail/<customer>", fail), path("take-back/<customer>", take_back),
    path("perhaps/<customer>", perhaps), path("admin/", admin.site.urls),
]  # fmt: skip
