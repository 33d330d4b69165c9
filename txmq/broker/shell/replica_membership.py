"""A replica and the registry: which home it copies, where that is led, and what brokers prove to each other.

A thread of its own speaks with the registry, as for a broker that leads (``cluster_membership``). It reads, and says
where this replica is.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

from txmq.addresses import without_secret
from txmq.broker.cluster.registry_asks import readable
from txmq.broker.commit.data_directory import Joins
from txmq.broker.shell.cluster_membership import IN_USE_SESSIONS, REFRESH_S, STOP_TIMEOUT_S, connect
from txmq.broker.shell.joining import Connected, until_answered
from txmq.broker.shell.leader_link import Peer, first_file
from txmq.broker.state.broker_identity import BrokerIdentity
from txmq.config import BrokerSettings
from txmq.errors import ConnectionLostError, RegistryAwayError, RegistryError
from txmq.redo.journal_files import list_bases
from txmq.registry.cluster_metadata import SECRET, HomeEntry, Registry, Standing, has_users
from txmq.runtime.logging import get_logger
from txmq.runtime.ports import Clock, Disk, Random
from txmq.runtime.threads import Signal
from txmq.runtime.tls import ClientTls

log = get_logger()
RETRY_S: Final = 1.0
Told = Callable[[list[HomeEntry], Peer], None]
_T = TypeVar("_T")


class _StoppedError(Exception):
    pass


class ReplicaMembership:
    """See the module's docstring. Made before the data directory is opened, and started when the broker listens.

    Args:
        tls: how the leader is spoken to; None: in plaintext.

    Attributes:
        address: the registry's, without credentials.
    """

    def __init__(
        self, settings: BrokerSettings, disk: Disk, clock: Clock, random: Random, tls: ClientTls | None
    ) -> None:  # fmt: skip
        self._settings, self._disk, self._clock, self._random, self._tls = settings, disk, clock, random, tls
        self.address = without_secret(settings.registry)
        self._connected: Connected | None = None
        self._home = 0
        self._signal, self._is_stopping = Signal(), False
        self._told: Told | None = None
        self._incarnation, self._own_address = 0, ""
        self._thread: threading.Thread | None = None

    def joins(self) -> Joins:
        """The home that is copied; asked of the registry, and of the leader where the directory has no journal yet.

        Waits while one of them is away.

        Raises:
            RegistryError: the cluster has no such home.
            TxmqError: the leader's journal does not reach back to its beginning, or cannot be read.
        """
        registry = self._until_answered(self._registry)
        entry = self._until_answered(lambda: self._find(registry))
        self._home = entry.home
        cluster = self._until_answered(lambda: registry.join(self._random.bits(64), Standing.EMPTY))
        if list_bases(self._disk):
            return Joins(cluster, self._home, None)
        identity = BrokerIdentity(cluster, self._home, "", replica=0)

        def ask_leader() -> Joins:
            peer = self._peer(registry, registry.homes())
            try:
                if peer.address is None:
                    raise ConnectionLostError(f"nobody leads home {self._home:016x}")
                header = asyncio.run(first_file(identity, peer, self._random, self._clock, self._tls))
            except (ConnectionLostError, OSError, TimeoutError) as error:
                raise RegistryAwayError(str(error)) from error
            return Joins(cluster, self._home, header)

        return self._until_answered(ask_leader, "the leader of the home")

    def start(self, incarnation: int, address: str, told: Told, refused: Callable[[Exception], None]) -> None:
        """Read the registry in a thread, again and again, and say there where this replica is.

        Args:
            address: where readers reach it.
            told: called in that thread with the homes and how the leader is reached.
            refused: called there with the reason if the replica has to stop.
        """
        self._told, self._incarnation, self._own_address = told, incarnation, address
        log.info("follows a home", home=f"{self._home:016x}", registry=self.address)
        self._thread = threading.Thread(target=self._run, args=(refused,), name="txmq-registry", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the session."""
        self._is_stopping = True
        self._signal.set()
        if self._thread is not None:
            self._thread.join(STOP_TIMEOUT_S)
        elif self._connected is not None:
            self._connected.registry.close()

    def _run(self, refused: Callable[[Exception], None]) -> None:
        try:
            registry = self._until_answered(self._registry)
            while not self._is_stopping:
                self._until_answered(partial(self._read, registry))
                self._signal.wait(REFRESH_S)
        except _StoppedError:
            pass
        except Exception as error:  # noqa: BLE001 - a defect: a replica that nobody hears must not go on
            refused(error)
        finally:
            if self._connected is not None:
                self._connected.registry.close()

    def _read(self, registry: Registry) -> None:
        registry.announce_replica(self._home, self._incarnation, self._own_address)
        homes = registry.homes(self._signal.set)
        if self._told is not None:
            self._told(homes, self._peer(registry, homes))

    def _peer(self, registry: Registry, homes: list[HomeEntry]) -> Peer:
        """Where the home is led now."""
        records = readable(registry.access()).records
        secret = str(records[SECRET].get("between_brokers", "")) if has_users(records) else ""
        address = next((home.address for home in homes if home.home == self._home), None)
        return Peer(address, secret)

    def _find(self, registry: Registry) -> HomeEntry:
        wanted, homes = self._settings.replica_of, registry.homes()
        for home in homes:
            if wanted in (f"{home.home:016x}", home.name):
                if home.retired:
                    raise RegistryError(f"replica_of: home {wanted} is retired ({home.retired})")
                return home
        known = ", ".join(f"{home.name} ({home.home:016x})" for home in homes) or "none"
        raise RegistryError(f"replica_of: the cluster has no home {wanted!r}; it has {known}")

    def _registry(self) -> Registry:
        if self._connected is None:
            self._connected = connect(self._settings)
        return self._connected.registry

    def _until_answered(self, step: Callable[[], _T], waits_for: str = "the registry") -> _T:
        timeout_s = IN_USE_SESSIONS * self._settings.registry_session_timeout_ms / 1000
        return until_answered(step, self._clock, self._pause, timeout_s, waits_for=waits_for)

    def _pause(self, seconds: float) -> None:
        end = self._clock.monotonic() + (RETRY_S if self._thread is not None else seconds)
        while not self._is_stopping and (left := end - self._clock.monotonic()) > 0:
            self._signal.wait(left)
        if self._is_stopping:
            raise _StoppedError
