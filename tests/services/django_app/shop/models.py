"""Orders; a customer has one at a time."""

from __future__ import annotations

from django.db import models


class Order(models.Model):  # type: ignore[misc]  # Django has no types
    """One order."""

    customer = models.CharField(max_length=40, unique=True)

    class Meta:
        app_label = "shop"

    def __str__(self) -> str:
        return str(self.customer)
