"""One chunk of rows: a transaction of the home that decides the query's batches, and its branches at other homes.

Theory of operation. Rows for partitions of the deciding home are parts of its own prepared transaction of kind
``spark``. What goes to another home is prepared there as a branch, under an id of that home, and names the transaction
that decides. All branches first, at once; then the transaction lists them. With one home, it is one request.

The points at which the process may die:
    branches prepared, the transaction not    each branch's home asks the deciding one, which fences: rolled back
    all prepared                              as of a transaction without branches; the branches' homes ask

Invariants:
    * the transaction is prepared only when all its branches are;
    * all branches of a query have one key: a home places what it has of the query in the order in which it was
      prepared, so that batches never change places, nor chunks of a task.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from txmq.addresses import without_secret
from txmq.client.client import Client
from txmq.client.home_link import HomeLink
from txmq.client.transaction.conversation import LOST, RETRY_S
from txmq.client.transaction.homes import HOMES_MAX, HomePart
from txmq.client.transaction.messages import EncodedPart
from txmq.client.transport.session import ClientSession
from txmq.errors import (
    ConfigError,
    ConnectionLostError,
    OverloadedError,
    RequestTimeoutError,
    TooLargeError,
    TransactionTimeoutError,
    TxmqError,
    UnavailableError,
)
from txmq.log.batch import checksum
from txmq.runtime.crashpoints import crash_point
from txmq.spark.sink.options import SinkOptions
from txmq.spark.sink.queries import Attempt, Queries
from txmq.xa.resolver_ports import Answer

_WAITING = (
    ": a batch's rows wait in the broker until the driver decides; raise that setting, or write smaller batches (of a "
    "stream: maxOffsetsPerTrigger or maxBytesPerTrigger of its source)"
)


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
    """See the module's docstring. ``decides`` and ``branches`` are its parts at the homes.

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
