"""Requests to the project in a process of its own: ``python -m tests.services.django_app.shop.traffic FIRST COUNT``.

Each number is asked for twice, so that the second request meets a duplicate key, and some fail or take back what they
did. Prints the rows at the end, as JSON.
"""

from __future__ import annotations

import json
import sys

import django

django.setup()

from django.test import Client  # noqa: E402  once the project is set up

from tests.services.django_app.shop.models import Order  # noqa: E402

PATHS = ("take", "fail", "take", "take-back")


def main(first: str, count: str) -> None:
    """Ask for so many orders."""
    client = Client(raise_request_exception=False)
    for number in range(int(first), int(first) + int(count)):
        for _ in range(2):
            client.get(f"/{PATHS[number % len(PATHS)]}/{number % 7}-{number:05}")
    print(json.dumps([str(customer) for customer in Order.objects.order_by("id").values_list("customer", flat=True)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
