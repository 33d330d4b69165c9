"""Two services, users of their own at the broker, share a database: each drains what it may send."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import txmq
from txmq.client.admin.users import Users
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess
from txmq.xa import LastResource

PASSWORD, TOPICS = "pencil", {"shop": "orders", "till": "payments"}


class Services:
    """Both, their database and their broker."""

    def __init__(self, broker: BrokerProcess, path: Path) -> None:
        self.broker, self.path = broker, path
        with txmq.connect(broker.address) as client:
            for topic in TOPICS.values():
                client.topics.create(topic, partitions=1)
            Users(client.control, client.timeout).add("ops", PASSWORD)
        self.operator = self.connected("ops")
        self.users = Users(self.operator.control, self.operator.timeout)
        installed = self.resource()
        installed.install(self.operator)
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("CREATE TABLE sold (value TEXT)")
            connection.commit()
        self.of: dict[str, tuple[txmq.Client, LastResource]] = {}
        for user, topic in TOPICS.items():
            self.users.add(user, PASSWORD)
            self.users.acl("grant", user, {"may": "write", "topic": topic})
            self.users.acl("grant", user, {"may": "install,settle", "resource": str(installed.uuid)})
            self.of[user] = self.connected(user), self.resource()
        installed.close()

    def connected(self, user: str) -> txmq.Client:
        return txmq.connect(self.broker.address.replace("txmq://", f"txmq://{user}@"), password=PASSWORD)

    def resource(self) -> LastResource:
        return LastResource(
            "shop-db", connect=lambda: sqlite3.connect(self.path, timeout=30.0, check_same_thread=False), outbox=True
        )

    def sell(self, user: str, value: int) -> None:
        client, resource = self.of[user]
        with client.producer().transaction(resource) as tx:
            tx.connection(resource).execute("INSERT INTO sold VALUES (?)", (f"{user} {value}",))
            tx.send(TOPICS[user], b"%d" % value, key=b"k")

    def states(self) -> list[tuple[str, str]]:
        with closing(sqlite3.connect(self.path)) as connection:
            return connection.execute("SELECT state, reason FROM txmq_marker_outbox ORDER BY seq").fetchall()

    def close(self) -> None:
        for client, resource in self.of.values():
            client.close()
            resource.close()
        self.operator.close()


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    with BrokerProcess(tmp_path / "data") as broker:
        made = Services(broker, tmp_path / "shop.db")
        yield made
        made.close()


def test_services_of_two_users_drain_each_their_own(services: Services) -> None:
    for user in TOPICS:
        services.sell(user, 0)
    services.broker.kill()
    for value in range(1, 6):
        for user in TOPICS:
            services.sell(user, value)
    services.broker.start()
    eventually(lambda: not services.states(), "all have left")
    for topic in TOPICS.values():
        assert [int(m.value or b"") for m in services.operator.browse(topic)] == list(range(6))


def test_row_that_nobody_may_send_says_what_is_missing(services: Services) -> None:
    services.sell("shop", 0)
    services.users.acl("revoke", "shop", {"may": "write", "topic": "orders"})
    services.broker.kill()
    services.sell("shop", 1)
    services.broker.start()
    services.sell("till", 0)
    eventually(lambda: any("may not write topic orders" in why for _, why in services.states()), "it is told")
    services.users.acl("grant", "shop", {"may": "write", "topic": "orders"})
    eventually(lambda: not services.states(), "it goes out by itself")
    assert [int(m.value or b"") for m in services.operator.browse("orders")] == [0, 1]
