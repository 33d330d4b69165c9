"""Where a client looks for its first broker: ``txmq://`` names brokers, ``zk://`` the registry that knows them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from txmq.addresses import ZOOKEEPER_SCHEME, Ensemble, parse_bootstrap, parse_ensemble, split_address
from txmq.client.transport.destination import Address
from txmq.errors import BrokerAwayError, RegistryAwayError
from txmq.registry.port import Home
from txmq.registry.zookeeper.session import Session

SESSION_TIMEOUT_MS = 10_000

Bootstrap = Callable[[float], Sequence[Address]]  # the addresses, looked up within so many seconds


def bootstrap_of(text: str) -> Bootstrap:
    """What an address means.

    Raises:
        ConfigError: it is none.
    """
    if isinstance(text, str) and text.startswith(ZOOKEEPER_SCHEME):
        ensemble = parse_ensemble(text, "bootstrap")
        return lambda timeout: leaders(ensemble, timeout)
    addresses = parse_bootstrap(text)
    return lambda _timeout: addresses


def leaders(ensemble: Ensemble, timeout: float) -> list[Address]:
    """Where the homes of a cluster are led, read from its registry; the session with it is closed again.

    Raises:
        BrokerAwayError: no home is led, or ZooKeeper does not answer.
        RegistryError: there is no cluster in that place, or it cannot be read.
    """
    try:
        homes = _homes(ensemble, timeout)
    except RegistryAwayError as error:
        raise BrokerAwayError(f"ZooKeeper at {ensemble.hosts} does not tell where the brokers are: {error}") from error
    found = [split_address(home.address) for home in homes if home.address is not None]
    if not found:
        place = f"zk://{ensemble.hosts}{ensemble.chroot}"
        raise BrokerAwayError(f"no broker of the cluster in {place} is alive (homes that are known: {len(homes)})")
    return found


def _homes(ensemble: Ensemble, timeout: float) -> list[Home]:
    from txmq.registry.zookeeper.registry import ZooKeeperRegistry

    session = open_session(ensemble, timeout)
    try:
        return ZooKeeperRegistry(session, ensemble.chroot).homes()
    finally:
        session.close()


def open_session(ensemble: Ensemble, timeout: float) -> Session:
    """A session with a real ensemble; kazoo is imported here, because brokers' addresses need none.

    Raises:
        RegistryAwayError: no server takes the connection within ``timeout`` seconds.
    """
    from txmq.registry.zookeeper.kazoo_session import KazooSession

    return KazooSession(
        ensemble.hosts, session_timeout_ms=SESSION_TIMEOUT_MS, call_timeout_ms=max(int(timeout * 1000), 1),
        credentials=ensemble.credentials,
    )  # fmt: skip
