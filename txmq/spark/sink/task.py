"""One attempt of one task of a write: its rows, prepared in transactions that the driver decides. No Spark in here.

Theory of operation. Each chunk of rows is one prepared transaction of kind ``spark`` (``chunk_transaction``): repeated
under its id until the broker has it, so that neither a lost connection nor a restarted broker costs the task. The
driver gets the ids. An attempt that fails rolls its own back, as far as it can; what it cannot is rolled back with the
batch, as are attempts that did not win, and those of a driver that died when the next one opens the query.

The points at which the process may die:
    before ``prepare`` is forced    nothing is there
    after it                        parts that no commit names: rolled back by the batch's decision, or by the next
                                    driver
    between two chunks              the same
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from txmq.client.bootstrap import bootstrap_of
from txmq.client.client import Client
from txmq.client.transaction.conversation import OVERLOADED_PAUSE_S
from txmq.errors import ConnectionLostError, FencedError, TransactionConflictError
from txmq.spark.sink.chunk_transaction import ChunkTransaction, Writing, roll_back
from txmq.spark.sink.digest import Digest
from txmq.spark.sink.options import SinkOptions
from txmq.spark.sink.queries import Attempt, Standing
from txmq.spark.sink.query_homes import Opened, Winner, anchor_of, is_to_be_written
from txmq.spark.sink.rows import Chunk, Gatherer

# Spark reuses its worker processes: a connection and a session for each, not a task. The next job may be less patient.
_clients: dict[tuple[str, float], Client] = {}
CHUNK_SIZE_BYTES = 4 << 20
_REQUEST_ROOM_BYTES = 1024  # of a prepare, besides its one large batch


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
