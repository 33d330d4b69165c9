"""What an operator does to the outboxes of a campaign."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing

from tools.crash.outbox.directory import OutboxCampaignDirectory
from tools.crash.processes import ROOT, CampaignError
from txmq.xa.database.outbox_tables import PARKED, OutboxTables
from txmq.xa.last_resource.resolving import ResolvingConnection

_LISTED_MAX = 10_000
_COMMAND_S = 120.0


def parked(world: OutboxCampaignDirectory) -> int:
    """How many rows are parked."""
    return sum(
        state == PARKED
        for database in _databases(world)
        for _, state, *_ in _tables(database).listed(database.connection, _LISTED_MAX)
    )


def release(world: OutboxCampaignDirectory) -> None:
    """Release every row that is parked and can be released by now."""
    for database in _databases(world):
        tables = _tables(database)
        for row, state, *_ in tables.listed(database.connection, _LISTED_MAX):
            if state == PARKED:
                tables.release(database.connection, row)


def _databases(world: OutboxCampaignDirectory) -> Iterator[ResolvingConnection]:
    for resource in (world.resource(), world.ledger()):
        with closing(resource.open_for_operator()) as database:
            yield database


def _tables(database: ResolvingConnection) -> OutboxTables:
    assert database.outbox is not None, "both resources have one"
    return database.outbox


def problems(world: OutboxCampaignDirectory) -> list[str]:
    """Why ``txmq outbox drain`` does not drain."""
    answer = json.loads(_outbox(world, "drain", "--json").stdout)
    return [str(problem) for problem in answer["problems"]]


def renumber(world: OutboxCampaignDirectory, resource: str) -> None:
    """``txmq outbox renumber``.

    Raises:
        CampaignError: it is refused.
    """
    answer = _outbox(world, "renumber", "--yes", resource)
    if answer.returncode != 0:
        raise CampaignError(f"txmq outbox renumber: {answer.stdout}{answer.stderr}")


def _outbox(world: OutboxCampaignDirectory, command: str, *words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "txmq.cli.main", "outbox", command, "--config", str(world.resolver_config), *words]
    return subprocess.run(line, capture_output=True, text=True, timeout=_COMMAND_S, check=False, cwd=ROOT)
