"""One attempt of one task of a write: its rows, prepared in transactions that the driver decides. No Spark in here.

Theory of operation. Each chunk of rows is one prepared transaction of kind ``spark``: repeated under its id until the
broker has it, so that neither a lost connection nor a restarted broker costs the task. The driver gets the ids. An
attempt that fails rolls its own back, as far as it can; what it cannot is rolled back with the batch, as are attempts
that did not win, and those of a driver that died when the next one opens the query.

The points at which the process may die:
    before ``prepare`` is forced    nothing is there behind it                       parts that no commit names:
    rolled back by the batch's decision, or by the next driver between two chunks              the same
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

from txmq.client.bootstrap import bootstrap_of
from txmq.client.client import Client
from txmq.client.home_link import HomeLink
from txmq.client.transaction.broker_side import BrokerTransaction
from txmq.client.transaction.messages import EncodedPart
from txmq.errors import (
    ConfigError,
    ConnectionLostError,
    OverloadedError,
    TooLargeError,
    TransactionTimeoutError,
    TxmqError,
    UnavailableError,
)
from txmq.spark.sink.options import SinkOptions
from txmq.spark.sink.queries import Attempt, Queries
from txmq.spark.sink.rows import CHUNK_SIZE_BYTES, Gatherer

# Spark reuses its worker processes: a connection and a session for each, not a task. The next job may be less patient.
_clients: dict[tuple[str, float], Client] = {}
_REQUEST_ROOM_BYTES = 1024  # of a prepare, beside its one large batch
_WAITING = (
    ": a batch's rows wait in the broker until the driver decides; raise that setting, or write smaller batches (of a "
    "stream: maxOffsetsPerTrigger or maxBytesPerTrigger of its source)"
)


class Written(NamedTuple):
    """The result of an attempt.

    Attributes:
        txids: its transactions, in order of their rows.
        is_over: the batch was committed before it began: it wrote nothing.
    """

    attempt: Attempt
    txids: tuple[str, ...]
    rows: int
    is_over: bool


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


def home_of(client: Client, options: SinkOptions) -> HomeLink:
    """The home that keeps the query and decides its batches.

    Raises:
        ConfigError: rows may go to partitions of several homes, which no batch can be on yet.
        UnknownTopicError: there is no such topic.
    """
    routes = client.routes
    if routes.is_lone:
        return routes.any_link()
    homes = routes.all_links() if options.topic is None else routes.owners(options.topic)
    if len(homes) == 1:
        return homes[0]
    where = "of topics that rows name" if options.topic is None else f"of topic {options.topic!r}"
    raise ConfigError(
        f"option topic: partitions {where} are at {len(homes)} homes of the cluster ({', '.join(map(repr, homes))}). "
        "The sink writes to topics of one home: create one with a single partition, or write with a producer"
    )


def write(client: Client, options: SinkOptions, attempt: Attempt, batches: Iterator[Any]) -> Written:
    """Prepare every row of an attempt; the query is open.

    Args:
        batches: ``pyarrow.RecordBatch`` of checked columns.

    Raises:
        UnknownTopicError: a row's topic does not exist.
        TooLargeError: a row does not fit a record batch, or a transaction is over what the broker takes.
        UnavailableError: the broker did not take a part in time; the cause says why.
        FencedError, UnknownQueryError, TransactionConflictError: a later driver writes, or the batch is decided.
        BadRequestError, LocalProtocolError: a row without a topic, a partition that does not exist.

    Durability: every row is in the broker's journal when this returns, invisible until the driver commits.
    """
    home = home_of(client, options)
    limit = home.session.request_size_bytes_max

    @cache  # asked anew by each attempt: a topic may have got more partitions
    def partitions_of(topic: str) -> int:
        return client.topics.refresh(topic).config.partitions

    gatherer = Gatherer(options.topic, partitions_of, min(CHUNK_SIZE_BYTES, limit // 4))
    transactions: list[BrokerTransaction] = []
    rows = 0
    try:
        for chunk in gatherer.chunks(batches):
            transaction = BrokerTransaction(home, client.clock, options.timeout_s)
            transaction.begin()
            transactions.append(transaction)
            parts = chunk.parts(
                transaction.txid, client.clock.now_ms(), options.compression, limit - _REQUEST_ROOM_BYTES
            )
            _prepare(home, options, attempt, transaction, parts)
            rows += chunk.count
    except BaseException:
        with suppress(TxmqError):  # a broker that is away costs one timeout, not one for each
            for transaction in transactions:
                transaction.rollback()
        raise
    finally:
        for transaction in transactions:
            transaction.finished()  # the broker need not keep what became of each: the query's newest batch says it
    return Written(attempt, tuple(transaction.txid for transaction in transactions), rows, is_over=False)


def _prepare(
    home: HomeLink, options: SinkOptions, attempt: Attempt, transaction: BrokerTransaction, parts: list[EncodedPart]
) -> None:
    if not transaction.fits_one_request(parts):
        raise TooLargeError(f"{len(parts)} record batches at once do not fit a request: raise request_size_bytes_max")
    try:
        Queries(home).prepare_part(attempt, transaction, parts)
    except TransactionTimeoutError as error:
        reason = error.__cause__ or error
        raise UnavailableError(
            f"the broker at {options.bootstrap} did not take a part of task {attempt.task} "
            f"within {options.timeout_s:g} s: {reason}{_WAITING if isinstance(reason, OverloadedError) else ''}"
        ) from error
