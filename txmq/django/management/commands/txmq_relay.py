"""``manage.py txmq_relay``: takes the messages of a database to the broker until SIGTERM or Ctrl-C."""

from __future__ import annotations

from typing import Any, Final

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DEFAULT_DB_ALIAS, Error, connections

import txmq
from txmq.django.outbox import relay, require_outbox
from txmq.django.settings import configured
from txmq.errors import ConfigError
from txmq.runtime.threads import Signal, until_terminated

_LOOK_S: Final = 1.0


class Command(BaseCommand):  # type: ignore[misc]  # Django has no types
    """See the module's docstring."""

    help = (
        "Take the messages of a database's outbox to the broker until SIGTERM or Ctrl-C. "
        "Any number may run: one works, the others stand by. A database or broker that is away is waited for."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        """Which database, and where the broker is."""
        parser.add_argument("--database", default=DEFAULT_DB_ALIAS, choices=tuple(connections), help="its alias")
        parser.add_argument("--bootstrap", help="where the brokers are; TXMQ['BOOTSTRAP'] by default")

    def handle(self, *_: Any, database: str, bootstrap: str | None, **__: Any) -> None:
        """Run until it is told to end."""
        ended = Signal()
        try:
            address = bootstrap or configured().bootstrap
            if address is None:
                raise CommandError("TXMQ has no BOOTSTRAP: where is the broker? e.g. txmq://127.0.0.1:8123")
            with (
                until_terminated(ended.set),
                txmq.connect(address, lazy=True) as client,
                relay(client, database) as running,
            ):
                self.stdout.write(f"relay of outbox {running.outbox.name}, database {database}")
                self.stdout.flush()
                while not ended.wait(_LOOK_S):
                    if running.refusal is not None:
                        require_outbox(database)
                    running.require_begun()
        except (ConfigError, Error) as error:
            raise CommandError(str(error)) from error
