"""A relay of the campaign: ``python -m tools.crash.outbox.relay CONFIG [RULE]``: ``txmq outbox run``.

Its lease is shorter than a relay's, so that a campaign has more of the moments in which one takes over from another. No
promise rests on how long it is. ``RULE`` is taken away from the relay: a campaign must notice that.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final
from unittest.mock import patch

from tools.outbox_model import mutations
from txmq.cli import main as cli
from txmq.client.relay import database_side
from txmq.outbox.page import Waiting
from txmq.outbox.tables import OutboxTables

LEASE_S: Final = 1.0
WAITING: Final = OutboxTables.waiting


def _backwards(*given: Any) -> Waiting:
    found = WAITING(*given)
    return found._replace(rows=list(reversed(found.rows)))


_OF_THE_DATABASE: Final = {"lowest_id_first": _backwards}


@contextmanager
def without(rule: str) -> Iterator[None]:
    """With a rule of the relay taken away: one of these, or of ``tools/outbox_model/mutations.py``; empty: none."""
    with mutations.broken(rule):
        if rule in _OF_THE_DATABASE:
            with patch.object(OutboxTables, "waiting", _OF_THE_DATABASE[rule]):
                yield
        else:
            yield


def main(config: str, rule: str = "") -> None:
    """Until SIGTERM."""
    sys.argv = ["txmq", "outbox", "run", "--config", config]
    with patch.object(database_side, "LEASE_MS", int(LEASE_S * 1000)), without(rule):
        cli.main()


if __name__ == "__main__":
    main(*sys.argv[1:])
