"""The homes of a transaction: one decides, the others have parts. And the commits that they have yet to answer.

Theory of operation. A block takes its id late, when it is known which homes own the partitions that it wrote to, so
that a transaction on one home costs one home. If there are several, the home of the id decides; what goes to each of
the others is a part (``HomePart``), prepared there under an id of the client's own session at that home, and names the
deciding one. The decision lists these ids. A home that hears nothing asks the deciding one. The partitions of a home
are told by the routes; a partition's home never changes.

What is decided is told to the homes, and the block returns: the commit of a last resource, which its database has
decided, and the commits at other homes, which the deciding home has decided. Each request is written before that, and
its answer is not awaited (``PendingCommits``). The answers are taken by whatever reads them: the next transaction at
that home in passing (``look``), the client's resolver (``settle``), ``tx.results``, and everything that must not come
before them (``wait``). The broker places keyed parts of transactions in their order by itself, but a plain message of
the same partition would pass a commit that waits there for an earlier one. So writes of this client wait here before
they go to such a partition, and reads of this client find what was committed before them. The same holds for messages
that the deciding home has not placed yet (``TransactionHomes.decided``).

A commit says that no caller waits for its answer (``delayable``): the home lets it wait a moment for company, and it
shares a sync with the next transaction. A caller that waits after all sends it once more, and it is forced at once.

Invariants:
    * all parts of a transaction carry the deciding id, and their keys, once there are several homes: the brokers place
      parts of one partition and key in the order of the decisions;
    * a part that may be prepared is rolled back only when its transaction is, for certain;
    * a part's ``state`` says the more careful thing: PREPARING before a request that prepares is sent, COMMITTED before
      its commit is;
    * nothing waits after a decision: what cannot be written at once, or exceeds ``COMMITS_IN_FLIGHT_MAX``, the resolver
      writes;
    * a commit that was lost is sent again before anything else that waits;
    * an answer to a commit other than a success ends it, too, and is logged: the home has decided without its
      transaction;
    * a lone broker has no part besides the one that decides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from txmq.client.transaction.conversation import LOST, ROLLBACK_TIMEOUT_S, Conversation, raise_rolled_back, rolled_back
from txmq.client.transaction.messages import EncodedPart, MessageBuffer, SavedOffsets
from txmq.errors import (
    FencedError,
    NotOwnerError,
    RequestTimeoutError,
    RolledBackError,
    TransactionConflictError,
    TransactionTimeoutError,
    TxmqError,
    UnknownTransactionError,
)
from txmq.model import TopicPartition
from txmq.protocol.transaction_bodies import PartResult, parse_result_lines
from txmq.runtime.crashpoints import crash_point
from txmq.runtime.logging import get_logger
from txmq.runtime.ports import Clock
from txmq.runtime.threads import Attempt, Exclusive, Lock
from txmq.xa.resolver_ports import Answer, was_settled
from txmq.xa.two_phase.coordinator import BranchState
from txmq.xid import TxId

if TYPE_CHECKING:
    from txmq.client.client import Client
    from txmq.client.home_link import HomeLink

TELL_TIMEOUT_S = 30.0  # of a request; it may wait for an earlier part of the same key
COMMITS_IN_FLIGHT_MAX = 1024  # written and not answered, at one home
OPEN_MAX = 10_000  # that a home has yet to answer, before the next block with a last resource waits
_NOT_KNOWN = (*LOST, RequestTimeoutError, TransactionTimeoutError)  # as ``await_prepare`` raises them
# An enum's member is slow to look up.
_ACTIVE, _PREPARING, _PREPARED = BranchState.ACTIVE, BranchState.PREPARING, BranchState.PREPARED
_COMMITTED = BranchState.COMMITTED
_MAY_BE_PREPARED = (_PREPARING, _PREPARED)
_CONTRARY = (TransactionConflictError, UnknownTransactionError, FencedError, NotOwnerError)
HOMES_MAX = 32  # that a decision lists


def nothing(_part: HomePart) -> None:
    """Do nothing."""


class HomePart(Conversation):
    """What a transaction wrote to one home.

    Args:
        of: the part at the home that decides; None: this is it.

    Attributes:
        of: as given.
        commits: those of the home that are not answered yet.
        parts: what was taken and not sent ahead.
        slots: the topics and partitions that its commit writes to.
        uuid: of the last resource that decided it: among these the home keeps the order of keys by itself; or empty.
        state: where it stands.
        error: why it is not prepared: a refusal, or what kept the home from answering; its cause says which it is.
        lines: where its messages went; None before the home has said so.
        refusal: what the home answered to its commit in place of that.
        on_answered: called when it has answered.
        is_late: its commit was waited for, and is not answered.
        answer: the answer that will come to its commit; None if that was not written, or lost.
        turn: of the thread that takes the answer: an answer has one waiter.
        is_open: its commit is not answered.
        is_delayable: the home was told that no caller waits for the answer.
    """

    turn: Exclusive  # from ``commit`` on

    def __init__(self, home: HomeLink, clock: Clock, timeout_s: float, of: HomePart | None = None) -> None:
        super().__init__(home, clock, timeout_s)
        self.of, self.commits = of, home.pending_commits
        if of is not None:
            self.deadline, self.on_other_topic, self.on_part = of.deadline, of.on_other_topic, of.on_part
        self.parts: list[EncodedPart] = []
        self.slots: Collection[TopicPartition] = ()
        self.uuid = ""
        self.state = _ACTIVE
        self.error: RolledBackError | None = None
        self._rollback: Answer | None = None
        self.lines: Sequence[PartResult] | None = None
        self.refusal: TxmqError | None = None
        self.on_answered: Callable[[HomePart], None] = nothing
        self.answer: Answer | None = None
        self.is_late = self.is_open = self.is_delayable = False

    @property
    def name(self) -> str:
        """The home, as it is shown to people."""
        return f"home {TxId.parse(self.txid).home:016x}"

    def go_to(self, home: HomeLink) -> None:
        """Let another home decide, before the id is taken.

        Raises:
            RolledBackError: it is away, or refuses; the former one decides.
        """
        before = self.home, self.commits, self._control, self._is_attached
        self.home, self.commits, self._control, self._is_attached = home, home.pending_commits, home.control, False
        try:
            self.reach()
            self.attach_for_caller()
        except RolledBackError:
            self.home, self.commits, self._control, self._is_attached = before
            raise

    # --- towards the decision ----------------------------------------------------------------------------------------

    def add(self, part: EncodedPart) -> None:
        """Take a part of the messages, for this home."""
        self.slots = {*self.slots, (part.topic, part.partition)}
        self.parts.append(part)

    def send_ahead(self) -> None:
        """Send what was taken ahead of the decision. Raises as ``Conversation.stream``."""
        parts, self.parts = self.parts, []
        self.stream(parts)

    @property
    def is_large(self) -> bool:
        """Whether what was taken has to be sent ahead."""
        return bool(self.streamed.parts) or not self.fits_one_request(self.parts)

    def prepare(self, submit: Callable[[], Answer]) -> None:
        """Send ``prepare`` of what was taken; ``await_prepared`` says what came of it.

        Args:
            submit: sends it.
        """
        self.state = _PREPARING
        try:
            self.send_prepare(submit)
        except TxmqError as error:
            self.refused(error)
        else:
            if self.of is not None:
                crash_point("client.homes.prepare_sent")

    def await_prepared(self, submit: Callable[[], Answer]) -> None:
        """Wait for the home; afterwards ``state`` and ``error`` say what is known.

        Args:
            submit: sends ``prepare`` again.
        """
        if self.state is not _PREPARING:
            return
        try:
            self.await_prepare(submit)
        except _NOT_KNOWN as error:
            self.error = rolled_back(error, self._whole)
        except TxmqError as error:
            self.refused(error)
        else:
            self.state = _PREPARED
            if self.of is not None:
                crash_point("client.homes.prepared")

    def refused(self, error: TxmqError) -> None:
        """Note that it is not prepared, unless an earlier attempt may have been executed."""
        self.was_refused(error)
        self.error = rolled_back(error, self._whole)
        if not self.is_doubtful:
            self.state = BranchState.REFUSED

    @property
    def _whole(self) -> str | None:
        """The transaction's id, for the caller."""
        return (self.of or self).txid_or_none

    # --- after the decision ------------------------------------------------------------------------------------------

    def commit(self) -> None:
        """Tell the home that the transaction is committed, for certain; the answer is not awaited."""
        self.state, self.parts = _COMMITTED, []
        self.commits.add(self)
        if self.of is not None:
            crash_point("client.homes.commit_sent")

    def answered(self, lines: list[PartResult], refusal: TxmqError | None = None) -> None:
        """For ``PendingCommits``: the home has answered to the commit, which still counts as open.

        ``on_answered`` must wait for no commit, and may be called once more after an interrupt.
        """
        if self.of is not None:
            crash_point("client.homes.told")
        self.lines, self.refusal = lines, refusal
        if self.of is not None:
            self.finished()
        self.on_answered(self)

    def await_answer(self, deadline: float) -> None:
        """Wait for the answer to ``commit``; ``is_late`` says that it has not come."""
        with suppress(TxmqError):
            self.commits.wait_for(self, deadline)
        self.is_late = self.lines is None

    @property
    def is_unwritten(self) -> bool:
        """Whether its commit could not be written, or was waited for and is not answered."""
        if self.state is not _COMMITTED or self.lines is not None:
            return False
        return self.is_late or not self.commits.is_written(self)

    @property
    def is_pending(self) -> bool:
        """As ``is_unwritten``; one that was waited for is looked at once more."""
        if self.is_late:
            self.commits.look()
        return self.is_unwritten

    def gather(self, deadline: float) -> Sequence[PartResult]:
        """Where its messages went, waiting for the home's answer; nothing if it does not come."""
        if self.lines is None and self.state is BranchState.COMMITTED:
            self.await_answer(deadline)
        return self.lines or ()

    def send_rollback(self) -> None:
        """Send ``rollback``, unless the home has nothing of it."""
        is_there = self.state in _MAY_BE_PREPARED or self.streamed.parts
        self.state = BranchState.ENDING if is_there else BranchState.ROLLED_BACK
        if is_there:
            with suppress(TxmqError):
                self._rollback = self.submit_rollback()
                crash_point("client.homes.rollback_sent")

    def await_rolled_back(self) -> None:
        """Wait for the answer, not for long; what is not answered the home finds out by itself."""
        if self.state is BranchState.ENDING:
            self.state = BranchState.LEFT
            if self._rollback is not None:
                with suppress(TxmqError):
                    self._rollback.result(ROLLBACK_TIMEOUT_S)
                    self.state = BranchState.ROLLED_BACK
                    crash_point("client.homes.rolled_back")

    def leave(self) -> None:
        """Leave it to the home, which asks the one that decides."""
        if self.state not in (BranchState.COMMITTED, BranchState.ROLLED_BACK):
            self.state = BranchState.LEFT

    @property
    def has_ended(self) -> bool:
        """Whether nothing is or may be prepared there."""
        return self.state in (BranchState.ACTIVE, BranchState.REFUSED, BranchState.ROLLED_BACK)

    def close(self) -> None:
        """Let the home drop the outcome, or note that the end was not seen. Once, at the end."""
        if self.state is BranchState.LEFT:
            self.lost()
        elif self.state is not BranchState.COMMITTED:  # that one is closed when its commit is answered
            self.finished()


class PendingCommits:
    """Commits of one home that are not answered yet; see the module's docstring. Thread safety: any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._open: deque[HomePart] = deque()

    def __bool__(self) -> bool:
        return bool(self._open)

    def held(self, messages: MessageBuffer, besides: str) -> list[TopicPartition]:
        """The partitions of these messages that ``wait`` would wait for."""
        found: list[TopicPartition] = []
        for part in list(self._open):
            if not (besides and part.uuid == besides):
                found += [slot for slot in messages.slots() if slot in part.slots and slot not in found]
        return found

    def add(self, part: HomePart) -> None:
        """Write the commit of a part, if that needs no wait; else the resolver does."""
        part.turn, part.is_open = Exclusive(), True
        self._open.append(part)
        if len(self._open) <= COMMITS_IN_FLIGHT_MAX:
            try:
                self._write(part)
            except TxmqError:  # lost
                return

    def add_once(self, part: HomePart) -> None:
        """As ``add``, if that was perhaps interrupted."""
        if part not in list(self._open):
            self.add(part)

    @staticmethod
    def _write(part: HomePart) -> None:
        """Write it if that needs no wait. Raises ConnectionLostError."""
        part.is_delayable = True
        part.answer = part.write_commit()

    @staticmethod
    def _submit(part: HomePart) -> None:
        """Write it for a caller that waits. Raises as a request."""
        part.is_delayable = False
        part.answer = part.submit_commit(TELL_TIMEOUT_S)

    def take_first(self) -> None:
        """Take the answers of the oldest ones: they come about in order, and the resolver looks at all."""
        while self._open:
            try:
                part = self._open[0]
            except IndexError:  # another thread took it
                return
            if part.answer is None or not part.answer.done or not self._look_at(part) or part.is_open:
                return

    def is_written(self, part: HomePart) -> bool:
        """Whether the commit of a part is on its way, or was answered."""
        return part.answer is not None or part not in list(self._open)

    def holds(self, slot: TopicPartition, besides: str = "") -> bool:
        """Whether ``wait`` would wait."""
        return any(_is_waited_for(part, slot, besides) for part in list(self._open))

    def has_decided(self, txid: str) -> bool:
        """Whether a transaction, or its part here, is committed for certain and not answered."""
        return any(part.txid == txid for part in list(self._open))

    def look(self) -> None:
        """Take the answers that are in, and write again what was lost. Without any wait."""
        is_there = True
        for number, part in enumerate(list(self._open)):
            answer = part.answer
            if answer.done if answer is not None else is_there and number < COMMITS_IN_FLIGHT_MAX:
                is_there = self._look_at(part) and is_there

    def _look_at(self, part: HomePart) -> bool:
        """Take its answer if that is in, and write it if it is not on its way; whether the home is there."""
        me = Attempt()
        try:
            if part.turn.take(me) and part.is_open:
                if part.answer is not None and part.answer.done:
                    try:
                        self._take(part, 0.0)
                    except TxmqError:  # it is written again
                        pass
                if part.is_open and part.answer is None:
                    self._write(part)
        except TxmqError:
            return False
        finally:
            me.is_over = True
            part.turn.leave(me)
        return True

    def look_closely(self) -> None:
        """As ``look``, of a client that does nothing else: nobody has read its connection."""
        for part in list(self._open):
            if part.answer is not None:
                part.answer.look()
        self.look()

    def settle(self) -> None:
        """For the resolver: as ``look_closely``; a lost home is waited for, not long."""
        self.look_closely()
        lost = next((part for part in list(self._open) if part.answer is None), None)
        if lost is not None and lost.is_back():
            self.look()

    def wait(self, slot: TopicPartition, deadline: float, besides: str = "") -> None:
        """Wait until those that write to a partition are answered, and write again what was lost.

        Args:
            deadline: monotonic time.
            besides: parts of this last resource are not waited for.

        Raises:
            ConnectionLostError: the home is away until then.
            RequestTimeoutError: it did not answer in time.
        """
        for part in list(self._open):
            if _is_waited_for(part, slot, besides):
                self._finish(part, deadline)

    def wait_for(self, part: HomePart, deadline: float) -> None:
        """Wait until the commit of one part is answered. Raises as ``wait``."""
        if part in list(self._open):
            self._finish(part, deadline)

    @property
    def is_full(self) -> bool:
        """Whether ``make_room`` would wait."""
        return len(self._open) >= OPEN_MAX

    def make_room(self, deadline: float) -> None:
        """Before a block begins: wait while too many are open. Raises as ``wait``."""
        while len(self._open) >= OPEN_MAX:
            for part in list(self._open)[:1]:
                self._finish(part, deadline)

    def drain(self, deadline: float) -> None:
        """Before the connection ends: wait for all answers. A socket that is closed with some unread is reset."""
        with suppress(TxmqError):
            for part in list(self._open):
                self._finish(part, deadline)

    def _finish(self, part: HomePart, deadline: float) -> None:
        me = Attempt()
        try:
            if not part.turn.take_before(deadline, me, self._clock):
                raise RequestTimeoutError("a commit of this partition is not answered, and another thread waits for it")
            self._hurry(part)
            while part.is_open:
                self._try(part, deadline)
        finally:
            me.is_over = True
            part.turn.leave(me)

    def _hurry(self, part: HomePart) -> None:
        """Send it once more, if it is not answered: then the home lets it wait for company no longer."""
        if part.is_delayable and part.answer is not None and not part.answer.done:
            with suppress(TxmqError):
                self._submit(part)

    def _try(self, part: HomePart, deadline: float) -> None:
        try:
            if part.answer is None:
                self._submit(part)
            self._take(part, max(deadline - self._clock.monotonic(), 0.0))
        except LOST:
            if self._clock.monotonic() >= deadline:
                raise
            part.pause()

    def _take(self, part: HomePart, timeout_s: float) -> None:
        """Take one answer, and forget the commit."""
        assert part.answer is not None
        try:
            lines, contrary = parse_result_lines(part.answer.result(timeout_s)), None
        except RequestTimeoutError:
            raise
        except _CONTRARY as error:
            lines, contrary = [], error
            log = get_logger(txid=part.txid)
            if part.uuid and was_settled(error):
                log.info("transaction was resolved by another process", error=str(error))
            else:
                log.error("heuristic: a home did not commit its part of a transaction", error=str(error))
        except TxmqError:
            part.answer = None
            raise
        try:
            part.answered(lines, contrary)
        except Exception:
            self._forget(part)
            raise
        self._forget(part)  # not before: an interrupt in ``answered`` has it called once more

    def _forget(self, part: HomePart) -> None:
        try:
            self._open.remove(part)
        finally:  # also if an interrupt strikes after it
            part.is_open = False

    def forked(self) -> None:
        """In a forked child: the parent tells its own."""
        self._open = deque()


def _is_waited_for(part: HomePart, slot: TopicPartition, besides: str) -> bool:
    return slot in part.slots and not (besides and part.uuid == besides)


Submit = Callable[[HomePart], Answer]


class TransactionHomes:
    """See the module's docstring.

    Attributes:
        decider: the part at the home that decides.
        others: the parts at other homes.
    """

    def __init__(
        self, client: Client, clock: Clock, timeout_s: float, decider: HomePart | None = None
    ) -> None:  # fmt: skip
        self._routes, self._clock, self._timeout_s = client.routes, clock, timeout_s
        self.decider = decider or HomePart(self._routes.any_link(), clock, timeout_s)
        self.decider.on_other_topic = self._routes.forget_topics
        self.others: list[HomePart] = []
        self._are_found = False  # there may be several
        self._acks: SavedOffsets | None = None
        self._are_acks_shared = False
        self._is_place_known = self._is_over = False
        self._lock: Lock | None = None  # of these; while there is none, the decider waits for no place

    @property
    def acks(self) -> SavedOffsets | None:
        """The offsets that are saved together with the messages."""
        return self._acks

    def save(self, acks: SavedOffsets) -> None:
        """Save these offsets, too; more may be added to them until they are encoded."""
        self._acks = self.decider.acks = acks
        self._are_acks_shared = False

    # --- which they are ----------------------------------------------------------------------------------------------

    def go_to_likely_home(self) -> None:
        """Before an id that is needed early: go where the client's last such transaction wrote to.

        If this one writes elsewhere, it costs one home more.
        """
        home = self._routes.likely_home
        if home is not None:
            link = self._routes.link_of_home(home)
            if link is not self.decider.home:
                try:
                    self.decider.go_to(link)
                except RolledBackError:
                    self._routes.likely_home = None  # it is away

    def find(self, messages: MessageBuffer) -> None:
        """Find the homes that own the partitions of the messages and of the offsets; before the id is taken.

        Raises:
            RolledBackError: they are too many, or one of them is away or not known.
        """
        if self._routes.is_single_home:
            return
        self._are_found, owners, decider = True, self.owners(messages), self.decider
        if len(owners) > HOMES_MAX:
            raise RolledBackError(f"a transaction takes {HOMES_MAX} homes: {_several(owners)}", decider.txid_or_none)
        if owners and not decider.txid and decider.home not in owners:
            decider.go_to(next(iter(owners)))
        for home in owners:
            if home is not decider.home and self._other_at(home) is None:
                self.others.append(self._begun_at(home))
        if owners and decider.txid:
            likely = decider.home if decider.home in owners else next(iter(owners))
            self._routes.likely_home = likely.session.home
        if self._acks is not None and not self._are_acks_shared:
            self._share(self._acks)

    def _begun_at(self, home: HomeLink) -> HomePart:
        part = HomePart(home, self._clock, self._timeout_s, self.decider)
        part.reach()
        part.commits.look()
        part.begin_for_caller()
        return part

    def owners(self, messages: MessageBuffer) -> dict[HomeLink, list[TopicPartition]]:
        """The homes of the partitions of the messages and of the offsets.

        Raises:
            RolledBackError: a home had to be asked for, and nobody has said which one it is; nothing happened.
        """
        owners: dict[HomeLink, list[TopicPartition]] = {}
        try:
            for slot in [*messages.slots(), *(() if self._acks is None else self._acks.slots())]:
                owners.setdefault(self._routes.link_for(*slot), []).append(slot)
        except TxmqError as error:
            raise_rolled_back(error, self.decider.txid_or_none)
        return owners

    def _other_at(self, home: object) -> HomePart | None:
        return next((part for part in self.others if part.home is home), None)

    def _share(self, acks: SavedOffsets) -> None:
        """Each home saves the offsets of its own partitions."""
        for part in (self.decider, *self.others):
            own = frozenset(slot for slot in acks.slots() if self._routes.link_for(*slot) is part.home)
            part.acks = acks.of_home(own) if own else None
        self._are_acks_shared = True

    def let_pass(self, messages: MessageBuffer, uuid: str = "") -> None:
        """Let earlier commits of this client to the same partitions go first, but for those of this last resource.

        Raises RolledBackError: they are not answered before the deadline. Brokers with a registry see to that order.
        """
        decider = self.decider
        commits = decider.commits
        slots = commits.held(messages, uuid) if self._routes.is_single_home else ()
        if slots:
            decider.reach()
            try:
                for slot in slots:
                    commits.wait(slot, decider.deadline, uuid)
            except TxmqError as error:
                raise_rolled_back(error, decider.txid_or_none)

    # --- towards the decision ----------------------------------------------------------------------------------------

    def take(self, messages: MessageBuffer, *, keyed: bool = True) -> None:
        """Give each home its parts of the messages that were not taken yet, encoded so that each fits a request."""
        decider, is_alone = self.decider, not self.others
        for encoded in decider.take_parts(messages, keyed=keyed or self._are_found):
            home = decider.home if is_alone else self._routes.link_for(encoded.topic, encoded.partition)
            (decider if home is decider.home else self._other_at(home) or decider).add(encoded)

    def stream(self) -> None:
        """Send what was taken ahead of the decision, to all homes. Raises as ``Conversation.stream``."""
        self.decider.send_ahead()
        for part in self.others:
            part.send_ahead()

    def stream_if_large(self) -> None:
        """As ``stream``, if it does not fit the request that decides, or prepares."""
        if self.decider.is_large:
            self.stream()

    def prepare_others(self) -> list[str]:
        """Prepare what goes to other homes, for a transaction that is decided later.

        Returns:
            The ids of these parts, for the deciding home to list.

        Raises:
            TxmqError: one of the homes refuses, or does not answer; the deciding home was not asked.
        """
        self.stream_large_others()
        self.send_prepares(self._submit_branch)
        self.await_prepared(self._submit_branch)
        for part in self.others:
            if part.error is not None:
                raise part.error
        return [part.txid for part in self.others]

    def _submit_branch(self, part: HomePart) -> Answer:
        return part.submit_branch(self.decider.txid, part.parts, is_held=False)

    def stream_large_others(self) -> None:
        """Send ahead what does not fit the request that prepares it. Raises as ``Conversation.stream``."""
        for part in self.others:
            if part.is_large:
                part.send_ahead()

    def send_prepares(self, submit: Submit) -> None:
        """Ask the other homes to prepare; what comes of it is told by ``await_prepared``."""
        for part in self.others:
            part.prepare(partial(submit, part))

    def await_prepared(self, submit: Submit) -> None:
        """Wait for the other homes; afterwards each part says what is known."""
        for part in self.others:
            part.await_prepared(partial(submit, part))

    # --- after it ----------------------------------------------------------------------------------------------------

    def commit_others(self) -> None:
        """Tell the other homes that the transaction is committed, for certain; their answers are not awaited."""
        for part in self.others:
            if part.state is not BranchState.COMMITTED:
                part.commit()

    def send_rollbacks(self) -> None:
        """Tell them that it is rolled back, for certain."""
        for part in self.others:
            part.send_rollback()

    def await_rolled_back(self) -> None:
        """Wait for their answers, not for long."""
        for part in self.others:
            part.await_rolled_back()

    def roll_back_others(self) -> None:
        """Both; what was left to a home stays so."""
        told = [part for part in self.others if part.state is not BranchState.LEFT]
        for part in told:
            part.send_rollback()
        for part in told:
            part.await_rolled_back()

    def leave_others(self) -> None:
        """Leave to the other homes what may be prepared there: they ask the one that decides."""
        for part in self.others:
            if not part.has_ended:
                part.leave()

    @property
    def pending(self) -> tuple[str, ...]:
        """Homes that could not be told of the decision yet, or have yet to place their part, as far as is known."""
        decider = self.decider
        if self._lock is not None:
            decider.commits.look()
        here = (decider.name,) if self._lock is not None and decider.lines is None else ()
        return (*here, *(part.name for part in self.others if part.is_pending))

    def decided(self, lines: Sequence[PartResult]) -> None:
        """Take the answer to the decision: nothing of the same keys must pass what waits for its place."""
        for line in lines:
            if line.base_offset is None:
                self._await_places(lines)
                return

    def _await_places(self, lines: Sequence[PartResult]) -> None:
        decider, self._lock = self.decider, Lock()
        decider.slots = {(line.topic, line.partition) for line in lines if line.base_offset is None}
        decider.on_answered = self._was_placed
        decider.commits.add(decider)

    def _was_placed(self, _decider: HomePart) -> None:
        assert self._lock is not None
        with self._lock:
            self._is_place_known, is_end = True, self._is_over
        if is_end:
            self.decider.finished()

    def gather(self, lines: Sequence[PartResult], deadline: float) -> list[PartResult]:
        """The places of all parts: waits for those that have none yet, and for the homes that were told.

        Args:
            lines: as the decision was answered.
            deadline: monotonic time.
        """
        decider = self.decider
        if self._lock is not None:
            with suppress(TxmqError):
                decider.commits.wait_for(decider, deadline)
            lines = decider.lines or lines
        return [*lines, *(line for part in self.others for line in part.gather(deadline))]

    # --- the end -----------------------------------------------------------------------------------------------------

    def finished_here(self) -> None:
        """Let the home that decides drop the outcome, as soon as it has told all places."""
        if self._lock is not None:
            with self._lock:
                is_end, self._is_over = self._is_place_known, True
            if is_end:
                self.decider.finished()
        elif self.others and any(part.state is BranchState.LEFT for part in self.others):
            self.decider.lost()  # that home asks this one, which must not wait for earlier ends to know of the rollback
        else:
            self.decider.finished()

    def finished(self) -> None:
        """Let every home drop the outcome: the end is known. To be called once."""
        self.finished_here()
        for part in self.others:
            part.close()

    def lost(self) -> None:
        """Note an end that was not seen, at every home."""
        self.decider.lost()
        for part in self.others:
            part.leave()
            part.close()


def _several(owners: dict[HomeLink, list[TopicPartition]]) -> str:
    """The partitions, home by home."""
    found = []
    for home, slots in owners.items():
        names = ", ".join(f"{topic}-{partition}" for topic, partition in sorted(slots))
        found.append(f"{names} ({home!r})")
    return f"the partitions are of several homes: {'; '.join(sorted(found))}; nothing happened"
