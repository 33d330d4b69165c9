"""Where a client looks for its first broker: ``txmq://`` names brokers, ``zk://`` the registry that knows them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from txmq.addresses import (
    Ensemble,
    TlsFiles,
    is_ensemble,
    parse_bootstrap,
    parse_ensemble,
    parse_password_file,
    parse_tls,
    parse_user,
    split_address,
)
from txmq.client.leader_lookup import LeaderLookup
from txmq.client.passwords import PASSWORD, of_environment, read_password
from txmq.client.transport.reconnecting import Address, Login
from txmq.errors import BrokerAwayError, ConfigError, RegistryAwayError
from txmq.registry.cluster_metadata import HomeEntry
from txmq.registry.zookeeper.session import Session
from txmq.runtime.clocks import OSClock, OSRandom
from txmq.runtime.ports import Clock

if TYPE_CHECKING:
    from txmq.runtime.tls import ClientTls

SESSION_TIMEOUT_MS = 10_000
CLOCK: Clock = OSClock()
_look_ups: dict[Ensemble, LeaderLookup] = {}


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """How a client finds its brokers."""

    find: Callable[[float], Sequence[Address]]  # the addresses, looked up within so many seconds
    tls: ClientTls | None = None  # how every broker is spoken to; None: in plaintext
    login: Login | None = None  # None: it does not log in


def bootstrap_of(text: str, files: TlsFiles | None = None, password: str = "") -> Bootstrap:
    """What an address means.

    Args:
        files: of TLS, for an address that names none itself.
        password: of the address's user; otherwise its ``password_file`` is read at each login, or TXMQ_PASSWORD now.

    Raises:
        ConfigError: it is none, or its files cannot be read.
    """
    find = _find(text)
    stated = parse_tls(text)
    has_certificate = stated is not None and bool(stated.cert or (files is not None and files.cert))
    login = _login(parse_user(text), password, parse_password_file(text), has_certificate=has_certificate)
    return Bootstrap(find, _tls(stated, files), login)


def _find(text: str) -> Callable[[float], Sequence[Address]]:
    if isinstance(text, str) and is_ensemble(text):
        return _shared(parse_ensemble(text, "bootstrap")).find
    addresses = parse_bootstrap(text)
    return lambda _timeout: addresses


def _shared(ensemble: Ensemble) -> LeaderLookup:
    """The process's one look-up in that registry."""
    return _look_ups.setdefault(ensemble, LeaderLookup(partial(leaders, ensemble), CLOCK, OSRandom()))


def _login(user: str, password: str, file: str, *, has_certificate: bool) -> Login | None:
    if not user:
        if password or file:
            raise ConfigError(
                "user and password go together; there is no user: write txmqs://USER@HOST, or ?user=USER "
                "behind zk://..."
            )
        return None
    if password and file:
        raise ConfigError("the password is given twice, as password= and as password_file: give it once")
    if file:
        read_password(file)  # what is wrong with it is told now
        return Login(user, partial(read_password, file))
    password = password or of_environment()
    if not password and not has_certificate:
        raise ConfigError(
            f"user and password go together; there is no password of {user}: set {PASSWORD}, write "
            "?password_file=FILE behind the address, or give password="
        )
    return Login(user, (lambda: password) if password else None)


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


def _homes(ensemble: Ensemble, timeout: float) -> list[HomeEntry]:
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
