"""Where a client looks for its first broker: ``txmq://`` names brokers, ``zk://`` the registry that knows them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from txmq.addresses import (
    Credentials,
    Ensemble,
    TlsFiles,
    is_ensemble,
    parse_bootstrap,
    parse_ensemble,
    parse_tls,
    parse_user,
    split_address,
)
from txmq.client.transport.destination import Address
from txmq.errors import BrokerAwayError, ConfigError, RegistryAwayError
from txmq.registry.port import Home
from txmq.registry.zookeeper.session import Session

if TYPE_CHECKING:
    from txmq.runtime.tls import ClientTls

SESSION_TIMEOUT_MS = 10_000


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """How a client comes to its brokers."""

    find: Callable[[float], Sequence[Address]]  # the addresses, looked up within so many seconds
    tls: ClientTls | None = None  # how every broker is spoken to; None: in plaintext
    credentials: Credentials | None = None  # with which it logs in; None: it does not


def bootstrap_of(text: str, files: TlsFiles | None = None, password: str = "") -> Bootstrap:
    """What an address means.

    Args:
        files: of TLS, for an address that names none itself.

    Raises:
        ConfigError: it is none, or its files cannot be read.
    """
    if isinstance(text, str) and is_ensemble(text):
        ensemble = parse_ensemble(text, "bootstrap")
        return Bootstrap(lambda timeout: leaders(ensemble, timeout), _tls(ensemble.broker_tls, files))
    addresses = parse_bootstrap(text)
    return Bootstrap(lambda _timeout: addresses, _tls(parse_tls(text), files), _credentials(parse_user(text), password))


def _credentials(user: str, password: str) -> Credentials | None:
    if bool(user) is not bool(password):
        missing = "a password: set TXMQ_PASSWORD, or give password=" if user else "a user: write txmqs://USER@HOST"
        raise ConfigError(f"user and password go together; there is not {missing}")
    return Credentials(user, password) if user else None


def _tls(stated: TlsFiles | None, files: TlsFiles | None) -> ClientTls | None:
    given = None if files == TlsFiles() else files
    if stated is None:
        if given is not None:
            raise ConfigError("ca, cert and key are for TLS, which the address does not ask for: write txmqs://...")
        return None
    if given is not None and stated != TlsFiles():
        raise ConfigError("ca, cert and key are given twice, in the address and as arguments: give them once")
    from txmq.runtime.tls import ClientTls  # a client without TLS does without the library

    return ClientTls(given or stated)


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
        credentials=ensemble.credentials, tls=ensemble.tls,
    )  # fmt: skip
