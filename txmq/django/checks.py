"""What ``manage.py check`` says: is ``TXMQ`` right, can each database have an outbox, are its commits durable?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.conf import settings
from django.core import checks
from django.db import connections, router

from txmq.django.outbox import connector, is_in_memory, outbox_of
from txmq.django.settings import configured, problems
from txmq.model import is_valid_name
from txmq.xa.database.dbapi import run
from txmq.xa.database.dialects import DIALECTS

_LEFT_OUT = "a database router whose allow_migrate() is False for the app 'txmq' leaves a database out"


def register() -> None:
    """Let Django call them."""
    checks.register(check_settings, "txmq")
    checks.register(check_durability, checks.Tags.database)


def check_settings(**_: Any) -> list[checks.CheckMessage]:
    """Errors of ``TXMQ``, and databases that can have no outbox."""
    wrong = [checks.Error(problem, id="txmq.E001") for problem in problems(getattr(settings, "TXMQ", {}))]
    return wrong or [error for alias in connections if _has_outbox(alias) for error in _of_database(alias)]


def _of_database(alias: str) -> list[checks.CheckMessage]:
    vendor, name = connections[alias].vendor, configured().name_of(alias)
    found = []
    if vendor not in DIALECTS:
        what = f"database {alias!r} is {vendor}: an outbox is in {', '.join(DIALECTS)}"
        found.append(checks.Error(what, hint=_LEFT_OUT, id="txmq.E002"))
    if not is_valid_name(name):
        what = f"database {alias!r} makes the outbox's name {name[:80]!r}: expected A-Z a-z 0-9 . _ -"
        found.append(checks.Error(what, hint=_LEFT_OUT, id="txmq.E003"))
    return found


def check_durability(databases: Sequence[str] | None = None, **_: Any) -> list[checks.CheckMessage]:
    """A server on which a relay would refuse to work."""
    if getattr(settings, "TXMQ", {}).get("DURABILITY") == "weak":
        return []
    return [
        checks.Warning(
            f"database {alias!r}: no relay works on it, a power loss may take its commits back: {weakness}",
            id="txmq.W001",
        )
        for alias in databases or ()
        if _has_outbox(alias) and connections[alias].vendor in DIALECTS
        if (weakness := _weakness(alias)) is not None
    ]


def _weakness(alias: str) -> str | None:
    """As a relay sees it: what a session may set for itself, a relay sets. A database in memory has no relay."""
    if is_in_memory(alias):
        return None
    connection = connector(alias)()
    try:
        tables = outbox_of(alias).tables(connection)
        for statement in tables.for_relays(connection):
            run(connection, statement)
        connection.commit()
        return tables.dialect.weakness(connection)
    finally:
        connection.close()


def _has_outbox(alias: str) -> bool:
    """Whether migrations make the tables there; ``"default": {}`` is no database."""
    if connections[alias].settings_dict["ENGINE"] == "django.db.backends.dummy":
        return False
    return bool(router.allow_migrate(alias, "txmq", model_name="waiting"))
