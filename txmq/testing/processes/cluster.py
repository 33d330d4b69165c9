"""Several real brokers that find each other in one ZooKeeper ensemble: each to be killed, paused and restarted.

Each broker has a data directory of its own below one directory, and keeps its address over restarts. A chroot keeps
clusters in one ensemble apart, so that tests of one file share its servers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Self
from urllib.parse import urlencode

from txmq import connect
from txmq.addresses import TlsFiles
from txmq.errors import UnauthenticatedError
from txmq.protocol.json_text import json_object
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import START_TIMEOUT_S, BrokerProcess, address_of
from txmq.testing.processes.child import ServerGroup
from txmq.testing.processes.zookeeper import SESSION_TIMEOUT_MS_MIN, Ensemble

SESSION_TIMEOUT_MS = 10 * SESSION_TIMEOUT_MS_MIN


class Cluster(ServerGroup):
    """Brokers with one registry. Usable as a block: killed at its end; the ensemble goes on.

    Args:
        directory: for the brokers' data directories and logs.
        ensemble: has been started.
        chroot: where the cluster is in the ensemble's tree: ``""``, or ``/prod``.
        size: how many brokers.
        settings: of every broker; a short ZooKeeper session unless it says otherwise.
        tls: what brokers and clients show each other alike; see ``BrokerProcess``.
        credentials: ``NAME:PASSWORD`` of its nodes in ZooKeeper, which brokers know, and clients do not need.
    """

    def __init__(
        self, directory: Path | str, ensemble: Ensemble, *, chroot: str = "", size: int = 3,
        settings: Mapping[str, object] | None = None, tls: TlsFiles | None = None, credentials: str = "",
    ) -> None:  # fmt: skip
        self._tls, self._credentials = tls, f"{credentials}@" if credentials else ""
        self.directory, self.ensemble, self._chroot = Path(directory), ensemble, chroot
        self._settings = {"registry_session_timeout_ms": SESSION_TIMEOUT_MS, **(settings or {})}
        self.brokers = [self.broker(f"broker-{number}") for number in range(size)]

    def broker(self, name: str, *, settings: Mapping[str, object] | None = None) -> BrokerProcess:
        """One more broker of the cluster, not started; the caller stops it."""
        own = {**self._settings, "registry": self.registry, "broker_name": name, **(settings or {})}
        return BrokerProcess(self.directory / name, settings=own, tls=self._tls)

    @property
    def registry(self) -> str:
        """``zk://...``, of brokers and clients; ``zks://...`` if the ensemble speaks TLS."""
        if self.ensemble.tls is None:
            return f"zk://{self._credentials}{self.ensemble.hosts}{self._chroot}"
        files = urlencode(asdict(self.ensemble.tls))
        return f"zks://{self._credentials}{self.ensemble.secure_hosts}{self._chroot}?{files}"

    def registry_of(self, user: str) -> str:
        """``zk://...`` of a client that logs in, and does not know the credentials."""
        address = self.registry.replace(self._credentials, "", 1)
        return f"{address}{'&' if '?' in address else '?'}user={user}"

    @property
    def address(self) -> str:
        """Of all brokers, for ``txmq.connect``."""
        return address_of(self.brokers)

    def start(self) -> Self:
        """Start the brokers that do not run, and wait until each serves, and knows where all are led.

        A topic is spread over the homes that a broker sees led at that moment. Brokers that ask for a login do not say
        what they see, and are not waited for.

        Raises:
            BrokerFailedError: one does not.
        """
        for broker in self.brokers:
            if not broker.is_running:
                broker.start()
        for broker in self.brokers:
            eventually(partial(self._sees_all, broker), f"{broker.title} sees all homes led", failure=broker.failure)
        return self

    def _sees_all(self, broker: BrokerProcess) -> bool:
        with connect(broker.address) as client:
            try:
                homes = json_object(client.control.repeat("cluster", "homes", timeout=START_TIMEOUT_S))["homes"]
            except UnauthenticatedError:
                return True
        return sum(home["leader"] is not None for home in homes) >= len(self.brokers)

    def kill(self) -> None:
        for broker in self.brokers:
            broker.kill()
