"""The owner of one transaction with a last resource, as a process: ``python -m tests.services.xa.shop_owner JSON``.

JSON: address, driver and arguments of its ``connect``, value, timeout; ``stops``: it stands still in the block's body.
Elsewhere it stands still, or dies, where ``TXMQ_CRASH`` says.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys

import txmq
from txmq.xa import LastResource


def main(text: str) -> None:
    """A row and a message."""
    given = json.loads(text)
    connect = importlib.import_module(given["driver"]).connect
    database = LastResource("shop", connect=lambda: connect(**given["arguments"]))
    with (
        txmq.connect(given["address"]) as client,
        client.producer().transaction(database, timeout=given["timeout"]) as tx,
    ):
        tx.connection(database).cursor().execute("INSERT INTO sold VALUES (%s)", (given["value"],))
        tx.send("orders", given["value"].encode(), key=given["value"].encode())  # nobody waits for its order
        if given["stops"]:
            os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    main(sys.argv[1])
