"""What is there at the end: in the log (by the client, and by the files alone), in the database, in doubt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import txmq
from tools.checkers.events import History, Log
from tools.crash.directory import CampaignDirectory, HistoryFile
from tools.crash.reader import text_of


def in_doubt(address: str) -> set[str]:
    """Transactions that are prepared now."""
    with txmq.connect(address) as client:
        return listed(client)


def listed(client: txmq.Client) -> set[str]:
    """The same through an open client."""
    return {str(item["txid"]) for item in client.transactions.list(state="in-doubt")}


def write(world: CampaignDirectory, address: str, history: HistoryFile, left: Iterable[str]) -> None:
    """Read everything and write it to the history; the writers are at rest."""
    history.write("in-doubt", "ok", "in-doubt", sorted(left))
    history.write("drain", "ok", "drain", drain(address, world.partitions, world.since))
    history.write("rows", "ok", "rows", [["rows", resource, rows] for resource, rows in world.rows().items()])


def ask_for_outcomes(client: txmq.Client, known: History, history: HistoryFile) -> None:
    """Write to the history what a client says of killed and unknown transactions, to be held to what is there."""
    unknown = [item for item in known.operations.values() if item.status == "info" and item.txid]
    for operation in unknown:
        with suppress(txmq.errors.FencedError):  # no longer kept
            outcome = client.outcome(str(operation.txid))
            if outcome is not txmq.Outcome.UNKNOWN:
                history.write("outcome", "ok", operation.id, [outcome.value])


def drain(
    address: str, partitions: Mapping[str, int], since: Mapping[Log, int] = MappingProxyType({})
) -> list[list[Any]]:
    """Every message of every partition, as the history's format wants it; from these offsets on, where given."""
    found: dict[Log, list[Any]] = {}
    with txmq.connect(address) as client:
        for topic, count in partitions.items():
            for partition in range(count):
                start = max(client.offsets(topic, partition).start, since.get((topic, partition), 0))
                found[topic, partition] = [topic, partition, start, []]
            for message in client.browse(topic):
                part = found[topic, message.partition]
                if message.offset >= part[2]:
                    part[3].append([message.offset, text_of(message.value), (message.key or b"").decode()])
    return [["drain", *part] for part in found.values()]
