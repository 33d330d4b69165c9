"""``PUT /orders/42``: each request is one transaction, and its messages are part of it."""

from __future__ import annotations

import json
from typing import Any

from django.db import IntegrityError, InterfaceError, OperationalError, transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import path

from examples.order_service_django.models import Article, Customer, Line, Order
from txmq.django import send
from txmq.errors import OutboxFullError


class Refusals:
    """Middleware: an answer for each error of a view. Its transaction has been rolled back by then."""

    def __init__(self, get_response: Any) -> None:
        self._get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        return self._get_response(request)

    def process_exception(self, _request: HttpRequest, error: Exception) -> HttpResponse | None:
        """Django calls it."""
        match error:
            case Customer.DoesNotExist():
                return JsonResponse({"error": "no such customer"}, status=404)
            case IntegrityError():
                return JsonResponse({"error": "this order exists"}, status=409)
            case Article.DoesNotExist():
                return JsonResponse({"error": "no such article"}, status=422)
            case OperationalError() | InterfaceError() | OutboxFullError():  # ask again with the same number
                return JsonResponse({"error": "no order is taken now"}, status=503, headers={"retry-after": "1"})
        return None


def put(request: HttpRequest, number: int) -> HttpResponse:
    """The order, and a line for each article that there is; the articles that there are not."""
    body = json.loads(request.body)
    customer = Customer.objects.select_for_update().get(name=body["customer"])
    customer.orders += 1
    customer.save()
    key, order = customer.name.encode(), Order(number=number, customer=customer, nth=customer.orders)
    order.save(force_insert=True)
    send("orders", {"order": number, "nth": order.nth}, key=key)
    missing = []
    for name in body["articles"]:
        try:
            with transaction.atomic():  # a line that fails takes its message along
                send("orders", {"order": number, "article": name}, key=key)
                Line.objects.create(order=order, article=Article.objects.get(name=name))
        except Article.DoesNotExist:
            missing.append(name)
    if missing and missing == body["articles"]:
        raise Article.DoesNotExist
    return JsonResponse({"missing": missing}, status=201)


urlpatterns = [path("orders/<int:number>", put)]
