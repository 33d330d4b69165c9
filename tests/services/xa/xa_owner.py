"""The owner of one XA transaction, as a process that dies: ``python -m tests.services.xa.xa_owner JSON``.

JSON: address, databases (connect arguments), value, topic, timeout, and perhaps partitions, which get a message each.
It dies where ``TXMQ_CRASH`` says.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import MySQLdb

import txmq
from txmq.client.transaction.block import Transaction
from txmq.xa import MySQLResource

NAMES = ("bank-a", "bank-b")


def resources(databases: list[dict[str, Any]]) -> list[MySQLResource]:
    """The databases as XA resources."""
    return [
        MySQLResource(name, connect=lambda arguments=arguments: MySQLdb.connect(**arguments))  # type: ignore[misc]
        for name, arguments in zip(NAMES, databases, strict=True)
    ]


def transfer(
    producer: txmq.Producer, banks: list[MySQLResource], value: str, topic: str, timeout: float = 30.0,
    partitions: Sequence[int | None] = (None,),
) -> Transaction:  # fmt: skip
    """A row in each database, and a message for each partition; None: the key's."""
    with producer.transaction(*banks, timeout=timeout) as tx:
        for bank in banks:
            tx.connection(bank).cursor().execute("INSERT INTO transfers VALUES (%s)", (value,))
        for partition in partitions:
            producer.send(topic, value.encode(), key=b"k", partition=partition)
    return tx


def main(text: str) -> None:
    """One transaction."""
    given = json.loads(text)
    with txmq.connect(given["address"]) as client:
        banks = resources(given["databases"])
        partitions = given.get("partitions", [None])
        transfer(client.producer(), banks, given["value"], given["topic"], given["timeout"], partitions)


if __name__ == "__main__":
    main(sys.argv[1])
