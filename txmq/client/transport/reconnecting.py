"""A connection that is made again when it is needed: addresses, back-off, greeting, session.

Theory of operation. ``connect`` returns the live ``Connection`` or makes one: it tries the addresses in turn, each for
an equal share of the time that is left, and sends ``hello``, which resumes the session before any other request can be
sent. A failed attempt is reported at once, and the next one waits for a back-off first, so that callers may simply
repeat. No request is sent twice here: the caller knows whether that is safe (``repeat`` is for requests that only ask).

*The broker is away.* If no connection can be made, ``BrokerAwayError`` says so: nothing was sent. A caller that is
about to lock rows asks first (``reach``): a dead connection is made again, a silent one is asked. An answer to a
request of the last ``JUST_HEARD_S`` spares one such look: the next look notices a broker that died since. A broker that
is frozen or cut off is found out once, by a request that is not answered in time: if nothing else came either, that
ends the connection, and the next request makes another one. From then on, until it answers, no block waits for it
longer than ``AWAY_S_MAX``.

*Which broker.* The ``Destination`` names the addresses anew for each attempt, and the home that has to answer there:
``hello`` asks for it, so that a session is never resumed at a stranger that has the address now. It also says how the
client logs in, which comes before anything else (``log_in``).

Invariants:
    * A ``Connection`` that is returned has been greeted, and the session, if there is one, is bound to it.
    * After ``fork`` the child starts anew, with another session; the parent's connection is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

from txmq.client.transport.connection import Connection, Reply
from txmq.client.transport.session import PROTOCOL, ClientSession, parse_hello
from txmq.errors import (
    BrokerAwayError,
    ClosedError,
    ConnectionLostError,
    FencedError,
    NotOwnerError,
    OverloadedError,
    RemoteProtocolError,
    RequestTimeoutError,
    TxmqError,
    UnauthenticatedError,
    UnavailableError,
)
from txmq.model import Outcome
from txmq.protocol.certificates import end_point
from txmq.protocol.json_text import Fields
from txmq.protocol.requests import Stated, Word
from txmq.protocol.scram import ScramAttempt
from txmq.runtime import net
from txmq.runtime.backoff import Backoff
from txmq.runtime.clocks import OSRandom
from txmq.runtime.ports import Buffer, Clock
from txmq.runtime.threads import Attempt, Exclusive, watch_forks
from txmq.xa.resolver_ports import Answer
from txmq.xid import TxId

if TYPE_CHECKING:
    from txmq.runtime.tls import ClientTls

_NONCE_BITS = 192
Address = tuple[str, int]
BACKOFF_S = Backoff(0.02, 0.5)
IDLE_CHECK_S = 0.05  # unused for longer, a connection is checked before use: the broker may have been restarted
SILENT_S = 0.05  # a broker without a sign of life for longer is asked before rows are locked: it may be frozen
JUST_HEARD_S = 0.001  # an answer to a request no older than this spares ``reach`` one look at the socket
WRITE_S_MAX = 0.05  # a request that nobody waits for is left to a socket that is full for longer
AWAY_S_MAX = 1.0  # a caller with locks waits no longer than this for a broker that is known to be away
END_S_MAX = 0.5  # for the answer that a session has ended: it needs none
_CLOSED = "the client is closed"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Login:
    """The user that logs in, and how. No text of it shows a password."""

    user: str
    password: Callable[[], str] | None = field(repr=False)  # asked at each login; None: the certificate proves it


def log_in(connection: Connection, login: Login | None, deadline: float) -> None:
    """Log in, if there is a user to log in as: by SCRAM-SHA-256, or as the owner of the client's certificate.

    By SCRAM both sides prove that they know the password; a fake broker learns nothing that it could use. Over TLS the
    proof holds for the certificate that this client was shown, and for no other: a relay between two TLS connections,
    with another certificate that the client trusts, cannot log in with it.

    Raises:
        UnauthenticatedError: user or password is wrong, or the broker could not prove that it knows the user.
        BadRequestError: the broker has no users.
        ConfigError: the password cannot be read.
        UnavailableError: the user has as many connections as its quota allows; to be tried again later.
    """
    if login is None:
        return
    if login.password is None:
        _by_certificate(connection, login.user, deadline)
        return
    nonce, shown = f"{OSRandom().bits(_NONCE_BITS):048x}", connection.stream.server_certificate
    attempt = ScramAttempt(login.user, login.password(), nonce, None if shown is None else end_point(shown))
    first = _auth(connection, "scram-sha-256", attempt.first(), deadline)
    attempt.verify(_auth(connection, "scram-sha-256", attempt.final(first), deadline))


def _by_certificate(connection: Connection, user: str, deadline: float) -> None:
    try:
        _auth(connection, "external", user.encode(), deadline)
    except UnauthenticatedError as error:
        raise UnauthenticatedError(
            f"{error}: this client's certificate is not {user}'s (txmq user add --certificate); there is no password"
        ) from None


def _auth(connection: Connection, mechanism: str, message: bytes, deadline: float) -> bytes:
    try:
        answer = connection.request(deadline, "auth", mechanism, body=[message]).result()
    except OverloadedError as error:  # the next attempt to connect comes later
        raise UnavailableError(str(error)) from None
    return bytes(answer).removesuffix(b"\n")


class Destination(Protocol):
    """The other end of a connection, through all its lives."""

    @property
    def tls(self) -> ClientTls | None:
        """How it is spoken to; None: in plaintext."""

    @property
    def login(self) -> Login | None:
        """How a connection logs in; None: it does not."""

    @property
    def home_wish(self) -> str | None:
        """The home that ``hello`` asks for; None if any broker will do."""

    @property
    def reads_copies(self) -> bool:
        """Whether a replica of the home may answer reads."""

    def addresses(self, deadline: float) -> Sequence[Address]:
        """Where to look for it, tried in turn."""

    def greeted(self, introduction: Fields, address: Address) -> None:
        """A broker has answered ``hello``.

        Raises:
            ConnectionLostError: it is another one than the connection is for.
        """

    def failed(self) -> None:
        """No address could be connected to."""


class AnyBroker:
    """Any broker that answers at these addresses."""

    home_wish, reads_copies = None, False

    def __init__(self, addresses: Sequence[Address], tls: ClientTls | None = None, login: Login | None = None) -> None:
        self._addresses, self.tls, self.login = list(addresses), tls, login

    def addresses(self, deadline: float) -> Sequence[Address]:
        """See ``Destination``."""
        return self._addresses

    def greeted(self, introduction: Fields, address: Address) -> None:
        """See ``Destination``."""

    def failed(self) -> None:
        """See ``Destination``."""


class ReconnectingConnection:
    """A connection that comes back; see the module's docstring.

    Args:
        destination: where it leads.
        name: this client's name, for the broker's lists and logs.
        clock: for deadlines.
        connect_timeout: seconds for one attempt.

    Attributes:
        session: the one in use, or None.

    Thread safety: any thread.
    """

    def __init__(self, destination: Destination, name: str, clock: Clock, connect_timeout: float = 5.0) -> None:
        self._destination, self._name, self._clock = destination, name, clock
        self._connect_timeout = connect_timeout
        self._connection: Connection | None = None
        self.session: ClientSession | None = None
        self._turn = Exclusive()  # to make or change the connection or the session
        self._backoff_s = 0.0
        self._retry_at = 0.0
        self._last_failure = "no time was left to connect"
        self._is_away = False  # according to the last ``reach``
        self._closed = False
        watch_forks(self)

    # --- requests ----------------------------------------------------------------------------------------------------

    def call(
        self, verb: str, *arguments: Word, timeout: float,
        extensions: Mapping[str, Word | None] | None = None, body: Sequence[Buffer] | None = None,
    ) -> bytes:  # fmt: skip
        """Send a request, wait for its answer and return the body.

        Raises:
            BrokerError: the broker refused; its class says why.
            ConnectionLostError, RequestTimeoutError: whether the request was executed is not known.
            LocalProtocolError: the protocol cannot carry it; nothing was sent.
        """
        return self.submit(verb, *arguments, timeout=timeout, extensions=extensions, body=body).result()

    def submit(
        self, verb: str, *arguments: Word, timeout: float,
        extensions: Mapping[str, Word | None] | None = None, body: Sequence[Buffer] | None = None,
    ) -> Answer:  # fmt: skip
        """As ``call``, without waiting: the request is on its way when this returns; see ``Reply.result``."""
        deadline = self._clock.monotonic() + timeout
        while True:
            connection = self.connect(deadline)
            try:
                return connection.request(deadline, verb, *arguments, extensions=extensions, body=body)
            except ConnectionLostError:
                if connection.failure is None:  # pragma: no cover - a connection raises its own failure only
                    raise

    def submit_transaction(self, head: str, fields: Stated, body: Sequence[Buffer] | None, deadline: float) -> Answer:
        """``submit`` for a transaction's requests: unchecked (``transaction_line``), the deadline as monotonic time.

        It waits for a connection no longer than ``AWAY_S_MAX``.
        """
        while True:
            connection = self.connect(deadline, AWAY_S_MAX)
            try:
                return connection.transaction(deadline, head, fields, body)
            except ConnectionLostError:
                if connection.failure is None:  # pragma: no cover - a connection raises its own failure only
                    raise

    def write_transaction(self, head: str, fields: Stated, body: Sequence[Buffer] | None) -> Answer:
        """``submit_transaction`` after a decision: the kernel has the request when this returns.

        It waits for no connection. What the socket does not take in ``WRITE_S_MAX`` a thread writes that waits next.

        Raises:
            ConnectionLostError: there is no live connection; nothing was sent.
        """
        connection = self._connection
        if connection is None or connection.failure is not None:
            raise BrokerAwayError(self._last_failure)
        reply = connection.transaction(self._clock.monotonic() + WRITE_S_MAX, head, fields, body)
        connection.write_now()
        return reply

    def repeat(
        self, verb: str, *arguments: Word, timeout: float,
        extensions: Mapping[str, Word | None] | None = None, body: Sequence[Buffer] | None = None,
    ) -> bytes:  # fmt: skip
        """As ``call``, again after a lost connection, for requests that change nothing or the same thing again."""
        deadline = self._clock.monotonic() + timeout
        while True:
            remaining = deadline - self._clock.monotonic()
            try:
                return self.call(verb, *arguments, timeout=remaining, extensions=extensions, body=body)
            except ConnectionLostError:
                if self._closed or self._clock.monotonic() >= deadline:
                    raise

    # --- the connection ----------------------------------------------------------------------------------------------

    def connect(self, deadline: float, wait_s_max: float = float("inf")) -> Connection:
        """Return the live connection; make it within ``wait_s_max`` if there is none.

        Raises:
            BrokerAwayError: no address could be connected to.
            ClosedError: the connection was closed.
        """
        connection, now = self._connection, self._clock.monotonic()
        if (
            connection is None
            or connection.failure is not None
            or (now - connection.used_at > IDLE_CHECK_S and connection.is_stale())
        ):
            connection = self._make(min(deadline, now + wait_s_max))
            now = self._clock.monotonic()
        connection.used_at = now
        return connection

    @property
    def wait_s_max(self) -> float:
        """How long to wait for the broker before rows are locked."""
        connection = self._connection
        is_known_away = self._is_away or (connection is not None and connection.failure is not None)
        return min(self._connect_timeout, AWAY_S_MAX) if is_known_away else self._connect_timeout

    def reach(self, deadline: float) -> None:
        """Return if the broker is there, as far as that can be known; for callers that are about to lock rows.

        Raises:
            BrokerAwayError: it is away.
            ClosedError: the connection was closed.
        """
        connection, now = self._connection, self._clock.monotonic()
        if connection is not None and connection.is_there(now, JUST_HEARD_S, SILENT_S):
            return
        until, is_away = min(deadline, now + self.wait_s_max), True
        try:
            self.regain(until)
            self._ask(until)
            is_away = False
        finally:
            self._is_away = is_away

    def regain(self, deadline: float) -> None:
        """Connect again; attempts that fail at once are repeated for ``AWAY_S_MAX``. Raises as ``connect``."""
        refused_until = min(deadline, self._clock.monotonic() + AWAY_S_MAX)
        while True:
            try:
                self.connect(deadline)
            except ConnectionLostError:
                if self._clock.monotonic() >= refused_until:
                    raise
            else:
                return

    def _ask(self, deadline: float) -> None:
        connection = self.connect(deadline)
        if self._clock.monotonic() - connection.lived_at <= SILENT_S:
            return
        try:
            connection.request(deadline, "ping").result()
        except RequestTimeoutError as error:
            raise BrokerAwayError(f"{connection.address} does not answer") from error
        except ConnectionLostError as error:
            raise BrokerAwayError(str(error)) from error

    @property
    def live(self) -> Connection | None:
        """The connection if it has not failed, or None."""
        connection = self._connection
        return connection if connection is not None and connection.failure is None else None

    def connect_with_session(self, deadline: float) -> tuple[Connection, ClientSession]:
        """Return the live connection and the session bound to it; make what is missing. Raises as ``connect``."""
        connection = self.connect(deadline)
        session = connection.session
        if session is None:
            session = self._alone(deadline, lambda: self._open_session(connection, deadline))
        assert session is not None
        return connection, session

    def have_session(self, deadline: float) -> ClientSession:
        """Return the session, opened if need be. Raises as ``connect``."""
        return self.connect_with_session(deadline)[1]

    def saw_outcome(self, txid: TxId) -> None:
        """A caller knows the outcome of a transaction: if it is of this session, the broker need not keep it."""
        known = self.session
        if known is not None and (known.cluster, known.home, known.id) == txid[:3]:
            known.saw_outcome(txid.counter)

    def known_outcome(self, txid: TxId) -> Outcome | None:
        """The outcome of a transaction of this session whose end was not seen, once it was asked for."""
        known = self.session
        is_ours = known is not None and (known.cluster, known.home, known.id) == txid[:3]
        return known.known_outcome(txid.counter) if known is not None and is_ours else None

    def renew_session(self, old: ClientSession, deadline: float) -> None:
        """Give up a session that contradicts itself; ``connect_with_session`` opens another one."""
        self._alone(deadline, lambda: self._drop_session(old))

    def _drop_session(self, old: ClientSession) -> None:
        if self.session is not None and self.session.is_same(old):
            self.session = None
            if self._connection is not None:
                self._connection.fail(ConnectionLostError("the session was given up"))

    def _make(self, deadline: float) -> Connection:
        return self._alone(deadline, lambda: self._made(deadline))

    def _made(self, deadline: float) -> Connection:
        connection = self._connection
        if connection is not None and connection.failure is None:
            return connection
        self._wait_out_backoff(deadline)
        self._refuse_closed()
        if self._clock.monotonic() >= deadline:
            # Nothing was tried, so the back-off does not count this: callers with deadlines shorter than the
            # back-off would put off the next attempt for ever.
            raise BrokerAwayError(self._last_failure)
        try:
            connection = self._connection = self._connected(deadline)
        except TxmqError as error:
            self._last_failure = str(error)
            self._backoff_s = BACKOFF_S.following(self._backoff_s)
            self._retry_at = self._clock.monotonic() + self._backoff_s
            if isinstance(error, ConnectionLostError):
                self._destination.failed()
            raise
        self._backoff_s = 0.0
        self._refuse_closed(connection)  # ``close`` may have come meanwhile, when there was no connection to close
        return connection

    def _refuse_closed(self, made: Connection | None = None) -> None:
        if self._closed:
            if made is not None:
                made.fail(ConnectionLostError(_CLOSED))
            raise ClosedError(_CLOSED)

    def _alone(self, deadline: float, work: Callable[[], T]) -> T:
        """Run ``work`` while no other thread makes or changes the connection or the session.

        Raises:
            BrokerAwayError: the deadline passed first.
        """
        me = Attempt()
        try:
            if not self._turn.take_before(deadline, me, self._clock):
                raise BrokerAwayError(self._last_failure if self._backoff_s else "another thread is connecting")
            return work()
        finally:
            me.is_over = True
            self._turn.leave(me)

    def _wait_out_backoff(self, deadline: float) -> None:
        if self._backoff_s and not self._closed:
            wait = min(self._retry_at, deadline) - self._clock.monotonic()
            if wait > 0:
                self._clock.sleep(wait)

    def _connected(self, deadline: float) -> Connection:
        failures, elsewhere = list[str](), list[str]()
        addresses = self._destination.addresses(deadline)
        for number, (host, port) in enumerate(addresses):
            now = self._clock.monotonic()
            share_s = min((deadline - now) / (len(addresses) - number), self._connect_timeout)
            if share_s <= 0:
                break
            try:
                connection = self.dial(host, port, share_s)
            except OSError as error:
                failures.append(f"{host}:{port}: {error}")
                continue
            try:
                self._greet(connection, (host, port), now + share_s)
            except BaseException as error:
                connection.fail(ConnectionLostError("the greeting failed"))
                if isinstance(error, RemoteProtocolError) or not isinstance(
                    error, ConnectionLostError | RequestTimeoutError | NotOwnerError | UnavailableError
                ):
                    raise
                if isinstance(error, NotOwnerError):
                    elsewhere.append(f"{host}:{port}")
                else:
                    failures.append(str(error))
                continue
            return connection
        raise BrokerAwayError(_cannot_connect(self._destination.home_wish, failures, elsewhere))

    def dial(self, host: str, port: int, timeout: float) -> Connection:
        """One attempt; nobody is greeted yet. Raises OSError."""
        tls = self._destination.tls
        stream = net.connect(host, port, timeout) if tls is None else tls.connect(host, port, timeout)
        return Connection(stream, self._clock, f"{host}:{port}")

    # --- hello -------------------------------------------------------------------------------------------------------

    def _greet(self, connection: Connection, address: Address, deadline: float) -> None:
        """Send ``hello``: resume the session, or open a new one if the broker does not know it any more."""
        log_in(connection, self._destination.login, deadline)
        known = self.session
        if known is None:
            self._introduce(connection, address, deadline, wish="none")
            return
        try:
            resumed = self._introduce(connection, address, deadline, wish=known.wish)
        except FencedError:
            resumed = None
        if resumed is None or not resumed.is_same(known):
            # Forgotten, or another broker has this address now.
            self.session = None
            self._introduce(connection, address, deadline, wish="new")
        else:
            known.clock_ahead_ms = resumed.clock_ahead_ms
            known.request_size_bytes_max = resumed.request_size_bytes_max  # the broker may have another setting by now
            self.session = connection.session = known  # this object counts the transactions

    def _introduce(self, connection: Connection, address: Address, deadline: float, wish: str) -> ClientSession | None:
        fields = self._hello(connection, deadline, wish)
        self._destination.greeted(fields, address)
        return self._bind(connection, fields)

    def _open_session(self, connection: Connection, deadline: float) -> ClientSession | None:
        return connection.session or self._bind(connection, self._hello(connection, deadline, wish="new"))

    def _hello(self, connection: Connection, deadline: float, wish: str) -> Fields:
        attempt, home = min(deadline, self._clock.monotonic() + self._connect_timeout), self._destination.home_wish
        extensions: dict[str, Word | None] = {"session": wish} if home is None else {"session": wish, "home": home}
        if self._destination.reads_copies:
            extensions["replica"] = None
        return parse_hello(connection.request(attempt, "hello", PROTOCOL, self._name, extensions=extensions).result())

    def _bind(self, connection: Connection, fields: Fields) -> ClientSession | None:
        if fields.get("session") is None:
            return None
        connection.session = self.session = ClientSession(fields, int(self._clock.monotonic() * 1000))
        return connection.session

    def measure_clock(self, session: ClientSession, timeout: float) -> None:
        """Ask the broker again what time it is, if the connection is bound to the session: a clock was set.

        Raises:
            TxmqError: the broker did not answer.
        """
        deadline = self._clock.monotonic() + timeout
        connection = self.connect(deadline)
        if connection.session is session:
            wish = {"session": session.wish}
            fields = parse_hello(connection.request(deadline, "hello", PROTOCOL, self._name, extensions=wish).result())
            session.clock_ahead_ms = ClientSession(fields, int(self._clock.monotonic() * 1000)).clock_ahead_ms

    # --- ends --------------------------------------------------------------------------------------------------------

    def end_session(self, deadline: float) -> Reply | None:
        """Say that the client is done with the session, whose connection is closed next.

        Returns:
            What carries the answer; None if no connection speaks for it. A session that does not end so is one whose
            connection was lost, so nothing is said again.
        """
        connection, session = self.live, self.session
        if connection is None or session is None or connection.session is not session:
            return None
        try:
            return connection.request(deadline, "end", session.last_counter())
        except TxmqError:
            return None

    def rest(self) -> None:
        """Close the connection; the next request makes another one, which resumes the session."""
        connection = self.live
        if connection is not None:
            connection.fail(ConnectionLostError("the connection was not needed for long"))

    def close(self) -> None:
        """Close for good; unanswered requests are lost."""
        self._closed = True
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.fail(ConnectionLostError(_CLOSED))

    def forked(self) -> None:
        """In a forked child: start anew."""
        connection, self._connection, self.session = self._connection, None, None
        self._turn = Exclusive()
        if connection is not None:
            connection.forget()


def have_ended(replies: Iterable[Reply | None]) -> bool:
    """Wait for the answers to ``end_session``; whether all sessions have ended, as far as is known."""
    known = True
    for reply in replies:
        try:
            known &= reply is not None and reply.result() is not None
        except TxmqError:
            known = False
    return known


def _cannot_connect(home: str | None, failures: Sequence[str], elsewhere: Sequence[str]) -> str:
    """The text for a caller; ``elsewhere``: addresses of brokers that lead another home."""
    reasons = [*failures, f"it is not led at {', '.join(elsewhere)}"] if elsewhere else failures
    if not reasons:
        return f"cannot connect to {'the broker' if home is None else f'home {home}'} in time"
    return f"cannot connect to {'' if home is None else f'home {home}: '}{'; '.join(reasons)}"
