"""Messages into MySQL, each with its effect exactly once: the offset is saved in the transaction that books the amount.

Amounts from the topic ``amounts`` are added up per customer. Adding is not idempotent: a message that came twice would
be seen. Start a broker with ``txmq broker``; then, with what ``MySQLdb.connect`` takes for your server, as JSON::

    python examples/exactly_once_into_mysql.py '{"host": "127.0.0.1", "user": "shop", "passwd": "...", "db": "shop"}'
    echo ada,250 | txmq produce --topic amounts --key ,

Kill it, the broker or the server at any moment, pause it while another one takes over, and start them again: the totals
are right.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from typing import Any

import MySQLdb

import txmq
from txmq.errors import StorageError

TOTALS = "CREATE TABLE IF NOT EXISTS totals (customer VARCHAR(40) PRIMARY KEY, amount BIGINT NOT NULL) ENGINE=InnoDB"
BOOK = "INSERT INTO totals (customer, amount) VALUES (%s, %s) ON DUPLICATE KEY UPDATE amount = amount + VALUES(amount)"


class Ledger:
    """Books amounts, over one connection; one thread."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._arguments = arguments
        self._connection: Any = None

    def book(self, message: txmq.Message) -> None:
        """The amount and the offset in one transaction. What fails is rolled back, and delivered again."""
        if self._connection is None:
            self._connection = MySQLdb.connect(**self._arguments)
        try:
            customer, amount = (message.key or b"").decode(), int(message.value or b"0")
            self._connection.cursor().execute(BOOK, (customer, amount))
            message.ack(self._connection)  # raises if another consumer has the partition now
            self._connection.commit()
        except BaseException:
            broken, self._connection = self._connection, None
            with suppress(MySQLdb.Error):  # a refused ack has closed it, and a second time is an error
                broken.close()
            raise


def main(arguments: str, bootstrap: str = "txmq://127.0.0.1:8123") -> None:
    """Book until SIGTERM or Ctrl-C."""
    database = json.loads(arguments)
    quickly = database | {"connect_timeout": 2}  # the consumer's heartbeat waits for its store
    store = txmq.DatabaseOffsetStore(lambda: MySQLdb.connect(**quickly))
    connection = MySQLdb.connect(**database)
    connection.cursor().execute(TOTALS)
    connection.close()
    with txmq.connect(bootstrap) as client:
        client.topics.ensure("amounts", partitions=4)
        store.install()
        # A database that is away is not the message's fault: no dead letters, however long that takes.
        consumer = client.consumer("totals", ["amounts"], offset_store=store, max_retries=1_000_000)
        consumer.run(Ledger(database).book)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        print(f"usage: {sys.argv[0]} CONNECT_ARGUMENTS_AS_JSON [BOOTSTRAP]", file=sys.stderr)
        sys.exit(2)
    try:
        main(*sys.argv[1:])
    except txmq.BrokerAwayError as error:
        sys.exit(f"the broker is away: {error}")
    except (StorageError, MySQLdb.Error, json.JSONDecodeError) as error:
        sys.exit(f"cannot open the database: {error}")
