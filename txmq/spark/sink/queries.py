"""Queries: batches that many writers prepare in parts and one driver decides, each exactly once (verb ``query``).

Theory of operation. A driver draws an ``epoch`` when it starts, before its first batch. Every writer opens the query
with it, prepares its parts (``prepare_part``), and hands their ids to the driver, whose one ``commit`` makes the
winners visible. What a driver left is rolled back when a later one opens the query. Requests are repeated until they
are answered: the broker executes each once.

In a cluster a query has one home for good, its *anchor*: the first that was asked to open it. A home that is not the
anchor names it. The anchor keeps the query and decides its batches, whether rows go to its partitions or not; what goes
to other homes is prepared there as branches (``task``), and the anchor's decision is that of all homes. After it the
driver tells them. Homes that it does not reach ask the anchor.

Invariants:
    * nothing of the latter is done at a lone broker: it has one link, and gets the requests of ``Queries`` alone;
    * a branch is committed only when the anchor has decided its transaction;
    * after the decision nothing fails.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import NamedTuple, TypeVar

from txmq.client.arguments import require_wait
from txmq.client.client import Client
from txmq.client.home_link import LOOK_S, HomeLink
from txmq.client.routes import CORRECTIONS_MAX
from txmq.client.transaction.conversation import LOST, RETRY_S, Conversation
from txmq.client.transaction.messages import EncodedPart
from txmq.client.transaction.prepared import repeat_prepare
from txmq.errors import (
    NotOwnerError,
    OverloadedError,
    RequestTimeoutError,
    TxmqError,
    UnavailableError,
    UnknownTransactionError,
)
from txmq.log.batch import checksum
from txmq.model import Outcome, TransactionKind
from txmq.protocol.json_text import Fields, json_object
from txmq.protocol.transaction_bodies import parse_outcome
from txmq.runtime.crashpoints import crash_point
from txmq.runtime.logging import get_logger
from txmq.spark.sink.digest import Attempt
from txmq.xa.resolver_ports import Answer, was_settled
from txmq.xid import TxId

FieldsList = list[Fields]
ANY_QUERY = "*"
TOLD_AT_ONCE = 256  # commits of one home that are under way
_NOT_ANSWERED = (*LOST, RequestTimeoutError)
_NAMED_HOME = re.compile(r"\bhome=([0-9a-f]{16})\b")
T = TypeVar("T")


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
    """The requests of the verb ``query``, at one home. Thread safety: any thread."""

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


# --- the homes of a query ---------------------------------------------------------------------------------------------


class Opened(NamedTuple):
    """A query that is open.

    Attributes:
        home: the id of its anchor.
        standing: what that knows of the query and the batch that must be written.
    """

    home: int
    standing: Standing


class Winner(NamedTuple):
    """A transaction that a batch is made of.

    Attributes:
        branches: the ids of its parts at other homes.
    """

    txid: str
    branches: tuple[str, ...]


def new_epoch(client: Client) -> int:
    """Draw a number for an incarnation of a driver; any home does that. Raises as ``Queries.new_epoch``."""
    routes = client.routes
    _, epoch = _ask_anchor(
        client,
        lambda: [routes.any_link(), *routes.links()],
        lambda link, left_s: Queries(link).new_epoch(timeout=left_s),
    )
    return epoch


def open_query(client: Client, topic: str | None, query: str, epoch: int, batch: int) -> Opened:
    """Open a query at its anchor, to write a batch; a new one gets a home that its rows go to.

    Args:
        topic: where every row goes; None if the rows say.

    Raises as ``Queries.open``, and:
        UnknownTopicError: there is no such topic.
    """

    def proposed() -> Sequence[HomeLink]:
        routes = client.routes
        links = routes.all_links() if topic is None else routes.owners(topic)
        first = checksum(query.encode()) % len(links)
        return [*links[first:], *links[:first]]

    link, standing = _ask_anchor(
        client, proposed, lambda link, left_s: Queries(link).open(query, epoch, batch=batch, timeout=left_s)
    )
    return Opened(link.home, standing)


def _ask_anchor(
    client: Client, links: Callable[[], Sequence[HomeLink]], ask: Callable[[HomeLink, float], T]
) -> tuple[HomeLink, T]:
    """Ask homes in turn until one answers, or names the one that does."""
    routes, clock = client.routes, client.clock
    deadline = clock.monotonic() + client.timeout
    if routes.is_single_home:
        return routes.any_link(), ask(routes.any_link(), client.timeout)
    turn = cycle(sorted(links(), key=lambda link: link.is_away))
    link, corrections, look_s = next(turn), 0, LOOK_S
    while True:
        left_s = max(deadline - clock.monotonic(), 0.0)
        try:
            return link, ask(link, left_s if corrections else min(look_s, left_s))
        except NotOwnerError as error:
            named = _NAMED_HOME.search(str(error))
            corrections += 1
            if named is None or corrections > CORRECTIONS_MAX:
                raise
            link = routes.link_of_home(int(named[1], 16))
        except _NOT_ANSWERED:
            if clock.monotonic() + RETRY_S >= deadline:
                raise
            if not corrections:
                link, look_s = next(turn), 2 * look_s  # the registry, which the home asks, may be slow
            clock.sleep(RETRY_S)


def anchor_of(client: Client, home: int) -> HomeLink:
    """The link of a query's anchor.

    Raises:
        UnavailableError: no broker tells where it is.
    """

    def known(_left_s: float) -> HomeLink:
        link = client.routes.link_of_home(home)
        if not client.routes.is_single_home and link.home != home:
            raise UnavailableError(f"no broker tells where home {home:016x} is, which decides the query's batches")
        return link

    return _insist(client, known)


def is_to_be_written(client: Client, anchor: HomeLink, attempt: Attempt) -> bool:
    """Whether an attempt's batch is not committed, and its driver the newest one.

    Raises:
        FencedError: a later driver writes.
    """
    query, epoch, batch = attempt[:3]
    known = _insist(client, lambda left_s: Queries(anchor).open(query, epoch, batch=batch, timeout=left_s))
    return not known.is_committed


def _insist(client: Client, ask: Callable[[float], T]) -> T:
    """Ask the anchor until it answers: one that has just started refuses for a while."""
    clock, deadline = client.clock, client.clock.monotonic() + client.timeout
    if client.routes.is_single_home:
        return ask(client.timeout)
    while True:
        try:
            return ask(max(deadline - clock.monotonic(), 0.0))
        except LOST:
            if clock.monotonic() + RETRY_S >= deadline:
                raise
            clock.sleep(RETRY_S)


# --- the decision ----------------------------------------------------------------------------------------------------


def commit(client: Client, home: int, at: Attempt, winners: Sequence[Winner], digest: str | None = None) -> None:
    """Decide a batch, and have every home show it. Errors and durability: as of ``Queries.commit``.

    Args:
        home: of the query's anchor.
        at: query, epoch and batch.
        winners: in the order of their rows.
        digest: of their rows (``digest``).
    """
    anchor = anchor_of(client, home)
    txids = [winner.txid for winner in winners]

    def decide(left_s: float) -> bool:
        return Queries(anchor).commit(*at[:3], txids, digest=digest, timeout=left_s)

    is_new = _insist(client, decide)
    crash_point("client.sink.decided")
    _tell(client, [txid for one in winners if is_new or _is_committed(client, anchor, one) for txid in one.branches])


def _is_committed(client: Client, anchor: HomeLink, winner: Winner) -> bool:
    """Of a batch that was decided before: by a request whose answer was lost, or for other attempts."""
    if not winner.branches:
        return False
    try:
        body = _insist(client, lambda left_s: anchor.control.repeat("outcome", winner.txid, timeout=left_s))
    except TxmqError:  # the other homes ask; if nothing is kept of it, they have
        return False
    return parse_outcome(body)[0] == Outcome.COMMITTED.value


def _tell(client: Client, branches: Sequence[str]) -> None:
    """Commit branches of transactions that are decided; a home that does not answer in time asks the anchor."""
    clock, deadline = client.clock, client.clock.monotonic() + client.timeout
    untold: dict[int, list[str]] = {}
    for txid in branches:
        untold.setdefault(TxId.parse(txid).home, []).append(txid)
    while untold and clock.monotonic() < deadline:
        sent = [one for home, txids in untold.items() for one in _sent(client, home, txids[:TOLD_AT_ONCE], deadline)]
        told = {txid for txid, answer in sent if _has_ended(txid, answer, max(deadline - clock.monotonic(), 0.0))}
        untold = {
            home: left for home, txids in untold.items() if (left := [txid for txid in txids if txid not in told])
        }
        if not told:
            clock.sleep(RETRY_S)
    for home, txids in untold.items():
        get_logger(home=f"{home:016x}", branches=len(txids)).warning(
            "a home was not told of a batch: it is committed, and visible there when the home has asked"
        )


def _sent(client: Client, home: int, txids: Sequence[str], deadline: float) -> list[tuple[str, Answer]]:
    """Write the commits of one home, as far as it is there."""
    link, found = client.routes.link_of_home(home), list[tuple[str, Answer]]()
    for txid in txids if link.home == home else ():  # nobody may tell where it is
        try:
            found.append((txid, link.control.submit_transaction(f"commit {txid}", {}, (), deadline)))
        except TxmqError:
            break
    return found


def _has_ended(txid: str, answer: Answer, timeout_s: float) -> bool:
    """Take an answer; whether nothing is left to tell."""
    try:
        answer.result(timeout_s)
    except (*_NOT_ANSWERED, OverloadedError):
        return False
    except TxmqError as error:
        if was_settled(error) or isinstance(error, UnknownTransactionError):
            return True  # the home has asked, and forgotten it
        get_logger(txid=txid).error("heuristic: a home did not commit its part of a batch", error=str(error))
    return True
