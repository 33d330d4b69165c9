"""A broker process as a member of a cluster: its ensemble, and the thread that speaks with it.

kazoo is imported here, by ``_connect``: a broker that is alone does without.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from txmq.addresses import parse_ensemble, without_secret
from txmq.broker.commit.data_directory import Recovered
from txmq.broker.shell import joining
from txmq.broker.shell.joining import Connected, Entered
from txmq.broker.shell.registry_session_loop import IN_USE_SESSIONS, RegistrySessionLoop
from txmq.broker.shell.server import Server
from txmq.config import BrokerSettings
from txmq.redo.directory_identity import LOCK_PATH
from txmq.registry.cluster_metadata import Registry
from txmq.runtime.logging import get_logger
from txmq.runtime.os_disk import OSDisk
from txmq.runtime.ports import Clock, Random

log = get_logger()
CALL_TIMEOUT_MS: Final = 5000
STOP_TIMEOUT_S: Final = 3.0  # for the end of the session, which lets others see at once that the broker is gone


class ClusterMembership:
    """See the module's docstring. Made before the data directory is opened, and started when the broker listens.

    Attributes:
        address: the registry's, without credentials.
        incarnation: of this start; ``open_store`` journals it.
    """

    def __init__(self, settings: BrokerSettings, disk: OSDisk, clock: Clock, random: Random) -> None:
        self._settings, self._disk, self._clock, self._random = settings, disk, clock, random
        self._ensemble = parse_ensemble(settings.registry)
        self.address = without_secret(settings.registry)
        self.incarnation = joining.draw_incarnation(random)
        self._session_timeout_s = settings.registry_session_timeout_ms / 1000
        self._connected: Connected | None = None
        self._session_loop: RegistrySessionLoop | None = None
        self._thread: threading.Thread | None = None

    def take_cluster(self) -> int | None:
        """See ``joining.take_cluster``; waits while the registry is away."""
        return joining.until_answered(
            lambda: joining.take_cluster(self._disk, self._random, self._registry), self._clock, self._clock.sleep,
            IN_USE_SESSIONS * self._session_timeout_s,
        )  # fmt: skip

    def start(
        self, server: Server, recovered: Recovered, address: str, led: Callable[[], None],
        refused: Callable[[Exception], None],
    ) -> None:  # fmt: skip
        """Enter the cluster in a thread; requests are served from then on.

        Args:
            address: where clients reach the broker.
            led: called in the loop when the broker serves.
            refused: called in the loop with the reason if the broker has to stop.
        """
        core, journal = server.core, recovered.store.journal

        def serve(entered: Entered) -> None:
            journal.raise_epoch(entered.leadership.epoch)
            core.led(*entered)
            led()

        lock = self._disk.lock_name(LOCK_PATH)
        who = joining.member(recovered, self.incarnation, address, lock, self._settings, self._random)
        log.info("enters the cluster", registry=self.address)
        session_loop = RegistrySessionLoop(
            who, self._connect, core, server.post, serve, refused, self._clock, self._session_timeout_s
        )
        self._session_loop = server.registry = session_loop
        self._thread = threading.Thread(target=session_loop.run, name="txmq-registry", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the session, so that other brokers and clients see at once that this one is gone."""
        if self._session_loop is not None and self._thread is not None:
            self._session_loop.stop()
            self._thread.join(STOP_TIMEOUT_S)
        elif self._connected is not None:
            self._connected.registry.close()

    def _registry(self) -> Registry:
        return self._connect().registry

    def _connect(self) -> Connected:
        if self._connected is None:
            from txmq.registry.zookeeper.kazoo_session import KazooSession
            from txmq.registry.zookeeper.registry import ZooKeeperRegistry

            session = KazooSession(
                self._ensemble.hosts, session_timeout_ms=self._settings.registry_session_timeout_ms,
                call_timeout_ms=CALL_TIMEOUT_MS, credentials=self._ensemble.credentials, tls=self._ensemble.tls,
            )  # fmt: skip
            self._connected = Connected(ZooKeeperRegistry(session, self._ensemble.chroot), session)
        return self._connected
