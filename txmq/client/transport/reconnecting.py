"""A connection that is remade when it is needed: addresses, back-off, the greeting, the session.

Theory of operation. ``link`` hands out the live ``Connection`` or makes one: it connects to the addresses in turn and
sends ``hello``, which resumes the session before anybody else can send. A failed attempt is reported at once; the
next one waits out a back-off first, so that callers may simply repeat. Nothing is sent again here: whoever asked
knows whether that is safe (``repeat`` is for requests that only ask).

*The broker is away.* A link that cannot be had is a ``BrokerAwayError``: nothing was sent. Who is about to lock rows
asks first (``reach``): a dead link is made anew, a silent one is asked. A broker that is frozen, or cut off, is found
out once, by a request that is not answered in time; from then until it answers, no block waits for it longer than
``AWAY_S_MAX``.

Invariants:
    * A ``Connection`` that is handed out has been greeted; its session, where the connection has one, is bound to it.
    * After ``fork`` the child starts anew, with another session; the parent's conversation goes on untouched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from txmq.client.transport.connection import Connection
from txmq.client.transport.reply import Reply
from txmq.client.transport.session import PROTOCOL, ClientSession, parse_hello
from txmq.errors import (
    BrokerAwayError,
    ClosedError,
    ConnectionLostError,
    FencedError,
    RemoteProtocolError,
    RequestTimeoutError,
    TxmqError,
)
from txmq.model import Outcome
from txmq.protocol.commands import Stated, Word
from txmq.runtime import net
from txmq.runtime.ports import Buffer, Clock
from txmq.runtime.threads import Lock, watch_forks
from txmq.xid import TxId

BACKOFF_S_MIN, BACKOFF_S_MAX = 0.02, 0.5
_TURN_S = 0.002  # who finds another thread connecting looks again that often
IDLE_CHECK_S = 0.05  # a link unused for longer is looked at before it is used: the broker may have been restarted
SILENT_S = 0.05  # a broker not known to have lived since is asked before rows are locked: it may be frozen
AWAY_S_MAX = 1.0  # who holds locks, or is about to, waits no longer for a broker that is known to be away

T = TypeVar("T")


class ReconnectingConnection:
    """See the module's docstring.

    Args:
        addresses: (host, port) pairs, tried in turn.
        name: this client's name, for the broker's lists and logs.
        clock: for deadlines.
        connect_timeout: seconds for one attempt.

    Thread safety: any thread.
    """

    def __init__(
        self, addresses: Sequence[tuple[str, int]], name: str, clock: Clock, connect_timeout: float = 5.0
    ) -> None:
        self._addresses, self._name, self._clock = list(addresses), name, clock
        self._connect_timeout = connect_timeout
        self._link: Connection | None = None
        self._session: ClientSession | None = None
        self._lock = Lock()  # held for a moment
        self._maker: object = None  # who makes or changes the link or the session
        self._backoff_s = 0.0
        self._retry_at = 0.0
        self._last_failure = "no time was left to connect"
        self._is_away = False  # as the last ``reach`` found
        self._closed = False
        watch_forks(self)

    # --- requests ----------------------------------------------------------------------------------------------------

    def call(
        self, verb: str, *arguments: Word, timeout: float,
        extensions: Mapping[str, Word | None] | None = None, body: Sequence[Buffer] | None = None,
    ) -> bytes:  # fmt: skip
        """Send a request and wait for its answer; the answer's body.

        Raises:
            BrokerError: the broker refused; its class says why.
            ConnectionLostError, RequestTimeoutError: whether the request was executed is not known.
            LocalProtocolError: the protocol cannot carry it; nothing was sent.
        """
        return self.submit(verb, *arguments, timeout=timeout, extensions=extensions, body=body).result()

    def submit(
        self, verb: str, *arguments: Word, timeout: float,
        extensions: Mapping[str, Word | None] | None = None, body: Sequence[Buffer] | None = None,
    ) -> Reply:  # fmt: skip
        """As ``call``, without waiting: the request is on its way when this returns; see ``Reply.result``."""
        deadline = self._clock.monotonic() + timeout
        while True:
            link = self.link(deadline)
            try:
                return link.request(deadline, verb, *arguments, extensions=extensions, body=body)
            except ConnectionLostError:
                if link.failure is None:  # pragma: no cover - a link raises its own failure only
                    raise

    def submit_transaction(self, head: str, stated: Stated, body: Sequence[Buffer] | None, deadline: float) -> Reply:
        """``submit`` for a transaction's requests: unchecked (``transaction_line``), the deadline as monotonic time.

        66 calls of Python less than ``submit``. A link is waited for no longer than ``AWAY_S_MAX``.
        """
        while True:
            link = self.link(deadline, AWAY_S_MAX)
            try:
                return link.transaction(deadline, head, stated, body)
            except ConnectionLostError:
                if link.failure is None:  # pragma: no cover - a link raises its own failure only
                    raise

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

    # --- the link ----------------------------------------------------------------------------------------------------

    def link(self, deadline: float, wait_s_max: float = float("inf")) -> Connection:
        """The live link, made if need be, within ``wait_s_max``.

        Raises:
            BrokerAwayError: no address could be connected to.
            ClosedError: the connection was closed.
        """
        link, now = self._link, self._clock.monotonic()
        if link is None or link.failure is not None or (now - link.used_at > IDLE_CHECK_S and link.is_stale()):
            link = self._make(min(deadline, now + wait_s_max))
            now = self._clock.monotonic()
        link.used_at = now
        return link

    @property
    def wait_s_max(self) -> float:
        """How long to wait for the broker before something that locks rows."""
        link = self._link
        is_known_away = self._is_away or (link is not None and link.failure is not None)
        return min(self._connect_timeout, AWAY_S_MAX) if is_known_away else self._connect_timeout

    def reach(self, deadline: float) -> None:
        """Return if the broker is there, as far as can be known beforehand; for who is about to lock rows.

        Raises:
            BrokerAwayError: it is away.
            ClosedError: the connection was closed.
        """
        link, now = self._link, self._clock.monotonic()
        if link is not None and not link.is_stale() and now - link.lived_at <= SILENT_S:
            return
        until, is_away = min(deadline, now + self.wait_s_max), True
        try:
            self.regain(until)
            self._ask(until)
            is_away = False
        finally:
            self._is_away = is_away

    def regain(self, deadline: float) -> None:
        """Have a link again: until ``deadline``, or for ``AWAY_S_MAX`` if that fails at once. Errors as ``link``."""
        refused_until = min(deadline, self._clock.monotonic() + AWAY_S_MAX)
        while True:
            try:
                self.link(deadline)
            except ConnectionLostError:
                if self._clock.monotonic() >= refused_until:
                    raise
            else:
                return

    def _ask(self, deadline: float) -> None:
        link = self.link(deadline)
        if self._clock.monotonic() - link.lived_at <= SILENT_S:
            return
        try:
            link.request(deadline, "ping").result()
        except RequestTimeoutError as error:
            raise BrokerAwayError(f"{link.address} does not answer") from error
        except ConnectionLostError as error:
            raise BrokerAwayError(str(error)) from error

    @property
    def live(self) -> Connection | None:
        """The link, if there is one that has not failed."""
        link = self._link
        return link if link is not None and link.failure is None else None

    def session_link(self, deadline: float) -> tuple[Connection, ClientSession]:
        """The live link with the session bound to it; makes both if need be. Errors: of ``link`` and of ``hello``."""
        link = self.link(deadline)
        session = link.session
        if session is None:
            session = self._alone(deadline, lambda: link.session or self._hello(link, deadline, wish="new"))
        assert session is not None
        return link, session

    def saw_outcome(self, txid: TxId) -> None:
        """Somebody was told the end of a transaction; if it is of this session, the broker need not keep it for us."""
        known = self._session
        if known is not None and (known.cluster, known.home, known.id) == txid[:3]:
            known.saw_outcome(txid.counter)

    def known_outcome(self, txid: TxId) -> Outcome | None:
        """What became of a transaction of this session that was lost and found."""
        known = self._session
        is_ours = known is not None and (known.cluster, known.home, known.id) == txid[:3]
        return known.known_outcome(txid.counter) if known is not None and is_ours else None

    def renew_session(self, old: ClientSession, deadline: float) -> None:
        """Give up a session that contradicts itself; the next ``session_link`` has another."""
        self._alone(deadline, lambda: self._drop_session(old))

    def _drop_session(self, old: ClientSession) -> None:
        if self._session is not None and self._session.is_same(old):
            self._session = None
            if self._link is not None:
                self._link.fail(ConnectionLostError("the session was given up"))

    @property
    def session(self) -> ClientSession | None:
        """The session in use, if there is one yet."""
        return self._session

    def _make(self, deadline: float) -> Connection:
        return self._alone(deadline, lambda: self._made(deadline))

    def _made(self, deadline: float) -> Connection:
        link = self._link
        if link is not None and link.failure is None:
            return link
        self._wait_out_backoff(deadline)
        if self._closed:
            raise ClosedError("the client is closed")
        if self._clock.monotonic() >= deadline:
            # Nothing was tried, so this is no failure that the back-off counts: else callers with deadlines shorter
            # than the back-off would push the next attempt away for ever.
            raise BrokerAwayError(self._last_failure)
        try:
            self._link = self._connected(deadline)
        except TxmqError as error:
            self._last_failure = str(error)
            self._backoff_s = min(max(self._backoff_s * 2, BACKOFF_S_MIN), BACKOFF_S_MAX)
            self._retry_at = self._clock.monotonic() + self._backoff_s
            raise
        self._backoff_s = 0.0
        return self._link

    def _alone(self, deadline: float, work: Callable[[], T]) -> T:
        """Do it while no other thread makes or changes the link or the session.

        Raises:
            BrokerAwayError: the deadline passed first.
        """
        me = object()
        try:
            while True:
                with self._lock:
                    if self._maker is None:
                        self._maker = me
                if self._maker is me:
                    return work()
                if self._clock.monotonic() >= deadline:
                    raise BrokerAwayError(self._last_failure if self._backoff_s else "another thread is connecting")
                self._clock.sleep(_TURN_S)
        finally:
            # No lock that is held over calls: a KeyboardInterrupt behind its ``acquire`` would leave it taken for ever.
            if self._maker is me:
                self._maker = None

    def _wait_out_backoff(self, deadline: float) -> None:
        if self._backoff_s and not self._closed:
            wait = min(self._retry_at, deadline) - self._clock.monotonic()
            if wait > 0:
                self._clock.sleep(wait)

    def _connected(self, deadline: float) -> Connection:
        failures = []
        for host, port in self._addresses:
            remaining = min(deadline - self._clock.monotonic(), self._connect_timeout)
            if remaining <= 0:
                break
            try:
                stream = net.connect(host, port, remaining)
            except OSError as error:
                failures.append(f"{host}:{port}: {error}")
                continue
            link = Connection(stream, self._clock, f"{host}:{port}")
            try:
                self._greet(link, deadline)
            except BaseException as error:
                link.fail(ConnectionLostError("the greeting failed"))
                if isinstance(error, RemoteProtocolError) or not isinstance(
                    error, ConnectionLostError | RequestTimeoutError
                ):
                    raise
                failures.append(str(error))
                continue
            return link
        raise BrokerAwayError(f"cannot connect to {'; '.join(failures) or 'the broker in time'}")

    # --- hello -------------------------------------------------------------------------------------------------------

    def _greet(self, link: Connection, deadline: float) -> None:
        """Introduce this client; resume its session, or take a new one where the broker no longer knows it."""
        known = self._session
        if known is None:
            self._hello(link, deadline, wish="none")
            return
        try:
            resumed = self._hello(link, deadline, wish=known.wish)
        except FencedError:
            resumed = None
        if resumed is None or not resumed.is_same(known):
            # Forgotten, or issued by another broker under this address.
            self._session = None
            self._hello(link, deadline, wish="new")
        else:
            known.clock_ahead_ms = resumed.clock_ahead_ms
            self._session = link.session = known  # it counts the transactions

    def _hello(self, link: Connection, deadline: float, wish: str) -> ClientSession | None:
        attempt = min(deadline, self._clock.monotonic() + self._connect_timeout)
        reply = link.request(attempt, "hello", PROTOCOL, self._name, extensions={"session": wish})
        fields = parse_hello(reply.result())
        if fields.get("session") is None:
            return None
        link.session = self._session = ClientSession(fields, int(self._clock.monotonic() * 1000))
        return link.session

    def measure_clock(self, session: ClientSession, timeout: float) -> None:
        """Ask once more what time it is at the broker, where the link speaks for the session: a clock was set.

        Raises:
            TxmqError: the broker does not say.
        """
        deadline = self._clock.monotonic() + timeout
        link = self.link(deadline)
        if link.session is session:
            wish = {"session": session.wish}
            fields = parse_hello(link.request(deadline, "hello", PROTOCOL, self._name, extensions=wish).result())
            session.clock_ahead_ms = ClientSession(fields, int(self._clock.monotonic() * 1000)).clock_ahead_ms

    # --- ends --------------------------------------------------------------------------------------------------------

    def rest(self) -> None:
        """Let the link go; the next request makes another, which resumes the session."""
        link = self.live
        if link is not None:
            link.fail(ConnectionLostError("the connection was not needed for long"))

    def close(self) -> None:
        """Close; unanswered requests are told that the connection is lost."""
        self._closed = True
        link, self._link = self._link, None
        if link is not None:
            link.fail(ConnectionLostError("the client was closed"))

    def forked(self) -> None:
        """In a forked child: start anew."""
        link, self._link, self._session = self._link, None, None
        self._lock, self._maker = Lock(), None
        if link is not None:
            link.forget()
