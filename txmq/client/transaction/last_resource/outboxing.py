"""A block's way into the outbox of its last resource: whether it may go there, when, and as what.

Theory of operation. The broker is looked at once before the body, for at most ``away_after_ms``, unless the breaker
says already that it is away (``xa/last_resource/outbox.py``). A block that finds it away asks it for nothing; one that
loses it behind its prepare, or whose keys wait in the outbox, has its prepare voided behind the decision.

With ``outbox="always"`` a block looks at no broker, neither before its body nor behind it: all that it has goes into
its database with COMMIT (``enclosing``), and this client's drainer is woken. Only a client that has no session yet
looks for its broker, as above, and what cannot wait in a database goes to the broker. Before that is prepared it waits
there for earlier messages of its keys to leave the outbox: behind the body nobody comes in between whose rows this
block had waited for.

In a cluster the homes of the messages are looked at behind the body, when they are known. If one of them is away, the
whole block waits: a row for each home, all of them in the one transaction of the database, which decides for all. Each
home gets its own row as soon as it is there (``xa/database/outbox_series.py``).

A client that has reached no broker yet has no session and knows no topic. The database tells it its cluster and the
topics (``xa/database/outbox_topics.py``), and the block's id is a random one that no broker hears of.

While the broker is away, what cannot wait in a database fails, as without an outbox: offsets of consumers (``tx.ack``),
messages that were sent ahead, and what is larger than one request or one statement. So does a block whose partitions
have unanswered commits of this client and another resource: it could overtake them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import cast

from txmq.client.transaction.branch_commits import BranchCommits, BranchHome
from txmq.client.transaction.broker_side import BrokerTransaction
from txmq.client.transaction.homes import RoutedTransaction
from txmq.client.transaction.messages import EncodedPart, MessageBuffer
from txmq.client.transaction.preparing import NOT_KNOWN, attach_for_caller
from txmq.client.transaction.refusals import raise_rolled_back, rolled_back
from txmq.client.transport.ports import BlockTopics, Broker
from txmq.client.transport.session import UNKNOWN_BITS, ClientSession
from txmq.errors import (
    DiskFullError,
    OverloadedError,
    RolledBackError,
    TransactionAwayError,
    TransactionError,
    TransactionTimeoutError,
    TxmqError,
)
from txmq.model import TopicPartition
from txmq.runtime.os_clock import OSRandom
from txmq.xa import LastResource
from txmq.xa.database.outbox_homes import LONE
from txmq.xa.database.outbox_keys import ANY_KEY, OutboxKey
from txmq.xa.database.outbox_topics import TopicsAgreed, TopicSize
from txmq.xa.last_resource.branch import Branch
from txmq.xa.last_resource.enclosing import GrownTopicsError, Waiting
from txmq.xa.last_resource.outbox import OutboxState

_NO_ROOM = (OverloadedError, DiskFullError)
AHEAD_PAUSE_S = 0.005  # a look is a query
_NOTHING_AGREED = TopicsAgreed({}, None)
_UNKEYED = 0  # the checksum that messages without a key share


class Outboxing:
    """See the module's docstring. One thread.

    Attributes:
        is_away: this block goes without the broker from here on.
        is_unknown: no broker knows the block's id, so that it can only wait in the database.
    """

    def __init__(
        self, broker: RoutedTransaction, messages: MessageBuffer, resource: LastResource, state: OutboxState,
        topics: BlockTopics,
    ) -> None:  # fmt: skip
        self._broker, self._messages, self.state, self._resource = broker, messages, state, resource
        self._topics, self._changes = topics, topics.changes
        self._news: dict[str, TopicSize] = {}
        self._aged: tuple[dict[str, TopicSize], int | None] = {}, None
        self._rows: Sequence[Waiting] = ()
        self.is_away = self.is_unknown = False

    def begin(self) -> None:
        """Before the body: find out whether the broker is there; in a cluster, whether any is."""
        home = self._broker.home
        if self.state.is_always and home.control.session is not None:
            self.is_away = True
            return
        self.is_away = (self._broker.is_alone and self.state.is_tripped) or not self._is_there(home)

    def attach(self, lent: object) -> None:
        """Have a session before the database begins.

        Args:
            lent: the caller's own connection, if it is to be used.

        Raises:
            RolledBackError: the broker refuses; or it is away, was never reached, and nor does the database know it.
            Exception: as of ``LastResource.cluster``.
        """
        broker = self._broker
        self.is_unknown = self.is_away and broker.home.control.session is None
        if not self.is_unknown:
            try:
                attach_for_caller(broker, is_away=self.is_away)
            except (TransactionAwayError, TransactionTimeoutError):  # it was there a moment ago; nothing has gone to it
                self.state_at(broker.home).trip()
                self.is_away = True
                self.attach(lent)
                return
            self.is_away = self.is_away or self.state.is_always
            return
        cluster, random = self._resource.cluster(lent), OSRandom()
        if not cluster:
            name = self._resource.name
            raise TransactionAwayError(f"the broker is away, and {name} knows of none: call install(client) once")
        broker.attach_alone(ClientSession.unknown(cluster, random.bits(UNKNOWN_BITS)))

    def begun(self, branch: Branch) -> None:
        """The database has begun: without the broker it says which topics there are."""
        topics = self._topics
        if self.is_away and topics.wants_to_assume:
            topics.assume(branch.known_topics(), self._resource.name)
        self._changes = topics.changes

    def _is_there(self, home: Broker) -> bool:
        clock = home.clock
        try:
            home.control.reach(min(self._broker.deadline, clock.monotonic() + self.state.options.away_after_ms / 1000))
        except TxmqError as error:
            if not isinstance(rolled_back(error, None), TransactionAwayError):
                raise_rolled_back(error, None)
            self.state_at(home).trip()
            return False
        return True

    def state_at(self, home: Broker) -> OutboxState:
        """What is known of one home."""
        return self.state if self._broker.is_alone else self.state.at(f"{cast('BranchHome', home).home:016x}")

    def find_homes(self, branch: Branch) -> None:
        """Behind the body: begin at the homes of the messages, unless one is away and the block may go without them.

        Where they are not known, and no broker says them any more, those that the database knows are meant.

        Raises:
            RolledBackError: as ``RoutedTransaction.find_homes``.
        """
        broker = self._broker
        if not broker.is_alone:
            self._learn_homes(branch)
        if not broker.is_alone and self.may_wait:
            self.is_away = self.is_away or any(self._is_known_away(home) for home in broker.owners(self._messages))
            if self.is_away:
                return
            try:
                broker.find_homes(self._messages)
            except TransactionAwayError:
                self.is_away = True
            return
        self.is_away = self.is_away and broker.is_alone  # it cannot wait: a home that is away refuses it
        broker.find_homes(self._messages)

    def _learn_homes(self, branch: Branch) -> None:
        try:
            self._broker.owners(self._messages)
        except (TransactionAwayError, TransactionTimeoutError):
            self._topics.assume(branch.known_topics(), self._resource.name)
            self.is_away = True

    def _is_known_away(self, home: Broker) -> bool:
        return self.state_at(home).is_tripped or not self._is_there(home)

    def reach(self) -> None:
        """Behind the body: make sure that the broker is there, or that the block may go without it.

        Raises:
            TransactionAwayError: neither.
        """
        if not self._broker.is_alone and (self.may_wait or not self.is_unknown):
            return  # ``find_homes`` has looked
        self.is_away = self.is_away or self.state.is_tripped
        if self.is_away and self.may_wait:
            return
        if not self.may_wait:
            if self.is_unknown:
                raise TransactionAwayError("the broker was away when the block began, and these messages cannot wait")
            self.is_away = False
            self._broker.reach()
        else:
            self.is_away = not self._is_there(self._broker.home)

    def passed(self) -> None:
        """What kept the messages from waiting in the database is answered, perhaps."""
        self.is_away = self.state.is_always and self._broker.is_alone and self.may_wait

    def let_drain(self, branch: Branch, keys: Collection[OutboxKey]) -> None:
        """Behind the body, before anything is prepared: earlier messages of its keys go first.

        What is prepared would keep them from being placed.

        Raises:
            RolledBackError: they wait still.
        """
        broker, until = self._broker, self.state.options.away_after_ms / 1000 + self._broker.home.clock.monotonic()
        last = ahead = branch.last_ahead(broker.txid, keys)
        while ahead is not None:
            if branch.has_the_only_writer or broker.home.clock.monotonic() >= min(until, broker.deadline):
                raise RolledBackError("earlier messages of its keys wait in the outbox: run it again", broker.txid)
            broker.pause(AHEAD_PAUSE_S)
            ahead = branch.last_ahead(broker.txid, keys, last)

    @property
    def rows(self) -> int:
        """How many rows of the outbox the block has filled: one for each home."""
        return len(self._rows)

    @property
    def may_wait(self) -> bool:
        """Whether the messages may wait in the database."""
        broker = self._broker
        if _cannot_wait(broker) or any(_cannot_wait(branch.broker) for branch in broker.branches):
            return False
        if broker.is_alone:
            return not (broker.commits and self._are_held(broker.commits, self._messages.slots()))
        owners = broker.owners(self._messages).items()
        return not any(self._are_held(home.branch_commits, slots) for home, slots in owners)

    def _are_held(self, commits: BranchCommits, slots: Iterable[TopicPartition]) -> bool:
        uuid = self._resource.uuid or ""
        return any(commits.holds(slot, uuid) for slot in slots)

    def goes_without(self, home: Broker, broker: BrokerTransaction, error: TxmqError) -> bool:
        """Whether the messages wait from here on, as a home is away, late or has no room.

        Args:
            broker: the conversation in which it did not prepare.
        """
        is_not_known = isinstance(error, NOT_KNOWN)
        if not (is_not_known or isinstance(error, _NO_ROOM)) or not self.may_wait or self._broker.remaining_s <= 0:
            return False
        self.is_away = True
        if is_not_known:
            self.state_at(home).trip()
        else:
            broker.was_refused(error)
        return True

    def hurry(self) -> None:
        """Let a prepare take no longer than a broker that is there needs."""
        for one in (self._broker, *(branch.broker for branch in self._broker.branches)):
            one.prepare_timeout_s = self.state.options.away_after_ms / 1000

    # --- topics ------------------------------------------------------------------------------------------------------

    def tell_topics(self, branch: Branch) -> None:
        """Let the database know of topics that it may not know yet, in a block whose messages go to the broker.

        Raises: as ``Branch.agree_on_topics``.
        """
        told = self.state.told
        news = {name: one for name, one in self._sizes().items() if told.get(name) != one}
        if news and self._topics.changes == self._changes:
            for name in branch.agree_on_topics(self._broker.txid, news).newer:
                self._topics.forget(name)
            self._news = news

    def agree_on_topics(self, branch: Branch) -> None:
        """Make sure that the block's messages name partitions of topics as they are now, for all processes.

        Raises:
            RolledBackError: a topic has changed; or as ``Branch.agree_on_topics``.
        """
        sizes, state = self._sizes(), self.state
        newer, age = branch.agree_on_topics(self._broker.txid, sizes, state.distrusted) if sizes else _NOTHING_AGREED
        if newer or self._topics.changes != self._changes:
            self._topics.assume(newer, self._resource.name)
            text = f"{', '.join(sorted(newer)) or 'a topic'} has other partitions by now; run the block again"
            raise RolledBackError(text, self._broker.txid)
        self._news = sizes
        if age is not None:
            state.ages.update({name: (size, age) for name, size in sizes.items()})

    @property
    def markers_kept_ms(self) -> int:
        """How long behind its deadline the marker of an enclosed block is kept."""
        return int(self.state.options.markers_kept_s * 1000)

    def enclose(self, branch: Branch, parts: Sequence[EncodedPart]) -> None:
        """Put the messages of a block of which no broker has heard beside its rows, when they commit.

        Raises: as ``Branch.enclose``.
        """
        broker, sizes, told = self._broker, self._sizes(), self.state.told
        age = self.state.age_of(sizes)
        is_known = age is not None or (
            not branch.have_topics_age and all(told.get(it[0]) == it[1] for it in sizes.items())
        )
        if self._topics.changes != self._changes or not is_known:
            self.agree_on_topics(branch)
            age = self.state.age_of(sizes)
        self._aged = sizes, age
        branch.enclose(broker.txid, broker.timeout_s, self.waiting(parts), sizes, age)

    def refused(self, error: TransactionError) -> TransactionError:
        """The database did not take the block; what the caller is told."""
        if not isinstance(error, GrownTopicsError):
            return error
        self._topics.assume(error.newer, self._resource.name)
        return RolledBackError(str(error), self._broker.txid)

    def committed(self, *, was_kept_out: bool = False) -> None:
        """The database has what it was told, and the rows: a drainer that counted before has not seen them.

        Args:
            was_kept_out: see ``Branch``.
        """
        if was_kept_out:
            self.state.distrust(*self._aged)
        self.state.told.update(self._news)
        for row in self._rows:
            self.state.at(row.home).added(len(row.batches))

    def _sizes(self) -> dict[str, TopicSize]:
        found = dict[str, TopicSize]()
        for topic, _ in self._messages.slots():
            size = self._topics.seen(topic)
            if size is not None:
                found[topic] = size
        return found

    # --- messages ----------------------------------------------------------------------------------------------------

    def waiting(self, parts: Sequence[EncodedPart]) -> list[Waiting]:
        """The messages as rows hold them, one for each home: the body of the request that drains it.

        Raises:
            RolledBackError: they are too large, or the outbox has no room; or their homes are not known.
        """
        broker = self._broker
        found = dict[str, list[EncodedPart]]()
        for part in parts:
            found.setdefault(self._home_of(part), []).append(part)
        rows, size_bytes = list[Waiting](), 0
        for home in sorted(found):
            row = self._encoded(home, found[home])
            rows.append(row)
            size_bytes += len(row.batches)
        if not self.state.has_room(size_bytes):
            count, waiting_bytes = self.state.total
            text = f"the outbox is full: {count} rows, {waiting_bytes} bytes wait"
            raise RolledBackError(text, broker.txid)
        self._rows = rows
        return rows

    def _encoded(self, home: str, parts: Sequence[EncodedPart]) -> Waiting:
        broker = self._broker
        if not broker.fits_one_request(parts):
            raise RolledBackError("the messages are too large for the outbox, and must wait there", broker.txid)
        return Waiting(home, b"".join(broker.encoded(parts)), keys_of(parts))

    def _home_of(self, part: EncodedPart) -> str:
        size = self._topics.seen(part.topic)
        homes = () if size is None else size.homes
        if part.partition < len(homes):
            return f"{homes[part.partition]:016x}"
        if homes or not self._broker.is_alone:
            text = f"the home of {part.topic}-{part.partition} is not known, and the brokers are away"
            raise TransactionAwayError(text, self._broker.txid)
        return LONE


def _cannot_wait(broker: BrokerTransaction) -> bool:
    """Whether a part was sent ahead, or has offsets, those of its own partitions."""
    return broker.acks is not None or broker.streamed.parts > 0


def keys_of(parts: Sequence[EncodedPart]) -> frozenset[OutboxKey]:
    """The keys by which messages keep their order in the outbox; a message without a key has its whole partition."""
    found = set[OutboxKey]()
    for part in parts:
        slot = f"{part.topic}-{part.partition}"
        for key in (_UNKEYED,) if part.keys is None else part.keys:
            found.add(OutboxKey(slot, ANY_KEY if key == _UNKEYED else f"{key:08x}"))
    return frozenset(found)


def whole_partitions(messages: MessageBuffer) -> frozenset[OutboxKey]:
    """The same for messages that were sent ahead: their keys are not kept."""
    return frozenset(OutboxKey(f"{topic}-{partition}", ANY_KEY) for topic, partition in messages.slots())
