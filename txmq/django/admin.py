"""Django's admin shows which messages wait and which are parked, and why. It changes nothing."""

from __future__ import annotations

from typing import Any

from django.contrib import admin

from txmq.django.models import Parked, Waiting

_SHOWN_MAX = 4000


class _ReadOnly(admin.ModelAdmin):  # type: ignore[misc]  # Django has no types
    show_full_result_count = False
    list_filter = ("topic",)
    fields: tuple[str, ...] = ("id", "topic", "key", "unit", "created", "content")
    list_display: tuple[str, ...] = ("id", "topic", "key", "unit", "created")

    def has_add_permission(self, _request: Any) -> bool:
        """Messages are sent, not added."""
        return False

    def has_change_permission(self, _request: Any, _row: Any = None) -> bool:
        """What is sent is sent."""
        return False

    def has_delete_permission(self, _request: Any, _row: Any = None) -> bool:
        """An operator drops messages, with all that belongs to them."""
        return False

    def key(self, row: Waiting | Parked) -> str:
        """The message's key, as text."""
        return "" if row.message_key is None else _text(row.message_key)

    def content(self, row: Waiting | Parked) -> str:
        """The message's value, as text."""
        return _text(row.value)


@admin.register(Waiting)
class WaitingAdmin(_ReadOnly):
    """Messages that no relay has taken to the broker yet."""


@admin.register(Parked)
class ParkedAdmin(_ReadOnly):
    """Messages that the broker refuses, or that stand after such a one."""

    fields = (*_ReadOnly.fields, "why", "since")
    list_display = (*_ReadOnly.list_display, "why", "since")


def _text(found: Any) -> str:
    return bytes(found[:_SHOWN_MAX]).decode("utf-8", "backslashreplace")
