"""The brokers' side of a relay: pages as transactions of the anchor, with branches at other homes.

The anchor is the home that keeps the outbox's chain: the one of the relay's first page. Its session here is of a
connection of the relay's own, so that each transaction of it is a page.

Invariants:
    * a page is one request, sent once under the id of its claim; what is not answered is settled by the core;
    * a refused or unanswered prepare at another home leaves the page undecided: the core fences it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple, TypeVar

from crc32c import crc32c

from txmq.client.partitioner import KeyHashSelector
from txmq.client.transport.ports import RelayClient
from txmq.client.transport.reconnecting import ReconnectingConnection
from txmq.errors import (
    BrokerError,
    FencedError,
    NotOwnerError,
    OtherSessionError,
    OutboxConflictError,
    SessionFullError,
    StaleTopicError,
    TooLargeError,
    TxmqError,
)
from txmq.log.records import encode
from txmq.model import Outcome, TopicPartition
from txmq.outbox.outbox import Outbox
from txmq.outbox.page import OutboxRow
from txmq.outbox.relay_core import OTHER_HOME, Answer, Chain, Send, Told
from txmq.outbox.relay_core import Outcome as AskOutcome
from txmq.protocol.parts import encode_part
from txmq.runtime.crashpoints import crash_point
from txmq.runtime.ports import Buffer
from txmq.xid import TxId

TIMEOUT_S: Final = 5.0
_REFUSED = (400, 403, 404, 413)
_TOLD = {Outcome.COMMITTED.value: Told.COMMITTED, Outcome.ROLLED_BACK.value: Told.ROLLED_BACK}

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

    def __init__(self, client: RelayClient, outbox: Outbox) -> None:
        self._client, self._routes, self._outbox = client, client.routes, outbox
        self._connection: ReconnectingConnection | None = None
        self._session: Any = None
        self._selector = KeyHashSelector()
        self.topics: dict[str, _Topic] = {}
        self.problem: TxmqError | None = None

    def close(self) -> None:
        """Close the relay's own connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    # --- who answers -------------------------------------------------------------------------------------------------

    def connect(self, home: str) -> str | None:
        """A session of the anchor, or of any home if ``home`` is empty; see ``relay_core.Connect``."""
        self.close()

        def work() -> str:
            link = self._routes.link_of_home(int(home[17:], 16)) if home else self._routes.any_link()
            self._connection = link.new_connection()
            _, self._session = self._connection.connect_with_session(self._client.clock.monotonic() + TIMEOUT_S)
            found = f"{self._session.cluster:016x}-{self._session.home:016x}"
            return OTHER_HOME if home and found != home else found

        return self._asked(work)

    def new_txid(self) -> str:
        """The next id of the session."""
        _, txid = self._session.next_txid()
        return str(txid)

    def ask_topics(self) -> dict[str, _Topic] | None:
        """All topics, with ids and numbers of partitions; kept for the pages that follow."""
        found = self._asked(self._client.topics.all_known)
        if found is None:
            return None
        self.topics = {topic.config.name: _Topic(topic.topic_id, topic.config.partitions) for topic in found}
        return self.topics

    # --- what became of a page ---------------------------------------------------------------------------------------

    def outcome(self, step: AskOutcome) -> Told | None:
        """What became of a claim; a fence makes it certain."""

        def work() -> Told:
            try:
                body = self._repeat("outcome", step.txid, extensions={"fence": None})
            except FencedError:
                return Told.OVER
            except NotOwnerError:
                return Told.OTHER_HOME
            return _TOLD.get(bytes(body).partition(b"\n")[0].decode(), Told.OVER)

        return self._asked(work)

    def chain(self, step: Chain) -> tuple[str | None] | None:
        """The newest page of the outbox."""
        return self._asked(lambda: (json.loads(bytes(self._repeat("outbox", step.uuid)))["last"],))

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

    def send(self, step: Send) -> Answer:
        """Send a page, once."""
        try:
            self._send(step)
        except TxmqError as error:
            self.problem = error
            return self._meaning(error)
        self.problem = None
        return Answer.TAKEN

    def _send(self, step: Send) -> None:
        row, connection = step.row, self._connection
        assert connection is not None
        claim = str(row.claim)
        at_home: dict[int, list[Buffer]] = defaultdict(list)
        anchor = self._session.home
        for (topic, partition), rows in self._grouped(step.rows).items():
            owner = self._routes.link_for(topic, partition).home or anchor
            at_home[owner] += self._part(topic, partition, rows, is_keyed=not self._routes.is_lone)
        own = at_home.pop(anchor, [])
        branches = [self._prepare(claim, home, body) for home, body in at_home.items()]
        crash_point("relay.page.prepared")
        given: dict[str, Any] = {"outbox": row.uuid, "name": self._outbox.name, "after": row.last or "-"}
        counter = TxId.parse(claim).counter
        if counter > 1:
            given["floor"] = counter - 1  # what the relay row names is this claim and ``last``, which the chain has
        if branches:
            given["homes"] = ",".join(txid for _, txid in branches)
        if sum(map(len, own)) > self._session.request_size_bytes_max:
            raise TooLargeError(f"a page of outbox {self._outbox.name!r} is larger than a request")
        answer = connection.submit("commit", claim, timeout=TIMEOUT_S, extensions=given, body=own)
        crash_point("relay.page.sent")
        answer.result()
        crash_point("relay.page.taken")
        for link, txid in branches:
            with suppress(TxmqError):  # the home asks by itself
                link.control.submit("commit", txid, timeout=TIMEOUT_S, body=[])

    def _grouped(self, rows: Sequence[OutboxRow]) -> dict[TopicPartition, list[OutboxRow]]:
        found: dict[TopicPartition, list[OutboxRow]] = defaultdict(list)
        turn: dict[str, int] = {}  # a page's messages without a key go to one partition of their topic
        for row in rows:
            partitions = self.topics[row.topic].partitions
            if row.key is None and row.topic not in turn:
                turn[row.topic] = self._selector.partition_of(None, partitions)
            partition = turn[row.topic] if row.key is None else self._selector.partition_of(row.key, partitions)
            found[row.topic, partition].append(row)
        return found

    def _part(self, topic: str, partition: int, rows: Sequence[OutboxRow], *, is_keyed: bool) -> list[Buffer]:
        records = [(row.key, row.value, row.headers, row.created_ms) for row in rows]
        keys = {crc32c(row.key) for row in rows if row.key is not None} if is_keyed else ()
        return encode_part(topic, partition, encode(records), keys, self.topics[topic].topic_id)

    def _prepare(self, claim: str, home: int, body: list[Buffer]) -> tuple[Any, str]:
        link = self._routes.link_of_home(home)
        _, txid = link.session.next_txid()
        link.control.submit("prepare", txid, "branch", timeout=TIMEOUT_S, extensions={"of": claim}, body=body).result()
        return link, txid

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
        return Answer.SILENT
