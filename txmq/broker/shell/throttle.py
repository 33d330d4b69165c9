"""Limits at work: connections over their number are refused, users above their rate wait, and nobody else does. No I/O.

The time is handed in.

Theory of operation. ``Admission`` says how many connections there may be, how many of one address, and how often they
may come. What one address is: ``addresses.network_of``.

``Throttle`` holds quotas. Each ``bytes_per_s`` and ``requests_per_s`` of a user or a topic is a ``TokenBucket``. A
request takes from those of its user and of its topics, and waits while one of them is closed:

    ======================  =============================================  ================
    request                 waits                                          takes
    ======================  =============================================  ================
    ``put``                 ahead of the broker, with its connection       1, its body
    ``get``                 likewise for requests; its answer for bytes    1, its answer
    begins a transaction    never: it is refused (429)                     1, its body
    all others              never                                          1, its body
    ======================  =============================================  ================

What its user may not do to a topic takes nothing from that topic's bucket and does not wait for it: it is refused, and
refused requests must not use up what others may take.

Those of transactions and of groups never wait: row locks and heartbeats queue after them on their connection. What
ends a transaction is never refused, whatever it takes; the next put, get or transaction pays for that. What begins one
(messages under an id that is new: ``put tx=``, ``prepare``, ``commit``) is refused while a bucket is closed, takes
nothing then, and must be sent again: a client that wants more than its quota gives its locks back. ``decide`` ends
what is prepared in databases.

Connections that wait are in a queue. In each ``turned`` all are asked in that order; one whose buckets are open takes
what there is, and goes to the end if it wants more.

Invariants:
    * over any time t, at most rate x (t + burst) is taken from a bucket, and whatever was taken last;
    * a later one takes nothing from a bucket that others wait for;
    * a quota that changes counts from the next ``look`` on, for those that wait as well;
    * a user who may not write to a topic, or read it, has no effect on its buckets;
    * where nothing is limited nothing is counted: ``is_on`` is False;
    * an address without a connection is not counted: there are as many counts as connections at most;
    * at most ``BUCKETS_MAX`` addresses are known by how often they come; the one that was new first is forgotten first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from txmq.addresses import network_of
from txmq.broker.state.principals import Permissions, Principals
from txmq.broker.verbs.access.authorizer import READ, TOPIC, WRITE
from txmq.config import BrokerSettings
from txmq.errors import BadRequestError, OverloadedError
from txmq.protocol.requests import Request, Violation
from txmq.protocol.transaction_bodies import split_branches, split_parts

if TYPE_CHECKING:
    from txmq.broker.shell.connection import Connection

BURST_S: Final = 0.5
READ_S: Final = 0.1  # a read under a quota takes no more than is paid for in this time; a large one stops all others
READ_SIZE_BYTES_MIN: Final = 4096
_BEGIN: Final = frozenset({b"commit", b"prepare"})
_WITH_PARTS: Final = frozenset({b"commit", b"prepare", b"decide"})
CONNECTS_BURST_S: Final = 10.0  # a host whose programs all come back at once
BUCKETS_MAX: Final = 10_000


class TokenBucket:
    """What one user or topic may still take. It may be overdrawn: whatever was taken last is paid for before the next.

    Args:
        rate: what flows in, a second.
        burst_s: so many seconds' worth may be taken at once.

    Attributes:
        waiting: how many wait for it to open; the owner counts them.
    """

    __slots__ = ("_burst_s", "_paid_s", "rate", "waiting")

    def __init__(self, rate: int, burst_s: float) -> None:
        self.rate, self._burst_s, self._paid_s = rate, burst_s, 0.0
        self.waiting = 0

    def is_open(self, now_s: float) -> bool:
        """Whether anything may be taken."""
        return self._paid_s - now_s <= self._burst_s

    def is_full(self, now_s: float) -> bool:
        """Whether everything that was taken is paid for: it is as a new one."""
        return self._paid_s <= now_s

    def take(self, amount: int, now_s: float) -> None:
        """Take so much, open or not; below 0: give it back."""
        self._paid_s = max(self._paid_s, now_s) + amount / self.rate


class Waiter(Protocol):
    """A connection whose next request waits, or a read."""

    @property
    def is_gone(self) -> bool:
        """Whether nobody waits any more."""

    def may_go_on(self) -> None:
        """It is this one's turn."""


class _Limits(NamedTuple):
    """Of one user or topic, each none or one."""

    bytes: tuple[TokenBucket, ...] = ()
    requests: tuple[TokenBucket, ...] = ()


_UNLIMITED: Final = _Limits()


class _Waiting(NamedTuple):
    buckets: tuple[TokenBucket, ...]
    since_s: float


class Throttle:
    """The quotas of users and topics, and the queue of what waits for them; see the module's docstring.

    Attributes:
        is_on: whether anything is limited.
        delayed: requests and reads that waited, or do.
        delayed_s: how long those waited that do no more, together.
        refused: transactions that were not begun.
    """

    __slots__ = (
        "_principals", "_topics", "_turn", "_users", "_version", "_waiting", "delayed", "delayed_s", "is_on", "refused",
    )  # fmt: skip

    def __init__(self, principals: Principals) -> None:
        self._principals, self._version = principals, -1
        self._users: dict[str, _Limits] = {}
        self._topics: dict[bytes, _Limits] = {}
        self._waiting: dict[Waiter, _Waiting] = {}
        self._turn: tuple[TokenBucket, ...] = ()  # what the one whose turn it is waited for
        self.is_on = False
        self.delayed, self.delayed_s, self.refused = 0, 0.0, 0
        self.look()

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def look(self) -> None:
        """See whether quotas have changed."""
        if self._version == self._principals.version:
            return
        self._version = self._principals.version
        users, topics = self._users, self._topics
        self._users, self._topics = {}, {}
        for (kind, name), limits in self._principals.quotas.items():
            if kind == "user":
                self._users[name] = _limits(users.get(name, _UNLIMITED), limits)
            else:
                self._topics[name.encode()] = _limits(topics.get(name.encode(), _UNLIMITED), limits)
        self.is_on = any(any(of) for of in (*self._users.values(), *self._topics.values()))
        for waiter, (buckets, since_s) in self._waiting.items():
            self._waiting[waiter] = _Waiting((), since_s)
            _count(buckets, -1)

    def admitted(
        self,
        waiter: Connection,
        known: Permissions | None,
        requests: list[Request | Violation],
        paid: int,
        now_s: float,
    ) -> int:
        """How many of a connection's next requests may be taken in; the one after them waits.

        Args:
            requests: those that are refused are replaced by their refusals.
            known: what its user may do; None while there are no users.
            paid: so many of them were admitted before.
        """
        if waiter in self._waiting:
            return paid
        begun: set[bytes] | None = None  # by earlier requests, which may not be taken in yet
        for index in range(paid, len(requests)):
            request = requests[index]
            if isinstance(request, Violation):
                continue
            txid = _txid_of(request)
            if txid and self._is_over(known, request, now_s):
                if begun is None:
                    begun = {_txid_of(one) for one in requests[:index] if not isinstance(one, Violation)}
                if txid not in begun and waiter.begins(txid):
                    self.refused += 1
                    requests[index] = _refusal(request)
                    continue
            if not self._take(waiter, known, request, now_s):
                return index
            if begun is not None:
                begun.add(txid)
        return len(requests)

    def _is_over(self, known: Permissions | None, request: Request, now_s: float) -> bool:
        """Whether a bucket is closed from which a request with messages would take."""
        limits = [self._users.get("" if known is None else known.user, _UNLIMITED)]
        if self._topics:
            topics = [request[1][0]] if request[0] == b"put" else [topic for topic, _ in _parts_of(request)]
            limits += [self._of_topic(known, WRITE, topic) for topic in topics]
        return not all(bucket.is_open(now_s) for of in limits for bucket in of.requests + of.bytes)

    def _take(self, waiter: Waiter, known: Permissions | None, request: Request, now_s: float) -> bool:
        verb, arguments, extensions, body, _ = request
        of_user, size = self._users.get("" if known is None else known.user, _UNLIMITED), len(body or b"")
        is_put = verb == b"put"
        of_topic = _UNLIMITED
        if is_put or verb == b"get":
            of_topic = self._of_topic(known, WRITE if is_put else READ, arguments[0])
        counted, sized = of_user.requests + of_topic.requests, of_user.bytes + of_topic.bytes
        is_delayed = verb == b"get" or (is_put and not (extensions and b"tx" in extensions))
        if is_delayed and not self._may_take(waiter, counted + sized if is_put else counted, now_s):
            return False
        _take_from(counted, 1, now_s)
        _take_from(sized, size, now_s)
        if self._topics and verb in _WITH_PARTS and body:
            for topic, part_size in _parts_of(request):
                of_part = self._of_topic(known, WRITE, topic)
                _take_from(of_part.requests, 1, now_s)
                _take_from(of_part.bytes, part_size, now_s)
        return True

    def _of_topic(self, known: Permissions | None, operation: str, topic: bytes) -> _Limits:
        limits = self._topics.get(topic, _UNLIMITED)
        if limits is _UNLIMITED or known is None or known.may(operation, TOPIC, topic):
            return limits
        return _UNLIMITED

    def readable_bytes(self, waiter: Waiter, user: str, topic: bytes, size: int, now_s: float) -> int:
        """How many of ``size`` bytes may be read now; 0: none, the read waits."""
        needed = self._sized(user, topic)
        if not needed:
            return size
        if not self._may_take(waiter, needed, now_s):
            return 0
        least = min(int(bucket.rate * READ_S) for bucket in needed)
        return min(size, max(least, READ_SIZE_BYTES_MIN))

    def took(self, user: str, topic: bytes, size: int, now_s: float) -> None:
        """So many bytes were read; below 0: so many less than was said before."""
        _take_from(self._sized(user, topic), size, now_s)

    def turned(self, now_s: float) -> None:
        """Some time has passed: give each his turn whose buckets are open."""
        for waiter, (buckets, since_s) in list(self._waiting.items()):
            is_gone = waiter.is_gone
            if not is_gone and not all(bucket.is_open(now_s) for bucket in buckets):
                continue
            del self._waiting[waiter]
            _count(buckets, -1)
            self.delayed_s += now_s - since_s
            if not is_gone:
                self._turn = buckets
                waiter.may_go_on()
                self._turn = ()

    def _sized(self, user: str, topic: bytes) -> tuple[TokenBucket, ...]:
        return self._users.get(user, _UNLIMITED).bytes + self._topics.get(topic, _UNLIMITED).bytes

    def _may_take(self, waiter: Waiter, buckets: tuple[TokenBucket, ...], now_s: float) -> bool:
        """Whether all are open, and nobody else waits for them; if not, it waits."""
        for bucket in buckets:
            if not bucket.is_open(now_s) or (bucket.waiting and bucket not in self._turn):
                self._waiting[waiter] = _Waiting(buckets, now_s)
                _count(buckets, 1)
                self.delayed += 1
                return False
        return True


def _limits(before: _Limits, stated: Mapping[str, int]) -> _Limits:
    """Of one quota; a bucket whose rate has not changed stays what it is."""
    sized = _bucket(before.bytes, stated.get("bytes_per_s"))
    return _Limits(sized, _bucket(before.requests, stated.get("requests_per_s")))


def _bucket(before: tuple[TokenBucket, ...], rate: int | None) -> tuple[TokenBucket, ...]:
    if rate is None:
        return ()
    return before if before and before[0].rate == rate else (TokenBucket(rate, BURST_S),)


def _take_from(buckets: tuple[TokenBucket, ...], amount: int, now_s: float) -> None:
    for bucket in buckets:
        bucket.take(amount, now_s)


def _count(buckets: tuple[TokenBucket, ...], change: int) -> None:
    for bucket in buckets:
        bucket.waiting += change


def _txid_of(request: Request) -> bytes:
    """Of a request whose messages may begin a transaction; else empty."""
    verb, arguments, extensions, body, _ = request
    if verb == b"put":
        return bytes(extensions.get(b"tx", b"")) if extensions else b""
    return bytes(arguments[0]) if body and verb in _BEGIN else b""


def _refusal(request: Request) -> Violation:
    text = "a quota is used up: begin the transaction later"
    return Violation(OverloadedError.code, OverloadedError.wire_name, text, request[4], closes=False)


def _parts_of(request: Request) -> list[tuple[bytes, int]]:
    """Topic and size of each of a transaction's batches that come with the request; none if it must be refused."""
    verb, _, extensions, body, _ = request
    start = 0
    try:
        if verb == b"decide":
            _, start = split_branches(body or b"", int((extensions or {}).get(b"branches", b"0")))
        return [(topic, len(batch)) for topic, _, batch, _, _ in split_parts(memoryview(body or b"")[start:])]
    except BadRequestError:
        return []


class Admission:
    """Whether a connection is taken: by how many there are, how many of its address, and how often these come.

    Attributes:
        refused: connections that were closed at once.
    """

    __slots__ = ("_buckets", "_open", "_open_max", "_per_address", "_per_address_max", "_per_s_max", "refused")

    def __init__(self, settings: BrokerSettings) -> None:
        self._open_max, self._per_address_max = settings.connections_max, settings.connections_per_address_max
        self._per_s_max = settings.connects_per_address_per_s_max
        self._buckets: dict[str, TokenBucket] = {}
        self._open = self.refused = 0
        self._per_address: Counter[str] = Counter()

    def enter(self, address: str, now_s: float) -> str | None:
        """A connection has come, and counts until ``leave``; why it must be closed, if it must.

        Args:
            address: HOST:PORT of its other end; empty if that is not known.
            now_s: monotonic.
        """
        self._open += 1
        limit = self._per_address_max
        of_address = 0
        if limit is not None:
            place = network_of(address)
            of_address = self._per_address[place] = self._per_address[place] + 1
        if self._open > self._open_max:
            refusal = f"connections_max {self._open_max} is reached"
        elif limit is not None and of_address > limit:
            refusal = f"connections_per_address_max {limit} is reached by {place}: close some of its connections"
        elif self._per_s_max is not None and not self._comes_in_time(network_of(address), self._per_s_max, now_s):
            told = f"connects_per_address_per_s_max {self._per_s_max} is exceeded by {network_of(address)}"
            refusal = f"{told}: keep connections open, and come again later"
        else:
            return None
        self.refused += 1
        return refusal

    def leave(self, address: str) -> None:
        """A connection has gone, whether it was let in or not."""
        self._open -= 1
        if self._per_address_max is not None:
            place = network_of(address)
            self._per_address[place] -= 1
            if not self._per_address[place]:
                del self._per_address[place]

    def _comes_in_time(self, place: str, rate: int, now_s: float) -> bool:
        bucket = self._buckets.get(place)
        if bucket is None:
            if len(self._buckets) >= BUCKETS_MAX:
                del self._buckets[next(iter(self._buckets))]
            bucket = self._buckets[place] = TokenBucket(rate, CONNECTS_BURST_S)
        if not bucket.is_open(now_s):
            return False
        bucket.take(1, now_s)
        return True
