"""A client that takes one order: ``python -m tools.crash.one_order DIRECTORY ADDRESS NAME TIMEOUT_S``.

It says, on standard output, the transaction's id when the block begins, and at the end ``committed``, ``rolled-back``
or ``unknown``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import txmq
from tools.crash.directory import ORDERS, CampaignDirectory
from tools.crash.processes import connect


def main(directory: str, address: str, name: str, timeout: str) -> None:
    """One row, one message."""
    with connect(address, name) as client, client.producer() as producer:
        database = CampaignDirectory(Path(directory)).resource()
        try:
            with producer.transaction(database, timeout=float(timeout)) as tx:
                _say(str(tx.txid))
                statement = "INSERT INTO orders (rowid_text, key) VALUES (?, 'k')"
                tx.connection(database).cursor().execute(statement, (name,))
                producer.send(ORDERS, name.encode(), key=b"k")
        except txmq.RolledBackError as error:
            sys.stderr.write(f"{error!r}\n")
            _say("rolled-back")
        except txmq.OutcomeUnknownError as error:
            sys.stderr.write(f"{error!r}\n")
            _say("unknown")
        else:
            _say("committed")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
