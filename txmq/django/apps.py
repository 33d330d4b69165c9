"""The app: checks, the relay's row after each ``migrate``, and the warning of ``stray_sends.py``."""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig
from django.db import connections, router
from django.db.models.signals import post_migrate

from txmq.outbox.outbox import new_uuid
from txmq.runtime.caller import SEND_WATCHERS


class TxmqConfig(AppConfig):  # type: ignore[misc]  # Django has no types
    """``INSTALLED_APPS += ["txmq.django"]``."""

    name = "txmq.django"
    label = "txmq"
    verbose_name = "txmq"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Register what Django calls."""
        from txmq.django import checks, stray_sends

        checks.register()
        post_migrate.connect(_name_outbox, sender=self)
        SEND_WATCHERS.append(stray_sends.warn_once)


def _name_outbox(using: str, **_: Any) -> None:
    """See to it that there is the relay's row, which names the outbox: a ``flush`` takes it away with the rest."""
    from txmq.django.models import RelayRow
    from txmq.django.sending import outbox_of

    connection = connections[using]
    if not router.allow_migrate_model(using, RelayRow):
        return
    tables = outbox_of(using).tables(connection)
    with connection.cursor() as cursor:
        is_there = tables.relay in connection.introspection.table_names(cursor)
    if is_there and tables.peek(connection) is None:
        tables.create(connection, new_uuid())
