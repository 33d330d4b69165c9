"""The app: checks, the relay's row after each ``migrate``, and the warning of a ``producer.send`` in ``atomic()``."""

from __future__ import annotations

import warnings
from typing import Any

from django.apps import AppConfig
from django.db import connections, router
from django.db.models.signals import post_migrate

from txmq.outbox.outbox import new_uuid
from txmq.runtime.caller import SEND_WATCHERS

_FRAMES = 4  # up to the caller of ``producer.send``


def warn_once() -> None:
    """Warn once where ``producer.send`` is called in ``atomic()``: its message stays when the transaction rolls back.

    Called for each message that joins no transaction of txmq's; looks at this thread's connections.
    """
    for connection in connections.all(initialized_only=True):
        if _is_in_atomic(connection):
            SEND_WATCHERS.remove(warn_once)
            warnings.warn(
                f"producer.send() in atomic() of database {connection.alias!r}: its message is sent at once, and stays "
                "if the transaction rolls back; txmq.django.send() writes one that is sent when it commits",
                RuntimeWarning,
                stacklevel=_FRAMES,
            )
            return


def _is_in_atomic(connection: Any) -> bool:
    """Whether a block is open that is not the one of a TestCase."""
    return any(not getattr(block, "_from_testcase", False) for block in connection.atomic_blocks)


class TxmqConfig(AppConfig):  # type: ignore[misc]  # Django has no types
    """``INSTALLED_APPS += ["txmq.django"]``."""

    name = "txmq.django"
    label = "txmq"
    verbose_name = "txmq"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Register what Django calls."""
        from txmq.django import apps, checks

        checks.register()
        post_migrate.connect(_name_outbox, sender=self)
        SEND_WATCHERS.append(apps.warn_once)


def _name_outbox(using: str, **_: Any) -> None:
    """See to it that there is the relay's row, which names the outbox: a ``flush`` takes it away with the rest."""
    from txmq.django.models import RelayRow
    from txmq.django.outbox import outbox_of

    connection = connections[using]
    if not router.allow_migrate_model(using, RelayRow):
        return
    tables = outbox_of(using).tables(connection)
    with connection.cursor() as cursor:
        is_there = tables.relay in connection.introspection.table_names(cursor)
    if is_there and tables.peek(connection) is None:
        tables.create(connection, new_uuid())
