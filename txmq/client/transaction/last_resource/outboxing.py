"""A block's way into the outbox of its last resource: whether it may go there, when, and as what.

Theory of operation. The broker is looked at once before the body, for at most ``away_after_ms``, unless the breaker
says already that it is away (``xa/last_resource/outbox.py``). A block that finds it away asks it for nothing; one that
loses it behind its prepare, or whose keys wait in the outbox, has its prepare voided behind the decision.

What cannot wait in a database fails, as without an outbox: offsets of consumers (``tx.ack``), messages that were sent
ahead, and what is larger than one request or one statement. So does a block whose partitions have unanswered commits of
this client and another resource: it could overtake them.
"""

from __future__ import annotations

from collections.abc import Sequence

from txmq.client.transaction.homes import RoutedTransaction
from txmq.client.transaction.messages import EncodedPart, MessageBuffer
from txmq.errors import ConfigError, RolledBackError, TransactionAwayError
from txmq.xa.database.outbox_tables import ANY_KEY, OutboxKey
from txmq.xa.last_resource.outbox import OutboxState

_UNKEYED = 0  # the checksum that messages without a key share


class Outboxing:
    """See the module's docstring. One thread.

    Attributes:
        is_away: this block goes without the broker from here on.
    """

    def __init__(self, broker: RoutedTransaction, messages: MessageBuffer, state: OutboxState, uuid: str) -> None:
        self._broker, self._messages, self.state, self._uuid = broker, messages, state, uuid
        self.is_away = False

    def begin(self) -> None:
        """Before the body: find out whether the broker is there, and have a session.

        Raises:
            ConfigError: the client has several homes.
            RolledBackError: there is no session yet, and the broker is away or refuses.
        """
        broker = self._broker
        if not broker.is_alone:
            raise ConfigError("a last resource with an outbox takes a lone broker: this client has a registry")
        if broker.home.control.session is not None:
            self.is_away = self.state.is_tripped or not self._is_there()
        else:
            broker.reach()  # TransactionAwayError: without a session there is no id

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
        return not any(commits.holds(slot, self._uuid) for slot in self._messages.slots())

    def hurry(self) -> None:
        """Let a prepare take no longer than a broker that is there needs."""
        self._broker.prepare_timeout_s = self.state.options.away_after_ms / 1000

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
