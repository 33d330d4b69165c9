"""Django's admin shows which messages wait and which are parked, and why; with the permission, it releases and drops.

These acts are an operator's (``txmq/client/relay/operator.py``): of whole units, on a connection of their own, under
the lock of the relay's row. They begin when the request's own transaction has committed: in SQLite it would keep them
out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from django.contrib import admin
from django.db import transaction
from django.http import HttpResponse
from django.template import engines

from txmq.client.relay.operator import Operator
from txmq.django.models import Parked, Waiting
from txmq.django.outbox import connector, outbox_of

_SHOWN_MAX = 4000
_CONFIRMATION: Final = """{% extends "admin/base_site.html" %}{% block content %}
<p>These messages, and all that belong to one unit with them, are deleted for good. No reader will see them.</p>
<ul>{% for row in rows %}<li>{{ row }}</li>{% endfor %}</ul>
<form method="post">{% csrf_token %}
{% for row in rows %}<input type="hidden" name="_selected_action" value="{{ row.pk }}">{% endfor %}
<input type="hidden" name="action" value="drop"><input type="hidden" name="confirmed" value="yes">
<input type="submit" value="Drop them"></form>{% endblock %}"""


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
    actions = ("release", "drop")

    def has_release_permission(self, request: Any) -> bool:
        """Whether the user may let parked messages wait again."""
        return bool(request.user.has_perm("txmq.release_parked"))

    def has_drop_permission(self, request: Any) -> bool:
        """Whether the user may drop parked messages."""
        return bool(request.user.has_perm("txmq.drop_parked"))

    @admin.action(description="Release: their units wait again", permissions=["release"])  # type: ignore[untyped-decorator]
    def release(self, request: Any, chosen: Any) -> None:
        """Let them wait again; a relay parks again what must wait for others."""
        self._act(request, chosen, lambda operator, units: operator.release(units), "wait again")

    @admin.action(description="Drop: their units are deleted", permissions=["drop"])  # type: ignore[untyped-decorator]
    def drop(self, request: Any, chosen: Any) -> HttpResponse | None:
        """Delete them, when that was confirmed."""
        if request.POST.get("confirmed") != "yes":
            context = self.admin_site.each_context(request) | {"title": "Drop messages", "rows": chosen}
            return HttpResponse(engines["django"].from_string(_CONFIRMATION).render(context, request))
        self._act(request, chosen, lambda operator, units: operator.drop(units), "are dropped")
        return None

    def _act(self, request: Any, chosen: Any, act: Callable[[Operator, Sequence[int]], int], done: str) -> None:
        alias = chosen.db
        units = sorted({row if unit is None else unit for row, unit in chosen.values_list("id", "unit")})

        def after_commit() -> None:
            outbox = outbox_of(alias)
            with Operator(outbox, connector(alias)) as operator:
                count = act(operator, units)
            outbox.wake()
            self.message_user(request, f"{count} messages {done}.")

        transaction.on_commit(after_commit, using=alias)


def _text(found: Any) -> str:
    return bytes(found[:_SHOWN_MAX]).decode("utf-8", "backslashreplace")
