"""Which home owns a partition: the links of a client, and the choice among them.

Theory of operation. The first link leads to the bootstrap addresses. A broker that is alone owns every partition, so
that link stays the only one (``is_single_home``). A broker with a registry says so in its answer to ``hello``: the link
is bound to its home then, and the links of the other homes are made when they are needed. What is known of the cluster
(``MetadataCache``) comes with every answer to ``meta``: a producer or consumer asks for its topics again every 30 s,
and a partition never moves. A broker that does not own a partition refuses it with 409: the topic is asked for again.

A home that cannot be reached may be led elsewhere by now: before another attempt, the other brokers are asked
(``cluster homes``). Only live links are asked, and a connection of its own to any known address: so that no attempt to
connect waits for another one.

Invariants:
    * a client of a broker that is alone has one link, and makes no request to learn routes;
    * a home has one link for as long as the client lives, and is asked for by name in each ``hello``;
    * what asks all homes, or all of a topic, leaves out those that are given up as lost (``txmq cluster retire``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from txmq.addresses import join_address, split_address
from txmq.client.bootstrap import Bootstrap
from txmq.client.home_link import LOOK_S, HomeLink
from txmq.client.transport.reconnecting import END_S_MAX, Address, AnyBroker, Login, have_ended
from txmq.errors import (
    BrokerAwayError,
    ConfigError,
    ConnectionLostError,
    NotOwnerError,
    PartialResultError,
    RemoteProtocolError,
    RequestTimeoutError,
    TxmqError,
    UnavailableError,
)
from txmq.protocol.json_text import Fields, json_object
from txmq.protocol.requests import Word
from txmq.runtime.ports import Clock
from txmq.runtime.threads import Attempt, Exclusive, Lock, watch_forks

if TYPE_CHECKING:
    from txmq.runtime.tls import ClientTls

ROUTE_REFRESH_INTERVAL_S: Final = 30.0
CORRECTIONS_MAX: Final = 3  # 409s that one request follows
_RETRY_S: Final = 0.05  # after every home was asked in vain
T = TypeVar("T")


class _KnownTopic(NamedTuple):
    """A topic; a later one of a name has a larger id, and a later state of a topic a larger version."""

    topic_id: int
    version: int
    homes: tuple[int, ...]  # of each partition


class MetadataCache:
    """A client's knowledge of a cluster: its homes, where they are led, and the home of each partition.

    Any broker tells it (``meta``, ``cluster homes``), as it knows it itself. Topics have versions, so that what an
    older answer says of one is not taken over. Where a home is led has none: the newest answer counts, and a wrong
    address is found out by ``hello``.

    Changes replace what is there, so that it can be read without a lock.

    Attributes:
        leaders: by home, where it is led; None if no leader is known to live.
        names: by home, the name of its broker.
        retired: by home that is given up as lost for ever, why.
        replicas: by home that has some, where they are.
    """

    def __init__(self) -> None:
        self.leaders: dict[int, Address | None] = {}
        self.names: dict[int, str] = {}
        self.retired: dict[int, str] = {}
        self.replicas: dict[int, tuple[Address, ...]] = {}
        self._topics: dict[str, _KnownTopic] = {}

    def homes_of(self, topic: str) -> tuple[int, ...] | None:
        """The home of each partition; None if it is not known."""
        known = self._topics.get(topic)
        return None if known is None else known.homes

    def topic_id(self, topic: str) -> int:
        """The id of the topic that has the name; 0 if it is not known."""
        known = self._topics.get(topic)
        return 0 if known is None else known.topic_id

    def found(self, home: int, address: Address) -> None:
        """A home has answered there."""
        self.leaders = {**self.leaders, home: address}

    def forget(self, topic: str) -> None:
        """What is known of a topic may be wrong."""
        self._topics.pop(topic, None)

    def forget_all(self) -> list[str]:
        """Forget each topic; returns their names."""
        forgotten, self._topics = self._topics, {}
        return list(forgotten)

    def learn_topics(self, answer: Fields) -> None:
        """Take over an answer to ``meta``; one of a broker that is alone says nothing of homes.

        Raises:
            RemoteProtocolError: it cannot be read.
        """
        try:
            self._learn_leaders(answer.get("leaders", {}))
            self._learn_retired(answer.get("retired", {}))
            for topic in answer["topics"]:
                if "homes" in topic:
                    homes = tuple(int(home, 16) for home in topic["homes"])
                    self._learn_topic(
                        str(topic["name"]), _KnownTopic(int(topic["topic_id"]), int(topic["version"]), homes)
                    )
        except (ConfigError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise RemoteProtocolError(f"not a map of topics: {error!r}") from None

    def _learn_topic(self, name: str, told: _KnownTopic) -> None:
        known = self._topics.get(name)
        if known is None or known[:2] <= told[:2]:
            self._topics[name] = told
            missing = dict.fromkeys(home for home in told.homes if home not in self.leaders)
            if missing:
                self.leaders = {**missing, **self.leaders}

    def learn_homes(self, answer: Fields) -> None:
        """Take over an answer to ``cluster homes``.

        Raises:
            RemoteProtocolError: it cannot be read.
        """
        try:
            self._learn_leaders({row["home"]: row["leader"] for row in answer["homes"]})
            self._learn_retired({row["home"]: row["retired"] for row in answer["homes"] if row.get("retired")})
            self.names = {int(row["home"], 16): str(row["name"]) for row in answer["homes"]}
            self.replicas = {
                int(row["home"], 16): tuple(map(split_address, row["replicas"]))
                for row in answer["homes"]
                if "replicas" in row
            }
        except (ConfigError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise RemoteProtocolError(f"not a list of homes: {error!r}") from None

    def _learn_retired(self, told: Fields) -> None:
        """A home that is retired stays so."""
        self.retired = {**self.retired, **{int(home, 16): str(reason) for home, reason in told.items()}}

    def _learn_leaders(self, told: Fields) -> None:
        leaders = {int(home, 16): None if text is None else split_address(text) for home, text in told.items()}
        self.leaders = {**self.leaders, **leaders}


class Routes:
    """The links of a client; see the module's docstring.

    Args:
        bootstrap: the addresses of the first broker, and how brokers are spoken to.
        on_unknown_topic: called with a topic's name if what is known of it may be wrong.
        link_type: what its links are.

    Attributes:
        is_single_home: whether the first link is the only one: until a broker has said that it has a registry.
        likely_home: where the last transaction that took its id early wrote to; None before there was one.
        tls: how every home is spoken to; None: in plaintext.
        login: how connections log in; None: they do not.
        meets_replicas: whether a replica may be taken for the broker at an address: it has figures of its own.

    Thread safety: any thread.
    """

    def __init__(
        self, bootstrap: Bootstrap, name: str, clock: Clock, timeout: float, on_unknown_topic: Callable[[str], None],
        link_type: type[HomeLink] = HomeLink,
    ) -> None:  # fmt: skip
        self._find, self.tls, self._name, self._clock, self._timeout = (
            bootstrap.find,
            bootstrap.tls,
            name,
            clock,
            timeout,
        )
        self.login = bootstrap.login
        self._on_unknown_topic, self._link_type = on_unknown_topic, link_type
        self._map = MetadataCache()
        self._cluster: str | None = None  # as the first broker with a registry has said
        self._lock = Lock()
        self._first = self._new_link()
        self._links: dict[int, HomeLink] = {}
        self.is_single_home = True
        self.likely_home: int | None = None
        self.meets_replicas = False
        self._asking = Exclusive()  # to ask for the homes
        self._asked_at = self._refresh_at = float("-inf")
        self._closed = False
        watch_forks(self)

    def _new_link(self) -> HomeLink:
        return self._link_type(self, self._name, self._clock, self._timeout, self._on_unknown_topic)

    # --- the choice --------------------------------------------------------------------------------------------------

    def link_for(self, topic: str, partition: int) -> HomeLink:
        """The link of the home that owns a partition, as far as that is known.

        Raises:
            UnknownTopicError, BrokerAwayError: the topic is not known yet, and was asked for.
        """
        if self.is_single_home:
            return self._first
        homes = self._map.homes_of(topic)
        if homes is None or partition >= len(homes):
            self.describe(topic, self._timeout)
            homes = self._map.homes_of(topic)
        if homes is None or not 0 <= partition < len(homes):
            return self.any_link()  # the broker says what is wrong
        return self.link_of_home(homes[partition])

    def topic_id(self, topic: str) -> int:
        """The id of the topic that has the name, to be stated with messages for it; 0 at a lone broker.

        Raises as ``link_for``.
        """
        if self.is_single_home:
            return 0
        return self._map.topic_id(topic) or int(self.describe(topic, self._timeout)["topics"][0]["topic_id"])

    def homes_of(self, topic: str) -> tuple[int, ...] | None:
        """The home of each partition, as it is known now; None if it is not, and for a broker that is alone."""
        return self._map.homes_of(topic)

    def link_of_home(self, home: int) -> HomeLink:
        """The link of a home, such as the one in a transaction's id; a broker that is alone answers for every home.

        It is any link if the cluster has no such home: the broker says so.
        """
        if self.is_single_home:
            return self._first
        known = self._links.get(home)
        if known is not None:
            return known
        if home not in self._map.leaders:
            self._refresh_homes(self._clock.monotonic() + self._timeout)
        if home not in self._map.leaders:
            return self.any_link()
        return self._bound_link(home)

    def _bound_link(self, home: int) -> HomeLink:
        with self._lock:
            link = self._links.get(home)
            if link is None:
                link = self._new_link()
                link.bind(home)
                self._links[home] = link
                if self._closed:
                    link.close()
        return link

    def any_link(self) -> HomeLink:
        """A link for a request that any broker answers: the first one, unless its home is away."""
        if self.is_single_home:
            return self._first
        return next((link for link in self._known_links() if not link.is_away), self._first)

    def links(self) -> tuple[HomeLink, ...]:
        """The links of all homes that are known, in the order of the homes' ids; asked for every 30 s."""
        if self.is_single_home:
            return (self._first,)
        self._refresh_now_and_then()
        return tuple(self._bound_link(home) for home in sorted(self._map.leaders.keys() - self._map.retired))

    def replicas_of(self, link: HomeLink) -> tuple[Address, ...]:
        """Where replicas of a home are, as far as that is known; asked for as ``links``."""
        if self.is_single_home:
            return ()
        self._refresh_now_and_then()
        return self._map.replicas.get(link.home, ())

    def _refresh_now_and_then(self) -> None:
        now = self._clock.monotonic()
        if now >= self._refresh_at:
            self._refresh_at = now + ROUTE_REFRESH_INTERVAL_S  # once, also if nobody answers
            self._refresh_homes(now + LOOK_S)

    def all_links(self) -> tuple[HomeLink, ...]:
        """As ``links``, and none is missing.

        Raises:
            BrokerAwayError: no broker tells which homes there are.
        """
        deadline = self._clock.monotonic() + self._timeout
        if not self._first.home:  # lazy: what kind of broker it is comes with its greeting
            self._first.control.connect(deadline)
        if not self.is_single_home and not self._refresh_homes(deadline):
            raise BrokerAwayError("no broker of the cluster tells which homes it has")
        self._note_unled(self._map.leaders)
        return self.links()

    def owners(self, topic: str) -> tuple[HomeLink, ...]:
        """The links of the homes that own the topic's partitions, asked for anew. Raises as ``describe``."""
        if not self._first.home:  # as in ``all_links``
            self._first.control.connect(self._clock.monotonic() + self._timeout)
        if self.is_single_home:
            return (self._first,)
        self.describe(topic, self._timeout)
        owners = set(self._map.homes_of(topic) or ())
        return tuple(self._bound_link(home) for home in sorted(owners - self._map.retired.keys()))

    def kept_partitions(self, topic: str, count: int) -> list[int]:
        """Those of a topic's ``count`` partitions whose homes are not given up as lost, as far as that is known."""
        lost = {number for number, home in enumerate(self._map.homes_of(topic) or ()) if home in self._map.retired}
        return [number for number in range(count) if number not in lost]

    def _known_links(self) -> list[HomeLink]:
        """The first link, then those of other homes that are known to be led."""
        others = [home for home, leader in sorted(self._map.leaders.items()) if leader is not None]
        return [self._first, *(self._bound_link(home) for home in others if home != self._first.home)]

    def name_of(self, link: HomeLink) -> str:
        """A home for people: the name of its broker, and its id."""
        name = self._map.names.get(link.home)
        return f"{link.home:016x}" if name is None else f"{name} ({link.home:016x})"

    # --- asking ------------------------------------------------------------------------------------------------------

    def ask_any(self, verb: str, *arguments: Word, timeout: float) -> bytes:
        """Ask what any broker answers. Raises as ``ReconnectingConnection.repeat``."""
        return self._ask_any(verb, arguments, timeout, None, is_repeatable=True)

    def call_any(self, verb: str, *arguments: Word, timeout: float, extensions: dict[str, str] | None = None) -> bytes:
        """As ``ask_any`` for what must not be done twice. Raises as ``ReconnectingConnection.call``."""
        return self._ask_any(verb, arguments, timeout, extensions, is_repeatable=False)

    def _ask_any(
        self, verb: str, arguments: Sequence[Word], timeout: float, extensions: dict[str, str] | None, *,
        is_repeatable: bool,
    ) -> bytes:  # fmt: skip
        if self.is_single_home:
            control = self._first.control
            ask = control.repeat if is_repeatable else control.call
            return ask(verb, *arguments, timeout=timeout, extensions=extensions)
        deadline, tried = self._clock.monotonic() + timeout, set[int]()
        if self._asked_at == float("-inf"):  # once: so that others are known when the first one is away
            self._refresh_homes(deadline)
        while True:
            links = [link for link in self._known_links() if link.home not in tried]
            if not links:  # the one that was not tried is led by nobody now
                tried.clear()
                links = self._known_links()
            link = next((one for one in links if not one.is_away), links[0])
            left_s = deadline - self._clock.monotonic()
            wait_s = max(left_s / (len(links) + 1), min(LOOK_S, left_s)) if is_repeatable else left_s
            try:
                return link.control.call(verb, *arguments, timeout=wait_s, extensions=extensions)
            except (ConnectionLostError, RequestTimeoutError, UnavailableError) as error:
                may_be_done = not is_repeatable and not isinstance(error, BrokerAwayError)
                if may_be_done or self._closed or self._clock.monotonic() >= deadline:
                    raise
            if len(links) > 1:
                tried.add(link.home)
            else:
                tried.clear()
                self._clock.sleep(min(_RETRY_S, max(deadline - self._clock.monotonic(), 0.0)))

    def ask_owner(self, topic: str, partition: int, ask: Callable[[HomeLink], T]) -> T:
        """Ask the home that owns a partition; a home that refuses it leads to the right one.

        A home of a cluster that starts is asked again for ``timeout`` seconds.
        """
        deadline, corrections = self._clock.monotonic() + self._timeout, 0
        while True:
            try:
                return ask(self.link_for(topic, partition))
            except NotOwnerError:
                if corrections == CORRECTIONS_MAX:
                    raise
                corrections += 1
                self.corrected(topic)
            except UnavailableError:
                if self.is_single_home or self._closed or self._clock.monotonic() >= deadline:
                    raise
                self._clock.sleep(_RETRY_S)

    def ask_each(self, links: Sequence[HomeLink], ask: Callable[[HomeLink, float], Sequence[T]]) -> list[T]:
        """Ask several homes, within so many seconds each, and put together what they tell.

        Raises:
            PartialResultError: some did not answer; it has what the others told.
        """
        if len(links) == 1:
            return [*ask(links[0], self._timeout)]
        found, away = list[T](), list[str]()
        for link in links:
            try:
                found += ask(link, LOOK_S if link.is_away else self._timeout)
            except (ConnectionLostError, RequestTimeoutError, UnavailableError) as error:
                away.append(f"{self.name_of(link)}: {error}")
        if away:
            raise PartialResultError(
                f"{len(away)} of {len(links)} homes did not answer: {'; '.join(away)}", found, away
            )
        return found

    # --- what is learned ---------------------------------------------------------------------------------------------

    def describe(self, topic: str, timeout: float) -> Fields:
        """The answer to ``meta``; the homes in it are known from now on. Raises as ``ask_any``."""
        answer = json_object(self.ask_any("meta", topic, timeout=timeout))
        self._map.learn_topics(answer)
        self._note_unled(self._map.homes_of(topic) or ())
        return answer

    def _note_unled(self, homes: Iterable[int]) -> None:
        """Homes that nobody leads are away, and not waited for long."""
        for home in set(homes):
            if self._map.leaders.get(home) is None and self._bound_link(home).control.live is None:
                self._bound_link(home).was_silent()

    def corrected(self, topic: str) -> None:
        """A broker has refused a partition of the topic as not its own: ask for the topic again."""
        self._on_unknown_topic(topic)
        self._map.forget(topic)
        self.describe(topic, self._timeout)

    def forget_topics(self) -> None:
        """What is known of topics may be wrong: ask for each again when it is used next."""
        for topic in self._map.forget_all():
            self._on_unknown_topic(topic)

    def greeted(self, link: HomeLink, introduction: Fields, address: Address) -> None:
        """A broker has answered a connection of the link. Raises ConnectionLostError if it is not the link's home."""
        if introduction.get("replica") is True and not self.meets_replicas:
            raise ConnectionLostError(
                f"{join_address(*address)}: a replica of home {introduction.get('home')}, and no broker"
            )
        home = self.require_home(link, introduction)
        link.home = home
        if link.is_bound:
            self._map.found(home, address)

    def require_home(self, link: HomeLink, introduction: Fields) -> int:
        """The home that has answered ``hello``. Raises ConnectionLostError if it is not the link's."""
        try:
            cluster, home = introduction["cluster"], int(introduction["home"], 16)
        except (KeyError, TypeError, ValueError) as error:
            raise RemoteProtocolError(f"the answer to hello lacks or garbles {error}") from None
        if introduction.get("registry"):
            self._bind_first(link, cluster, home)
        if link.is_bound and (home != link.home or cluster != self._cluster):
            raise ConnectionLostError(f"home {home:016x} answers there, and home {link.home:016x} was asked for")
        return home

    def _bind_first(self, link: HomeLink, cluster: str, home: int) -> None:
        with self._lock:
            if link is not self._first or link.is_bound:
                return
            link.bind(home)
            self._links[home] = link
            self._cluster, self.is_single_home = cluster, False

    def addresses_of(self, link: HomeLink, deadline: float) -> Sequence[Address]:
        """Where the link's home may be led."""
        if link.is_bound:
            if link.is_away:
                self._refresh_homes(deadline)
            if link.home in self._map.retired:
                why = self._map.retired[link.home]
                raise BrokerAwayError(f"home {self.name_of(link)} is given up, with its messages ({why})")
            known = (self._map.leaders.get(link.home), link.address)
            found = list(dict.fromkeys(address for address in known if address is not None))
            if found:
                return found
        # The one that answered last comes first: the others may have been silent for their share of the time.
        listed = self._find(max(deadline - self._clock.monotonic(), 0.001))
        return sorted(listed, key=lambda address: address != link.address)

    def _refresh_homes(self, deadline: float) -> bool:
        """Ask for the homes and their leaders, or wait for the thread that does; whether a broker answered."""
        me, begun = Attempt(), self._clock.monotonic()
        try:
            if not self._asking.take_before(deadline, me, self._clock):
                return False
            return self._asked_at > begun or self._ask_for_homes(deadline)
        finally:
            me.is_over = True
            self._asking.leave(me)

    def _ask_for_homes(self, deadline: float) -> bool:
        for ask in (self._ask_live, self._ask_leaders, self._ask_bootstrap):
            with suppress(TxmqError):
                self._map.learn_homes(json_object(ask(min(deadline, self._clock.monotonic() + LOOK_S))))
                self._asked_at = self._clock.monotonic()
                self._refresh_at = self._asked_at + ROUTE_REFRESH_INTERVAL_S
                return True
        return False

    def _ask_live(self, deadline: float) -> bytes:
        for link in [*self._links.values()]:
            live = link.control.live
            if live is not None and not link.is_away:
                try:
                    return live.request(deadline, "cluster", "homes").result()
                except RequestTimeoutError:
                    link.was_silent()
                except ConnectionLostError:
                    continue
        raise BrokerAwayError("no link is live")

    def _ask_leaders(self, deadline: float) -> bytes:
        leaders = [leader for leader in self._map.leaders.values() if leader is not None]
        return self._ask_at([*leaders, *chain.from_iterable(self._map.replicas.values())], deadline)

    def _ask_bootstrap(self, deadline: float) -> bytes:
        return self._ask_at(self._find(LOOK_S), deadline)

    def _ask_at(self, addresses: Sequence[Address], deadline: float) -> bytes:
        """On a connection of its own: a link that connects may be the one that asks."""
        scout = self._link_type.connection_type(
            _Scout(addresses, self._cluster, self.tls, self.login), self._name, self._clock, LOOK_S
        )
        try:
            return scout.call("cluster", "homes", timeout=max(deadline - self._clock.monotonic(), 0.001))
        finally:
            scout.close()

    # --- ends --------------------------------------------------------------------------------------------------------

    def drain(self, deadline: float) -> None:
        """Wait for the answers to commits that were written (``PendingCommits``)."""
        for link in dict.fromkeys([self._first, *self._links.values()]):
            link.pending_commits.drain(deadline)

    def close(self) -> None:
        """Say that the client is done with its sessions, and close the links."""
        with self._lock:
            self._closed = True
            links = dict.fromkeys([self._first, *self._links.values()])  # in the same order each time
        deadline = self._clock.monotonic() + END_S_MAX
        try:
            have_ended([reply for link in links for reply in link.end_sessions(deadline)])
        finally:
            for link in links:
                link.close()

    def forked(self) -> None:
        """In a forked child: replace the lock, which a thread of the parent may hold."""
        self._lock, self._asking = Lock(), Exclusive()


class _Scout(AnyBroker):
    """Any broker of a cluster."""

    def __init__(
        self, addresses: Sequence[Address], cluster: str | None, tls: ClientTls | None, login: Login | None
    ) -> None:
        super().__init__(addresses, tls, login)
        self._cluster = cluster

    def greeted(self, introduction: Fields, address: Address) -> None:
        """See ``Destination``."""
        if introduction.get("cluster") != self._cluster:
            raise ConnectionLostError(f"a broker of cluster {introduction.get('cluster')} answers there")
