"""Three brokers with one registry and users: ``ops``, an administrator, and ``shop``, who may read and write."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import txmq
from tests.services.broker.wire import Wire
from txmq.client.admin.cluster import Users
from txmq.errors import BadRequestError
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.cluster import Cluster
from txmq.testing.processes.zookeeper import Ensemble

OPS, PENCIL = "ops", "pencil"


@contextlib.contextmanager
def guarded(directory: Path, ensemble: Ensemble, chroot: str) -> Iterator[Cluster]:
    """Three brokers that know each other, a topic over all of them, and users: ``ops`` and ``shop``."""
    made = Cluster(
        directory, ensemble, chroot=chroot, credentials="brokers:secret", settings={"registry_session_timeout_ms": 2000}
    )
    with made:
        with txmq.connect(made.address) as client:
            client.topics.create("orders", partitions=3)
            Users(client.control, client.timeout).add(OPS, PENCIL)
        with operator(made) as users:
            users.add("shop", "orders")
            for may in ("read", "write"):
                users.acl("grant", "shop", {"may": may, "topic": "orders"})
        until_all_know(made)
        yield made


@contextlib.contextmanager
def operator(cluster: Cluster, number: int = 0) -> Iterator[Users]:
    """Commands of the administrator, at one broker."""
    address = cluster.brokers[number].address.replace("://", f"://{OPS}@")
    with txmq.connect(address, password=PENCIL) as client:
        yield Users(client.control, client.timeout)


def logs_in(broker: BrokerProcess, user: str, password: str) -> bool:
    """Whether a login is taken."""
    with Wire(broker) as wire:
        return wire.log_in(user, password) == 200


def serves(broker: BrokerProcess, user: str, password: str) -> bool:
    """Whether a user is let in, and may see the topic."""
    with Wire(broker) as wire:
        return wire.log_in(user, password) == 200 and is_served(wire) == 200


def is_served(wire: Wire) -> int:
    """The code of a request that the user's grants allow."""
    return wire.ask(b"topic describe orders 1\r\n")[0]


def until_all_know(cluster: Cluster) -> None:
    """Wait until users and grants, which were changed at the first broker, are those of all."""
    for number in range(1, len(cluster.brokers)):
        eventually(partial(_knows, cluster, number), "all homes know the change")


def _knows(cluster: Cluster, number: int) -> bool:
    try:
        with operator(cluster) as first, operator(cluster, number) as users:
            return users.acl("list") == first.acl("list")
    except BadRequestError:  # that home has not heard yet that there are users
        return False
