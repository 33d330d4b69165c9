"""The project's own app."""

from __future__ import annotations

from django.apps import AppConfig


class ShopConfig(AppConfig):  # type: ignore[misc]  # Django has no types
    """Its label is shorter than its path."""

    name = "tests.services.django_app.shop"
    label = "shop"
