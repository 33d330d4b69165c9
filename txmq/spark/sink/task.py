"""One attempt of one task of a write: its rows, prepared in transactions that the driver decides. No Spark in here.

Theory of operation. Each chunk of rows is one prepared transaction of kind ``spark``: repeated under its id until the
broker has it, so that neither a lost connection nor a restarted broker costs the task. Rows for partitions of the home
that decides the query's batches are parts of the transaction itself. What goes to another home is prepared there as a
branch, under an id of that home, and names the transaction that decides. All branches first, at once; then the
transaction lists them. With one home, it is one request.

The driver gets the ids. An attempt that fails rolls its own back, as far as it can; what it cannot is rolled back with
the batch, as are attempts that did not win, and those of a driver that died when the next one opens the query.

The points at which the process may die:
    before ``prepare`` is forced              nothing is there
    branches prepared, the transaction not    each branch's home asks the deciding one, which fences: rolled back
    after it                                  parts that no commit names: rolled back by the batch's decision, or by the
                                              next driver; the branches' homes ask
    between two chunks                        the same

Invariants:
    * the transaction is prepared only when all its branches are;
    * all branches of a query have one key: a home places what it has of the query in the order in which it was
      prepared, so that batches never change places, nor chunks of a task.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

from txmq.addresses import without_secret
from txmq.client.bootstrap import bootstrap_of
from txmq.client.client import Client
from txmq.client.home_link import HomeLink
from txmq.client.transaction.conversation import LOST, OVERLOADED_PAUSE_S, RETRY_S
from txmq.client.transaction.homes import HOMES_MAX, HomePart
from txmq.client.transaction.messages import EncodedPart
from txmq.client.transport.session import ClientSession
from txmq.errors import (
    ConfigError,
    ConnectionLostError,
    FencedError,
    OverloadedError,
    RequestTimeoutError,
    TooLargeError,
    TransactionConflictError,
    TransactionTimeoutError,
    TxmqError,
    UnavailableError,
)
from txmq.log.batch import checksum
from txmq.runtime.crashpoints import crash_point
from txmq.spark.sink.digest import Attempt, Digest
from txmq.spark.sink.options import SinkOptions
from txmq.spark.sink.queries import Opened, Queries, Standing, Winner, anchor_of, is_to_be_written
from txmq.spark.sink.rows import Chunk, Gatherer
from txmq.xa.resolver_ports import Answer

_WAITING = (
    ": a batch's rows wait in the broker until the driver decides; raise that setting, or write smaller batches (of a "
    "stream: maxOffsetsPerTrigger or maxBytesPerTrigger of its source)"
)
# Spark reuses its worker processes: a connection and a session for each, not a task. The next job may be less patient.
_clients: dict[tuple[str, float], Client] = {}
CHUNK_SIZE_BYTES = 4 << 20
_REQUEST_ROOM_BYTES = 1024  # of a prepare, besides its one large batch


@dataclass(frozen=True, slots=True)
class Writing:
    """An attempt, and what it writes through.

    Attributes:
        anchor: the home that decides the query's batches.
    """

    client: Client
    options: SinkOptions
    attempt: Attempt
    anchor: HomeLink

    def session_at(self, link: HomeLink, deadline: float) -> ClientSession:
        """The session with a home, which is waited for.

        Raises:
            ConnectionLostError: it is away until the deadline; of a lone broker, that it is away.
        """
        clock = self.client.clock
        while True:
            try:
                return link.session
            except LOST:
                if self.client.routes.is_single_home or clock.monotonic() >= deadline:
                    raise
                clock.sleep(RETRY_S)

    def begun(self, link: HomeLink, deadline: float, of: HomePart | None = None) -> HomePart:
        """The part at a home, under an id of its own. Raises as ``session_at``.

        Args:
            of: the part at the home that decides, if this is another one.
        """
        self.session_at(link, deadline)
        part = HomePart(link, self.client.clock, self.options.timeout_s, of)
        part.deadline = deadline
        part.begin()
        return part

    def shares(self, parts: Sequence[EncodedPart]) -> dict[HomeLink, list[EncodedPart]]:
        """The parts of each home."""
        routes = self.client.routes
        if routes.is_single_home:
            return {self.anchor: [*parts]}
        of_query, found = frozenset({checksum(self.attempt.query.encode())}), dict[HomeLink, list[EncodedPart]]()
        for part in parts:
            link, topic_id = routes.link_for(part.topic, part.partition), routes.topic_id(part.topic)
            keys = part.keys if link is self.anchor else of_query
            found.setdefault(link, []).append(part._replace(keys=keys, topic_id=topic_id))
        return found

    @contextmanager
    def in_time(self, link: HomeLink) -> Iterator[None]:
        """Around requests to a home, which are repeated until the deadline. Raises UnavailableError after it."""
        try:
            yield
        except (TransactionTimeoutError, RequestTimeoutError, ConnectionLostError) as error:
            reason = error.__cause__ or error
            where = (
                f"the broker at {without_secret(self.options.bootstrap)}"
                if self.client.routes.is_single_home
                else repr(link)
            )
            raise UnavailableError(
                f"{where} did not take a part of task {self.attempt.task} within {self.options.timeout_s:g} s: "
                f"{reason}{_WAITING if isinstance(reason, OverloadedError) else ''}"
            ) from error


class ChunkTransaction:
    """One chunk of rows: a transaction of the home that decides, and its branches at other homes.

    ``decides`` and ``branches`` are its parts at the homes.

    Args:
        deadline: monotonic time.

    Raises:
        ConnectionLostError: the home that decides is away.
    """

    def __init__(self, writing: Writing, deadline: float) -> None:
        self._writing = writing
        self.decides = writing.begun(writing.anchor, deadline)
        self.branches: list[HomePart] = []

    def prepare(self, parts: Sequence[EncodedPart]) -> None:
        """Prepare parts, which carry the id of ``decides``.

        Raises:
            UnavailableError: a home did not take them in time; the cause says why.
            TooLargeError: they do not fit a request.
            ConfigError: they are for more homes than a transaction takes.
            TxmqError: as of ``Queries.prepare_part``.
        """
        anchor, shares = self._writing.anchor, self._writing.shares(parts)
        own = shares.pop(anchor, [])
        if len(shares) > HOMES_MAX:
            raise ConfigError(f"rows go to {len(shares) + 1} homes at once, and a transaction takes {HOMES_MAX + 1}")
        _refuse_too_large(self.decides, own)
        for link, share in shares.items():
            self._begin_branch(link, share)
        for branch in self.branches:
            branch.send_prepare(partial(self._submit, branch))
        for link, branch in zip(shares, self.branches, strict=True):
            self._await(link, branch)
        if self.branches:
            crash_point("client.sink.branches_prepared")
        with self._writing.in_time(anchor):
            Queries(anchor).prepare_part(self._writing.attempt, self.decides, own, self.branches)

    def _begin_branch(self, link: HomeLink, parts: Sequence[EncodedPart]) -> None:
        with self._writing.in_time(link):
            branch = self._writing.begun(link, self.decides.deadline, self.decides)
        self.branches.append(branch)
        for part in parts:
            branch.add(part)
        _refuse_too_large(branch, parts)

    def _submit(self, branch: HomePart) -> Answer:
        return branch.submit_branch(self.decides.txid, branch.parts, is_held=False)

    def _await(self, link: HomeLink, branch: HomePart) -> None:
        try:
            with self._writing.in_time(link):
                branch.await_prepare(partial(self._submit, branch), waits_for_room=True, waits_for_broker=True)
        except TxmqError as error:
            branch.was_refused(error)
            raise

    def finished(self) -> None:
        """Let the homes drop its outcome: the query's batches say it."""
        for part in (self.decides, *self.branches):
            part.finished()


def _refuse_too_large(part: HomePart, parts: Sequence[EncodedPart]) -> None:
    if not part.fits_one_request(parts):
        raise TooLargeError(f"{len(parts)} record batches at once do not fit a request: raise request_size_bytes_max")


def roll_back(chunks: Sequence[ChunkTransaction]) -> None:
    """Roll back, as far as the homes are there: one that is away costs one timeout, not one for each chunk.

    The homes of branches find out by themselves, if they are not told.
    """
    of_homes: dict[HomeLink, list[HomePart]] = {}
    for chunk in chunks:
        for part in (chunk.decides, *chunk.branches):
            of_homes.setdefault(part.home, []).append(part)
    for parts in of_homes.values():  # the home that decides first
        with suppress(TxmqError):
            for part in parts:
                part.rollback()


# --- an attempt -------------------------------------------------------------------------------------------------------


class Written(NamedTuple):
    """The result of an attempt.

    Attributes:
        transactions: those that it prepared, in order of their rows.
        digest: of its rows.
        committed: what the broker knew of the batch, if it was committed before the attempt began: it wrote nothing.
        home: that decides the query's batches.
    """

    attempt: Attempt
    transactions: tuple[Winner, ...]
    digest: Digest
    committed: Standing | None
    home: int

    @property
    def txids(self) -> tuple[str, ...]:
        """Their ids."""
        return tuple(winner.txid for winner in self.transactions)


def client_of(options: SinkOptions) -> Client:
    """This process's client, connected.

    Raises:
        ConnectionLostError: the broker did not answer within the options' timeout.
    """
    key = options.bootstrap, options.timeout_s
    client = _clients.get(key)
    if client is None:
        client = Client(bootstrap_of(options.bootstrap), timeout=options.timeout_s, name="spark-sink")
        _clients[key] = client
    try:
        client.routes.ask_any("ping", timeout=options.timeout_s)
    except ConnectionLostError as error:
        raise ConnectionLostError(f"{error}; tried for {options.timeout_s:g} s (option timeout)") from error
    return client


def write(
    client: Client, options: SinkOptions, attempt: Attempt, batches: Iterator[Any], home: int | None = None
) -> Written:
    """Prepare every row of an attempt; the query is open.

    Args:
        batches: ``pyarrow.RecordBatch`` of checked columns.
        home: that decides the query's batches; a lone broker needs none.

    Raises:
        UnknownTopicError: a row's topic does not exist.
        TooLargeError: a row does not fit a record batch, or a transaction is over what the broker takes.
        UnavailableError: the broker did not take a part in time; the cause says why.
        FencedError, UnknownQueryError, TransactionConflictError: a later driver writes, or the batch is decided.
        BadRequestError, LocalProtocolError: a row without a topic, a partition that does not exist.
        ConfigError: rows go to more homes at once than a transaction takes.

    Durability: every row is in a broker's journal when this returns, invisible until the driver commits.
    """
    anchor = client.routes.any_link() if home is None else anchor_of(client, home)
    writing = Writing(client, options, attempt, anchor)
    limit = writing.session_at(anchor, client.clock.monotonic() + options.timeout_s).request_size_bytes_max

    @cache  # asked anew by each attempt: a topic may have got more partitions
    def partitions_of(topic: str) -> int:
        return client.topics.refresh(topic).config.partitions

    digest = Digest(is_of_content=options.query is not None)
    gatherer = Gatherer(options.topic, partitions_of, min(CHUNK_SIZE_BYTES, limit // 4))
    begun, prepared = list[ChunkTransaction](), list[Winner]()
    try:
        for chunk in gatherer.chunks(digest.watching(batches)):
            prepared.append(_prepare(writing, chunk, begun))
    except BaseException:
        roll_back(begun)
        raise
    finally:
        for transaction in begun:
            transaction.finished()  # the brokers need not keep what became of each: the query's batches say it
    return Written(attempt, tuple(prepared), digest, None, anchor.home)


def pass_over(options: SinkOptions, attempt: Attempt, batches: Iterator[Any], opened: Opened) -> Written:
    """Read the rows of a batch that is committed, and write nothing: the driver compares their digest."""
    digest = Digest(is_of_content=options.query is not None)
    for batch in batches:
        digest.add(batch)
    return Written(attempt, (), digest, opened.standing, opened.home)


def _prepare(writing: Writing, chunk: Chunk, begun: list[ChunkTransaction]) -> Winner:
    """Prepare a chunk; again under other ids, if a home has rolled a branch back before all were prepared.

    It does if the deciding home or this process's connection to it is gone for a moment in between.
    """
    clock, options, limit = writing.client.clock, writing.options, writing.anchor.session.request_size_bytes_max
    deadline = clock.monotonic() + options.timeout_s
    while True:
        transaction = ChunkTransaction(writing, deadline)
        begun.append(transaction)
        txid = transaction.decides.txid
        parts = chunk.parts(txid, clock.now_ms(), options.compression, limit - _REQUEST_ROOM_BYTES)
        try:
            transaction.prepare(parts)
        except (TransactionConflictError, FencedError):
            is_last = not transaction.branches or clock.monotonic() + OVERLOADED_PAUSE_S >= deadline
            if is_last or not is_to_be_written(writing.client, writing.anchor, writing.attempt):
                raise
            roll_back([transaction])
            clock.sleep(OVERLOADED_PAUSE_S)
        else:
            return Winner(txid, tuple(branch.txid for branch in transaction.branches))
