"""A transfer between two databases, with an event about it: all three or none, as one XA transaction.

Each account lives in a database of its own (two servers, or two schemas of one). Start a broker with ``txmq broker``;
then, with what ``MySQLdb.connect`` takes for each database, as JSON::

    python examples/transfer_xa.py '{"host": "one", ..., "db": "bank"}' '{"host": "other", ..., "db": "bank"}'

Kill anything and start it again: no money is made or lost, and every transfer that happened has its message.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import MySQLdb

import txmq
from txmq import MySQLResource

OPENING_BALANCE = 1000
ACCOUNTS = "CREATE TABLE IF NOT EXISTS accounts (id VARCHAR(20) PRIMARY KEY, balance INT NOT NULL) ENGINE=InnoDB"


class NotEnoughError(Exception):
    """The account does not hold as much."""


def bank(name: str, arguments: dict[str, Any], account: str, client: txmq.Client) -> MySQLResource:
    """A database with one account, and the resource that stands for it."""
    resource = MySQLResource(name, connect=lambda: MySQLdb.connect(**arguments))
    resource.install(client)
    client.settle(resource)  # a branch that an earlier run left prepared holds locks until it is settled
    connection = MySQLdb.connect(**arguments)
    cursor = connection.cursor()
    cursor.execute(ACCOUNTS)
    cursor.execute("INSERT IGNORE INTO accounts VALUES (%s, %s)", (account, OPENING_BALANCE))
    connection.commit()
    connection.close()
    return resource


def transfer(producer: txmq.Producer, source: MySQLResource, target: MySQLResource, amount: int) -> str:
    """Move money; the transaction's id."""
    with producer.transaction(source, target, timeout=10.0) as tx:
        taken = tx.connection(source).cursor()
        taken.execute("UPDATE accounts SET balance = balance - %s WHERE balance >= %s", (amount, amount))
        if taken.rowcount != 1:
            raise NotEnoughError(amount)  # leaves the block: both databases roll back, nothing is sent
        tx.connection(target).cursor().execute("UPDATE accounts SET balance = balance + %s", (amount,))
        tx.send("transfers", f"{source.name} to {target.name}: {amount}".encode())
    return tx.txid


def main(one: str, other: str, count: str = "10", bootstrap: str = "txmq://127.0.0.1:8123") -> None:
    """Transfer ``count`` times."""
    with txmq.connect(bootstrap) as client, client.producer() as producer:
        client.topics.ensure("transfers")
        source = bank("bank-one", json.loads(one), "ada", client)
        target = bank("bank-other", json.loads(other), "ben", client)
        for number in range(int(count)):
            try:
                print(f"transfer {number}: {transfer(producer, source, target, amount=7)}")
            except NotEnoughError:
                print("the account is empty")
            except txmq.RolledBackError as error:  # BrokerAwayError is one
                print(f"nothing happened, try again: {error}")
            except txmq.OutcomeUnknownError as error:
                print(f"ask later: client.outcome({error.txid!r})")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        print(f"usage: {sys.argv[0]} MYSQLDB_ARGUMENTS MYSQLDB_ARGUMENTS [COUNT [BOOTSTRAP]]", file=sys.stderr)
        sys.exit(2)
    try:
        main(*sys.argv[1:])
    except txmq.BrokerAwayError as error:
        sys.exit(f"the broker is away: {error}")
    except (MySQLdb.OperationalError, json.JSONDecodeError) as error:
        sys.exit(f"cannot open the database: {error}")
