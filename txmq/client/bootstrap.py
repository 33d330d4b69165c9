"""Where a client finds its first broker, and its password.

``txmq://`` names brokers, ``zk://`` the registry that knows them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

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
from txmq.client.transport.reconnecting import Address, Login
from txmq.errors import BrokerAwayError, ConfigError, RegistryAwayError, TxmqError
from txmq.registry.cluster_metadata import HomeEntry
from txmq.registry.zookeeper.session import Session
from txmq.runtime.backoff import Backoff
from txmq.runtime.clocks import OSClock, OSRandom
from txmq.runtime.ports import Clock, Random
from txmq.runtime.threads import Attempt, Exclusive, watch_forks

if TYPE_CHECKING:
    from txmq.runtime.tls import ClientTls

PASSWORD = "TXMQ_PASSWORD"  # noqa: S105  the name of a variable
PAUSE_S: Final = Backoff(0.1, 2.0)
QUIET_S: Final = 2 * PAUSE_S.most  # without a look-up for so long the next pause is the shortest again
_JITTER_BITS: Final = 16
SESSION_TIMEOUT_MS = 10_000
CLOCK: Clock = OSClock()
_look_ups: dict[Ensemble, LeaderLookup] = {}


def of_environment(name: str = PASSWORD) -> str:
    """What a variable holds; empty if it is not set."""
    return os.environ.get(name, "")


def read_password(path: str) -> str:
    """The first line of a file.

    Raises:
        ConfigError: there is none, or others may read it; the text does not hold it.
    """
    from txmq.runtime.private_files import read_private  # most clients read none

    line = next(iter(read_private(path).splitlines()), "")
    if not line:
        raise ConfigError(f"{path}: its first line is the password, and is empty")
    return line


class _Answer(NamedTuple):
    """The result of a look-up, and when it ended."""

    addresses: Sequence[Address]
    error: TxmqError | None
    at: float

    def again(self) -> Sequence[Address]:
        """The addresses; or the error, as one of the caller's own."""
        if self.error is not None:
            raise type(self.error)(str(self.error))
        return self.addresses


class LeaderLookup:
    """Where the homes of a cluster are led, looked up by all clients of a process together.

    Theory of operation. A look-up costs the registry a session. While no broker answers, each connection of each client
    would ask anew at every attempt. So one look-up is under way at a time, and those that come meanwhile share its
    result. It is followed by a pause, which doubles, with jitter, while look-ups come one after another: for so long
    the answer is repeated. A failure that is nearly over is waited for; it is repeated where the caller has no time to
    ask.

    Thread safety: any thread.

    Args:
        ask: asks the registry, within so many seconds.
    """

    def __init__(self, ask: Callable[[float], Sequence[Address]], clock: Clock, random: Random) -> None:
        self._ask, self._clock, self._random = ask, clock, random
        self._turn = Exclusive()
        self._answer: _Answer | None = None
        self._pause_s = 0.0
        self._not_before = float("-inf")
        watch_forks(self)

    def find(self, timeout: float) -> Sequence[Address]:
        """The addresses. Raises what ``ask`` raised, now or a moment ago."""
        begun = self._clock.monotonic()
        deadline, me = begun + timeout, Attempt()
        try:
            is_mine = self._turn.take_before(deadline, me, self._clock)
            answer = self._answer
            if answer is not None and (answer.at >= begun or not is_mine or self._may_be_repeated(answer, deadline)):
                return answer.again()
            if not is_mine:
                raise BrokerAwayError("the registry does not tell where the brokers are: another look-up is under way")
            self._answer = self._look(max(deadline - self._clock.monotonic(), 0.001))
            return self._answer.again()
        finally:
            me.is_over = True
            self._turn.leave(me)

    def _may_be_repeated(self, answer: _Answer, deadline: float) -> bool:
        now = self._clock.monotonic()
        left_s = self._not_before - now
        if left_s <= 0:
            return False
        if answer.error is None or left_s > (deadline - now) / 2:
            return True
        self._clock.sleep(left_s)
        return False

    def _look(self, timeout: float) -> _Answer:
        begun = self._clock.monotonic()
        is_quiet = begun - self._not_before > QUIET_S
        self._pause_s = PAUSE_S.following(0.0 if is_quiet else self._pause_s)
        try:
            return _Answer(self._ask(timeout), None, self._clock.monotonic())
        except TxmqError as error:
            return _Answer((), error.with_traceback(None), self._clock.monotonic())
        finally:
            jitter = 0.75 + self._random.bits(_JITTER_BITS) / (1 << _JITTER_BITS) / 2
            self._not_before = self._clock.monotonic() + self._pause_s * jitter

    def forked(self) -> None:
        """In a forked child: a thread of the parent may have had its turn."""
        self._turn = Exclusive()


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
