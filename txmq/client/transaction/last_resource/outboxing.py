"""A block's way into the outbox of its last resource: whether it may go there, when, and as what.

Theory of operation. The broker is looked at once before the body, for at most ``away_after_ms``, unless the breaker
says already that it is away (``xa/last_resource/outbox.py``). A block that finds it away asks it for nothing; one that
loses it behind its prepare, or whose keys wait in the outbox, has its prepare voided behind the decision.

A client that has reached no broker yet has no session and knows no topic. The database tells it its cluster and the
topics (``xa/database/outbox_topics.py``), and the block's id is a random one that no broker hears of.

What cannot wait in a database fails, as without an outbox: offsets of consumers (``tx.ack``), messages that were sent
ahead, and what is larger than one request or one statement. So does a block whose partitions have unanswered commits of
this client and another resource: it could overtake them.
"""

from __future__ import annotations

from collections.abc import Sequence

from txmq.client.transaction.homes import RoutedTransaction
from txmq.client.transaction.messages import EncodedPart, MessageBuffer
from txmq.client.transaction.preparing import attach_for_caller
from txmq.client.transport.ports import BlockTopics
from txmq.client.transport.session import ClientSession
from txmq.errors import ConfigError, RolledBackError, TransactionAwayError
from txmq.runtime.os_clock import OSRandom
from txmq.xa import LastResource
from txmq.xa.database.outbox_keys import ANY_KEY, OutboxKey
from txmq.xa.database.outbox_topics import TopicSize
from txmq.xa.last_resource.branch import Branch
from txmq.xa.last_resource.outbox import OutboxState

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
        self.is_away = self.is_unknown = False

    def begin(self) -> None:
        """Before the body: find out whether the broker is there.

        Raises:
            ConfigError: the client has several homes.
        """
        if not self._broker.is_alone:
            raise ConfigError("a last resource with an outbox takes a lone broker: this client has a registry")
        self.is_away = self.state.is_tripped or not self._is_there()

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
            attach_for_caller(broker, is_away=self.is_away)
            return
        cluster, random = self._resource.cluster(lent), OSRandom()
        if not cluster:
            name = self._resource.name
            raise TransactionAwayError(f"the broker is away, and {name} knows of none: call install(client) once")
        broker.attach_alone(ClientSession.unknown(cluster, random.bits(40) | 1))

    def begun(self, branch: Branch) -> None:
        """The database has begun: without the broker it says which topics there are."""
        topics = self._topics
        if self.is_away and topics.wants_to_assume:
            topics.assume(branch.known_topics(), self._resource.name)
        self._changes = topics.changes

    def _is_there(self) -> bool:
        try:
            self._broker.reach(self.state.options.away_after_ms / 1000)
        except TransactionAwayError:
            self.state.trip()
            return False
        return True

    def reach(self) -> None:
        """Behind the body: make sure that the broker is there, or that the block may go without it.

        Raises:
            TransactionAwayError: neither.
        """
        self.is_away = self.is_away or self.state.is_tripped
        if self.is_away and self.may_wait:
            return
        if not self.may_wait:
            if self.is_unknown:
                raise TransactionAwayError("the broker was away when the block began, and these messages cannot wait")
            self.is_away = False
            self._broker.reach()
        else:
            self.is_away = not self._is_there()

    @property
    def may_wait(self) -> bool:
        """Whether the messages may wait in the database."""
        broker = self._broker
        if broker.acks is not None or broker.streamed.parts or broker.branches:
            return False
        commits = broker.commits
        uuid = self._resource.uuid or ""
        return not any(commits.holds(slot, uuid) for slot in self._messages.slots())

    def hurry(self) -> None:
        """Let a prepare take no longer than a broker that is there needs."""
        self._broker.prepare_timeout_s = self.state.options.away_after_ms / 1000

    # --- topics ------------------------------------------------------------------------------------------------------

    def tell_topics(self, branch: Branch) -> None:
        """Let the database know of topics that it may not know yet, in a block whose messages go to the broker.

        Raises: as ``Branch.agree_on_topics``.
        """
        told = self.state.told
        news = {name: one for name, one in self._sizes().items() if told.get(name) != one}
        if news and self._topics.changes == self._changes and self._broker.is_alone:
            for name in branch.agree_on_topics(self._broker.txid, news):
                self._topics.forget(name)
            self._news = news

    def agree_on_topics(self, branch: Branch) -> None:
        """Make sure that the block's messages name partitions of topics as they are now, for all processes.

        Raises:
            RolledBackError: a topic has changed; or as ``Branch.agree_on_topics``.
        """
        sizes = self._sizes()
        newer = branch.agree_on_topics(self._broker.txid, sizes) if sizes else {}
        if newer or self._topics.changes != self._changes:
            self._topics.assume(newer, self._resource.name)
            text = f"{', '.join(sorted(newer)) or 'a topic'} has other partitions by now; run the block again"
            raise RolledBackError(text, self._broker.txid)
        self._news = sizes

    def committed(self) -> None:
        """The database has what it was told."""
        self.state.told.update(self._news)

    def _sizes(self) -> dict[str, TopicSize]:
        seen = ((topic, self._topics.seen(topic)) for topic, _ in self._messages.slots())
        return {topic: size for topic, size in seen if size is not None}

    # --- messages ----------------------------------------------------------------------------------------------------

    def encoded(self, parts: Sequence[EncodedPart]) -> bytes:
        """The messages, as a row holds them: the body of the request that drains it.

        Raises:
            RolledBackError: they are too large, or the outbox has no room.
        """
        broker = self._broker
        if not broker.fits_one_request(parts):
            raise RolledBackError("the broker is away, and the messages are too large for the outbox", broker.txid)
        body = b"".join(broker.encoded(parts))
        if not self.state.has_room(len(body)):
            size = self.state.size
            text = f"the broker is away, and the outbox is full: {size.rows} rows, {size.size_bytes} bytes wait"
            raise RolledBackError(text, broker.txid)
        return body


def keys_of(parts: Sequence[EncodedPart]) -> frozenset[OutboxKey]:
    """The keys by which messages keep their order in the outbox; a message without a key has its whole partition."""
    return frozenset(
        OutboxKey(f"{part.topic}-{part.partition}", word)
        for part in parts
        for word in (
            [ANY_KEY] if part.keys is None else [ANY_KEY if key == _UNKEYED else f"{key:08x}" for key in part.keys]
        )
    )


def whole_partitions(messages: MessageBuffer) -> frozenset[OutboxKey]:
    """The same for messages that were sent ahead: their keys are not kept."""
    return frozenset(OutboxKey(f"{topic}-{partition}", ANY_KEY) for topic, partition in messages.slots())
