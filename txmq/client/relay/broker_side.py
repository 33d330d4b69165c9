"""The brokers' side of a relay: pages as transactions of the anchor, with branches at other homes.

The anchor is the home that keeps the outbox's chain: the one of the relay's first page. Its session here is of a
connection of the relay's own, so that each transaction of it is a page. What goes to other homes is prepared there
first, as of any transaction over homes (``client/transaction/homes``). A page that does not fit a request is streamed.

A home that does not answer for ``AWAY_S`` is *away*: until it answers, what is for it is not sent.

Invariants:
    * the request that decides a page is sent once, under the id of its claim; what is not answered is settled by the
      core;
    * a refused or unanswered prepare at another home leaves the page undecided: the core fences it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from txmq.client.partitioner import KeyHashSelector
from txmq.client.relay.page_transaction import TIMEOUT_S, PageTransaction
from txmq.client.transaction.messages import MessageBuffer
from txmq.client.transport.reconnecting import ReconnectingConnection
from txmq.errors import (
    BrokerAwayError,
    BrokerError,
    FencedError,
    LocalProtocolError,
    NotOwnerError,
    OtherSessionError,
    OutboxConflictError,
    RolledBackError,
    SessionFullError,
    StaleTopicError,
    TransactionError,
    TxmqError,
)
from txmq.model import Outcome
from txmq.outbox.outbox import Outbox
from txmq.outbox.page import OutboxRow
from txmq.outbox.relay_core import OTHER_HOME, Answer, Away, Chain, ClaimOutcome, RelayRow, Send
from txmq.outbox.relay_core import Outcome as AskOutcome
from txmq.outbox.tables import away_reason

if TYPE_CHECKING:
    from txmq.client.client import Client

AWAY_S: Final = 10.0
_REFUSED = (400, 403, 404, 413)
_CLAIM_OUTCOMES = {Outcome.COMMITTED.value: ClaimOutcome.COMMITTED, Outcome.ROLLED_BACK.value: ClaimOutcome.ROLLED_BACK}

T = TypeVar("T")


class _Topic(NamedTuple):
    topic_id: int
    partitions: int


class RelayBroker:
    """See the module's docstring.

    Args:
        client: for the routes to all homes.

    Thread safety: the relay's thread.
    """

    def __init__(self, client: Client, outbox: Outbox) -> None:
        self._client, self._routes, self._outbox = client, client.routes, outbox
        self._connection: ReconnectingConnection | None = None
        self._session: Any = None
        self._anchor: Any = None
        self._page: PageTransaction | None = None  # until its end is known
        self._selector = KeyHashSelector()
        self._without_key: dict[str, int] = {}  # the partition of a page's messages without a key
        self._away_since: dict[int, float] = {}
        self.topics: dict[str, _Topic] = {}
        self.asked_topics_at = float("-inf")
        self.problem: TxmqError | None = None

    def close(self) -> None:
        """Close the relay's own connection."""
        self._settle(ClaimOutcome.OVER)
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    # --- the connection ----------------------------------------------------------------------------------------------

    def connect(self, home: str) -> str | None:
        """A session of the anchor, or of any home if ``home`` is empty; see ``relay_core.Connect``."""
        self.close()
        return self._asked(lambda: self._connect(home))

    def _connect(self, home: str) -> str:
        deadline = self._client.clock.monotonic() + TIMEOUT_S
        any_link = self._routes.any_link()
        any_link.control.connect(deadline)  # of a lazy client: now it is known whether there are several homes
        number = int(home[17:], 16) if home else 0
        link = self._routes.link_of_home(number) if home else any_link
        self._connection = link.new_connection()
        self._session = self._connection.have_session(deadline)
        self._anchor = self._routes.link_of_home(self._session.home)
        found = f"{self._session.cluster:016x}-{self._session.home:016x}"
        if not home or found == home:
            return found
        if not self._routes.is_single_home and number in {known.home for known in self._routes.all_links()}:
            raise BrokerAwayError(f"no broker told where home {number:016x} is; now one does")
        return OTHER_HOME

    def new_txid(self) -> str:
        """The next id of the session."""
        assert self._connection is not None
        self._settle(ClaimOutcome.OVER)
        self._page = PageTransaction(self._client, self._anchor, self._connection, self._session)
        return self._page.txid

    def ask_topics(self) -> dict[str, _Topic] | None:
        """All topics, with ids and numbers of partitions; kept for the pages that follow."""
        found = self._asked(self._client.topics.all_known)
        if found is None:
            return None
        self.asked_topics_at = self._client.clock.monotonic()
        self.topics = {topic.config.name: _Topic(topic.topic_id, topic.config.partitions) for topic in found}
        return self.topics

    # --- homes that are away -----------------------------------------------------------------------------------------

    def away(self, step: Away) -> Mapping[int, str]:
        """See ``relay_core.Away``."""
        self._without_key = {}
        away = self._homes_away()
        if not away:
            return {}
        found: dict[int, str] = {}
        with suppress(TxmqError):  # nobody tells where a topic is: to send it will say so
            for row in step.rows:
                if row.topic in self.topics:
                    home = self._routes.link_for(row.topic, self._partition_of(row)).home
                    if home in away:
                        found[row.group] = away_reason(home)
        return found

    def _homes_away(self) -> Collection[int]:
        """Those that do not answer for long."""
        if self._routes.is_single_home:
            return ()
        now, links = self._client.clock.monotonic(), self._routes.links()
        self._away_since = {link.home: self._away_since.get(link.home, now) for link in links if link.is_away}
        return {home for home, since in self._away_since.items() if now - since >= AWAY_S}

    def answering(self, homes: Collection[int]) -> list[int]:
        """Those of these homes that answer."""
        return [home for home in homes if self._answers(home)]

    def _answers(self, home: int) -> bool:
        try:
            self._routes.link_of_home(home).look()
        except TxmqError:
            return False
        return True

    # --- what became of a page ---------------------------------------------------------------------------------------

    def outcome(self, step: AskOutcome) -> ClaimOutcome | None:
        """What became of a claim; a fence makes it certain."""

        def work() -> ClaimOutcome:
            try:
                body = self._repeat("outcome", step.txid, extensions={"fence": None})
            except FencedError:
                return ClaimOutcome.OVER
            except NotOwnerError:
                return ClaimOutcome.OTHER_HOME
            told = _CLAIM_OUTCOMES.get(bytes(body).partition(b"\n")[0].decode(), ClaimOutcome.OVER)
            if self._page is not None and self._page.txid == step.txid:
                self._settle(told)
            return told

        return self._asked(work)

    def chain(self, step: Chain) -> tuple[str | None] | None:
        """The newest page of the outbox."""
        return self._asked(lambda: (json.loads(bytes(self._repeat("outbox", step.uuid)))["last"],))

    def agrees_with(self, row: RelayRow) -> bool:
        """Whether a relay that has stopped there may go on: its home answers, and its newest page is the row's."""
        if self.connect(row.home) in (None, OTHER_HOME):
            return False
        chain = self.chain(Chain(row.uuid))
        return chain is not None and row.agrees_with(chain[0])

    def _repeat(self, verb: str, *arguments: str, extensions: dict[str, Any] | None = None) -> bytes:
        assert self._connection is not None
        return self._connection.repeat(verb, *arguments, timeout=TIMEOUT_S, extensions=extensions)

    def _asked(self, work: Callable[[], T]) -> T | None:
        try:
            found = work()
        except TxmqError as error:
            self.problem = error
            return None
        self.problem = None
        return found

    # --- a page ------------------------------------------------------------------------------------------------------

    def send(self, step: Send, on_part: Callable[[], None]) -> Answer:
        """Send a page, once; ``on_part`` is called after each part of a large one."""
        page = self._page
        assert page is not None
        assert page.txid == step.row.claim
        try:
            page.send(self._messages(step.rows), self._page_fields(step.row), on_part)
        except TxmqError as error:
            page.note_silence()
            self.problem = _cause(error)
            return self._meaning(self.problem)
        except (TypeError, ValueError, OverflowError) as error:  # a row that another program has written
            self.problem = LocalProtocolError(f"a message cannot be sent: {error!r}")
            return Answer.REFUSED
        self._settle(ClaimOutcome.COMMITTED)
        self.problem = None
        return Answer.TAKEN

    def _settle(self, told: ClaimOutcome) -> None:
        """The page has ended, as far as is known."""
        page, self._page = self._page, None
        if page is not None:
            page.settle(told)

    def _page_fields(self, row: RelayRow) -> dict[str, str | int]:
        return {"outbox": row.uuid, "name": self._outbox.name, "after": row.last or "-"}

    def _messages(self, rows: Sequence[OutboxRow]) -> MessageBuffer:
        messages = MessageBuffer(None, lambda topic: self.topics[topic].topic_id)
        for row in rows:
            messages.add(row.topic, self._partition_of(row), (row.key, row.value, row.headers, row.created_ms))
        return messages

    def _partition_of(self, row: OutboxRow) -> int:
        partitions = self.topics[row.topic].partitions
        if row.key is not None:
            return self._selector.partition_of(row.key, partitions)
        if row.topic not in self._without_key:
            self._without_key[row.topic] = self._next_partition(row.topic, partitions)
        return self._without_key[row.topic]

    def _next_partition(self, topic: str, partitions: int) -> int:
        """The next one whose home is there, if there is one."""
        partition = 0
        for _ in range(partitions):
            partition = self._selector.partition_of(None, partitions)
            if self._routes.is_single_home or not self._routes.link_for(topic, partition).is_away:
                break
        return partition

    def _meaning(self, error: TxmqError) -> Answer:
        if isinstance(error, OutboxConflictError):
            return Answer.CONFLICT
        if isinstance(error, (FencedError, SessionFullError, OtherSessionError)):
            return Answer.OVER
        if isinstance(error, (NotOwnerError, StaleTopicError)):
            self._routes.forget_topics()
            return Answer.STALE
        if isinstance(error, BrokerError) and error.code in _REFUSED:
            return Answer.REFUSED
        if isinstance(error, LocalProtocolError) or type(error) is RolledBackError:  # too many homes
            return Answer.REFUSED
        return Answer.SILENT


def _cause(error: TxmqError) -> TxmqError:
    """What a home has said, or that it said nothing."""
    while isinstance(error, TransactionError) and isinstance(error.__cause__, TxmqError):
        error = error.__cause__
    return error
