"""The service's tables."""

from __future__ import annotations

from typing import Any

from django.db import models
from django.db.models.signals import post_migrate


class Customer(models.Model):  # type: ignore[misc]  # Django has no types
    """A customer; the row is the lock that keeps a customer's messages in order."""

    name = models.CharField(max_length=40, primary_key=True)
    orders = models.IntegerField(default=0)

    class Meta:
        """Its table."""

        db_table = "shop_customers"


class Article(models.Model):  # type: ignore[misc]  # Django has no types
    """What can be ordered."""

    name = models.CharField(max_length=40, primary_key=True)

    class Meta:
        """Its table."""

        db_table = "shop_articles"


class Order(models.Model):  # type: ignore[misc]  # Django has no types
    """A customer's ``nth`` order."""

    number = models.IntegerField(primary_key=True)
    customer = models.ForeignKey(Customer, models.PROTECT, db_column="customer")
    nth = models.IntegerField()

    class Meta:
        """Its table."""

        db_table = "shop_orders"


class Line(models.Model):  # type: ignore[misc]  # Django has no types
    """An article of an order."""

    pk = models.CompositePrimaryKey("order", "article")
    order = models.ForeignKey(Order, models.PROTECT, db_column="number")
    article = models.ForeignKey(Article, models.PROTECT, db_column="article")

    class Meta:
        """Its table."""

        db_table = "shop_lines"


def _begin(**_: Any) -> None:
    """What the shop begins with; harmless to repeat."""
    for name in ("ada", "ben", "cleo"):
        Customer.objects.get_or_create(name=name)
    for name in ("cup", "tea"):
        Article.objects.get_or_create(name=name)


post_migrate.connect(_begin)
