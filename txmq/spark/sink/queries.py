"""Batches that many writers prepare in parts and one driver decides, each exactly once (verb ``query``).

A driver draws an ``epoch`` when it starts, before its first batch. Every writer opens the query with it, prepares its
parts (``prepare_part``), and hands their ids to the driver, whose one ``commit`` makes the winners visible. What a
driver left is rolled back when a later one opens the query.

Requests are repeated until they are answered: the broker executes each once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from txmq.client.arguments import require_wait
from txmq.client.client import Client
from txmq.client.home_link import HomeLink
from txmq.client.transaction.conversation import Conversation
from txmq.client.transaction.messages import EncodedPart
from txmq.client.transaction.prepared import repeat_prepare
from txmq.model import TransactionKind
from txmq.protocol.json_text import Fields, json_object

FieldsList = list[Fields]
ANY_QUERY = "*"


class Attempt(NamedTuple):
    """A writer: one attempt of one task of a batch of a query, in an incarnation of its driver."""

    query: str
    epoch: int
    batch: int
    task: int
    attempt: int


class Standing(NamedTuple):
    """What the broker knows of a query, and of the batch that was asked for.

    Attributes:
        newest: the committed batch with the highest number, or None.
        is_committed: whether the batch is.
        digest: what its writer said of its rows; None if that is not kept (any more).
    """

    newest: int | None = None
    is_committed: bool = False
    digest: str | None = None


class Queries:
    """See the module's docstring. Thread safety: any thread."""

    def __init__(self, client: Client | HomeLink) -> None:
        self._client = client

    def new_epoch(self, *, timeout: float | None = None) -> int:
        """Draw a number for an incarnation of a driver: higher than any drawn before, for whichever query."""
        epoch: int = self._ask("epoch", ANY_QUERY, {}, timeout)["epoch"]
        return epoch

    def open(self, query: str, epoch: int, *, batch: int | None = None, timeout: float | None = None) -> Standing:
        """This incarnation writes from now on; former ones are fenced, and what they prepared is rolled back.

        Args:
            batch: the one to write: the answer says whether it is committed.

        Raises:
            FencedError: a later incarnation has opened it.
            OverloadedError: too many queries are kept.
            TransactionConflictError: whether ``batch`` is committed is not known any more.

        Durability: forced when this returns.
        """
        stated = {"epoch": epoch} if batch is None else {"epoch": epoch, "batch": batch}
        told = self._ask("open", query, stated, timeout)
        return Standing(told["batch"], told.get("committed", False), told.get("digest"))

    def prepare_part(
        self,
        attempt: Attempt,
        broker: Conversation,
        parts: Sequence[EncodedPart],
        branches: Sequence[Conversation] = (),
    ) -> None:
        """Prepare one transaction of an attempt, with ``broker.txid``; it is invisible until ``commit`` names it.

        Args:
            branches: its parts at other homes, prepared; they are decided with it.

        Call ``broker.finished`` at the end, whatever became of it: the query's batches tell the outcome.

        Raises:
            TransactionTimeoutError, RequestTimeoutError: the deadline passed; it may be prepared.
            TransactionConflictError: the batch is committed already.
            FencedError, UnknownQueryError: a later incarnation has opened the query, or none has.
            TxmqError: refused, not prepared.

        Durability: the messages are in the broker's journal when this returns.
        """
        fields = {**attempt._asdict()}
        if branches:
            fields["homes"] = ",".join(branch.txid for branch in branches)
        repeat_prepare(broker, TransactionKind.SPARK.value, fields, parts, waits_for_broker=True)

    def commit(
        self,
        query: str,
        epoch: int,
        batch: int,
        txids: Sequence[str],
        *,
        digest: str | None = None,
        timeout: float | None = None,
    ) -> bool:
        """Decide a batch: the messages of ``txids`` are visible, in that order, all or none.

        What else is prepared for the query up to this batch is rolled back.

        Args:
            digest: says which rows these are (``txmq.spark.sink.digest``); it is told whoever opens the batch again.

        Returns:
            False if the batch was committed before: nothing happened.

        Raises:
            TransactionConflictError: a transaction is not prepared, or not of this batch; nothing happened.
            FencedError, UnknownQueryError: a later incarnation has opened the query, or none has.

        Durability: decided, in the broker's journal, when this returns.
        """
        body = "".join(f"{txid}\n" for txid in txids).encode()
        stated: dict[str, int | str] = {"epoch": epoch, "batch": batch}
        if digest is not None:
            stated["digest"] = digest
        answer = self._ask("commit", query, stated, timeout, body)
        return not answer["already_committed"]

    def abort(self, query: str, *, epoch: int | None = None, batch: int | None = None) -> int:
        """Roll back what is prepared for a query, of one epoch, one batch, or all; how many transactions."""
        fields = {name: number for name, number in (("epoch", epoch), ("batch", batch)) if number is not None}
        count: int = self._ask("abort", query, fields)["rolled_back"]
        return count

    def list(self) -> FieldsList:
        """Every query: ``query``, ``epoch``, newest ``batch``, ``time_ms``; ``prepared`` parts and their bytes."""
        found: FieldsList = self._ask("list", ANY_QUERY, {})["queries"]
        return found

    def delete(self, query: str, *, epoch: int | None = None) -> None:
        """Forget a query that never writes again, and roll back what is prepared for it.

        A batch of it that is written again after that is written twice.

        Args:
            epoch: only while this incarnation is the newest.

        Raises:
            UnknownQueryError: it is not there (any more).
        """
        self._ask("delete", query, {} if epoch is None else {"epoch": epoch})

    def _ask(
        self, action: str, query: str, fields: Mapping[str, int | str], timeout: float | None = None, body: bytes = b""
    ) -> Fields:
        require_wait(timeout)
        seconds = self._client.timeout if timeout is None else timeout
        return json_object(
            self._client.control.repeat("query", action, query, timeout=seconds, extensions=fields, body=[body])
        )
