"""What an operator does to the outboxes of a campaign."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing

from typer.testing import CliRunner, Result

from tools.crash.outbox.directory import OutboxCampaignDirectory
from tools.crash.processes import CampaignError
from txmq.cli import resolver
from txmq.cli.outbox import app
from txmq.xa.database.outbox_homes import PARKED
from txmq.xa.database.outbox_tables import OutboxTables
from txmq.xa.last_resource.resolving import ResolvingConnection

_LISTED_MAX = 10_000


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
    """Why ``txmq outbox drain`` does not drain.

    Raises:
        CampaignError: it says nothing.
    """
    told = _outbox(world, "drain", "--json")
    if not told.stdout:
        raise CampaignError(f"txmq outbox drain: {told.exception!r}")
    return [str(problem) for problem in json.loads(told.stdout)["problems"]]


def renumber(world: OutboxCampaignDirectory, resource: str) -> None:
    """``txmq outbox renumber``.

    Raises:
        CampaignError: it is refused.
    """
    answer = _outbox(world, "renumber", "--yes", resource)
    if answer.exit_code != 0:
        raise CampaignError(f"txmq outbox renumber: {answer.output}{answer.exception!r}")


def adopt(world: OutboxCampaignDirectory) -> None:
    """``txmq resolver adopt``: the restored broker knows an older fencing token.

    Raises:
        CampaignError: it is refused.
    """
    answer = CliRunner().invoke(resolver.app, ["adopt", "--yes", "--config", str(world.resolver_config)])
    if answer.exit_code != 0:
        raise CampaignError(f"txmq resolver adopt: {answer.output}{answer.exception!r}")


def _outbox(world: OutboxCampaignDirectory, *words: str) -> Result:
    """In this process: an interpreter that starts beside twenty busy ones takes half a minute, and orders go on."""
    return CliRunner().invoke(app, [*words, "--config", str(world.resolver_config)])
