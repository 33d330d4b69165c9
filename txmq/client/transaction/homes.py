"""The homes of a transaction: one decides, the parts for the others are branches, prepared there.

Theory of operation. A block takes its id late, when it is known which homes own the partitions that it wrote to, so
that a transaction on one home costs one home. If there are several, the home of the id decides; what goes to each of
the others is prepared there under an id of the client's own session at that home, and names the deciding one. The
decision lists these ids. Behind it each branch is committed: the request is written before the block returns, and its
answer is not awaited (``branch_commits``). A branch home that hears nothing asks the deciding home.

The partitions of a home, and the parts for it, are told by the routes; a partition's home never changes.

Invariants:
    * all parts of a transaction carry the deciding id, and their keys, once there are several homes: the brokers place
      parts of one partition and key in the order of the decisions;
    * a branch that may be prepared is rolled back only when its transaction is, for certain;
    * nothing of this is done at a lone broker.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from txmq.client.transaction.branch_commits import BranchClient, BranchHome, WaitingPlace
from txmq.client.transaction.broker_side import ROLLBACK_TIMEOUT_S, BrokerTransaction
from txmq.client.transaction.messages import EncodedPart, MessageBuffer, SavedOffsets
from txmq.client.transaction.preparing import NOT_KNOWN, Preparing, attach_for_caller, begin_for_caller
from txmq.client.transaction.refusals import raise_rolled_back, rolled_back
from txmq.client.transport.ports import Broker
from txmq.errors import RolledBackError, TransactionError, TxmqError
from txmq.model import TopicPartition
from txmq.protocol.parts import PartResult
from txmq.runtime.crashpoints import crash_point
from txmq.runtime.ports import Clock
from txmq.xa.broker_port import Answer
from txmq.xa.two_phase.coordinator import BranchState
from txmq.xid import TxId

HOMES_MAX = 32  # that a decision lists
_MAY_BE_PREPARED = (BranchState.PREPARING, BranchState.PREPARED)


def _nothing() -> None:
    """Do nothing."""


class HomeBranch:
    """What a transaction wrote to a home that does not decide.

    Attributes:
        home, broker: that home, and the conversation with it, under an id of its own.
        commits: those of the home that are not answered yet.
        slots: see ``Committed``.
        state: where it stands; COMMITTED once its commit was written.
        error: the refusal, or what kept the home from answering; its cause says which it is.
        lines: where its parts went; None before the home has said so.
        on_told: called when it has.
        parts: what was not sent ahead.
        uuid: see ``Committed``.
    """

    uuid: str = ""

    def __init__(self, home: BranchHome, clock: Clock, decides: RoutedTransaction) -> None:
        self.home, self.broker = home, BrokerTransaction(home, clock, decides.timeout_s)
        self.commits = home.branch_commits
        self.broker.deadline, self.broker.on_other_topic = decides.deadline, decides.on_other_topic
        self.broker.on_part = decides.on_part
        self.slots: Collection[TopicPartition] = ()
        self.parts: list[EncodedPart] = []
        self._preparing: Preparing | None = None
        self._rollback: Answer | None = None
        self.state = BranchState.ACTIVE
        self.error: TransactionError | None = None
        self.on_told: Callable[[], None] = _nothing
        self._decides, self._is_late = decides, False
        self.lines: list[PartResult] | None = None

    def begin(self) -> None:
        """Reach the home and take an id.

        Raises:
            RolledBackError: it is away, or refuses.
        """
        self.broker.reach()
        self.commits.look()
        begin_for_caller(self.broker)

    # --- towards the decision ----------------------------------------------------------------------------------------

    def add(self, part: EncodedPart) -> None:
        """Take a part for this home."""
        self.slots = {*self.slots, (part.topic, part.partition)}
        self.parts.append(part)

    def stream(self) -> None:
        """Send parts ahead. Raises as ``BrokerTransaction.stream``."""
        parts, self.parts = self.parts, []
        self.broker.stream(parts)

    def stream_if_large(self) -> None:
        """As ``stream``, if the parts do not fit one request."""
        if self.broker.streamed.parts or not self.broker.fits_one_request(self.parts):
            self.stream()

    def submit_prepare(self, submit: Callable[[BrokerTransaction, Sequence[EncodedPart]], Answer]) -> None:
        """Send ``prepare``; ``await_prepared`` says what came of it.

        Args:
            submit: sends it, with these parts.
        """
        self.state = BranchState.PREPARING
        self._preparing = Preparing(self.broker, lambda: submit(self.broker, self.parts))
        try:
            self._preparing.send()
            crash_point("client.homes.prepare_sent")
        except TxmqError as error:
            self._refused(error)

    def await_prepared(self) -> None:
        """Wait for the home; afterwards ``state`` says what is known."""
        if self.state is not BranchState.PREPARING or self._preparing is None:
            return
        try:
            self._preparing.wait()
        except NOT_KNOWN as error:
            self.error = rolled_back(error, self._decides.txid)
        except TxmqError as error:
            self._refused(error)
        else:
            self.state = BranchState.PREPARED
            crash_point("client.homes.prepared")

    def _refused(self, error: TxmqError) -> None:
        self.broker.was_refused(error)
        self.error = rolled_back(error, self._decides.txid)
        if self._preparing is None or not self._preparing.is_doubtful:
            self.state = BranchState.REFUSED

    # --- behind it ---------------------------------------------------------------------------------------------------

    def commit(self) -> None:
        """Tell the home that the transaction is committed; the answer is not awaited."""
        self.state = BranchState.COMMITTED
        self.commits.add(self)
        crash_point("client.homes.commit_sent")

    def told(self, lines: list[PartResult], error: TxmqError | None = None) -> None:
        """See ``Committed``."""
        crash_point("client.homes.told")
        self.lines = lines
        if error is not None:
            self.error = TransactionError(str(error), self._decides.txid)
        self.broker.finished()
        self.on_told()

    def await_told(self, deadline: float) -> bool:
        """Wait for the answer to ``commit``; whether it has come."""
        with suppress(TxmqError):
            self.commits.wait_for(self, deadline)
        self._is_late = self.lines is None
        return not self._is_late

    def submit_rollback(self) -> None:
        """Send ``rollback``, unless the home has nothing of it."""
        is_there = self.state in _MAY_BE_PREPARED or self.broker.streamed.parts
        self.state = BranchState.ENDING if is_there else BranchState.ROLLED_BACK
        if is_there:
            with suppress(TxmqError):
                self._rollback = self.broker.submit_rollback()
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

    @property
    def pending(self) -> str | None:
        """The home, if its commit could not be written, or was waited for and not answered."""
        if self._is_late:
            self.commits.look()
        if self.state is not BranchState.COMMITTED or self.lines is not None:
            return None
        return self.name if self._is_late or not self.commits.is_written(self) else None

    @property
    def name(self) -> str:
        """The home, as it is shown to people."""
        return _name_of_home(self.broker.txid)

    def gather(self, deadline: float) -> Sequence[PartResult]:
        """Where its parts went, waiting for the home's answer; nothing if it does not come."""
        if self.lines is None and self.state is BranchState.COMMITTED:
            self.await_told(deadline)
        return self.lines or ()

    def leave(self) -> None:
        """Leave it to the home, which asks the one that decides."""
        if self.state not in (BranchState.COMMITTED, BranchState.ROLLED_BACK):
            self.state = BranchState.LEFT

    @property
    def has_ended(self) -> bool:
        """Whether nothing is or may be prepared there."""
        return self.state in (BranchState.ACTIVE, BranchState.REFUSED, BranchState.ROLLED_BACK)

    def close(self) -> None:
        """Let the home drop the outcome, or note that the end was not seen. To be called once, at the end."""
        if self.state is BranchState.LEFT:
            self.broker.lost()
        elif self.state is not BranchState.COMMITTED:  # that one is closed when its commit is answered
            self.broker.finished()


class RoutedTransaction(BrokerTransaction):
    """A transaction of a client that may have several homes.

    Attributes:
        commits: those of the deciding home that are not answered yet.
        branches: its parts at other homes than the one that decides.
    """

    def __init__(self, client: BranchClient, clock: Clock, timeout_s: float) -> None:
        home = client.routes.any_link()
        super().__init__(home, clock, timeout_s)
        self.commits, self._has_homes = home.branch_commits, False
        self._routes, self.on_other_topic = client.routes, client.routes.forget_topics
        self._own_acks: SavedOffsets | None = None
        self._waiting: WaitingPlace | None = None
        self.branches: list[HomeBranch] = []

    def go_to_likely_home(self) -> None:
        """Before an id that is needed early: go where the client's last such transaction wrote to.

        If this one writes elsewhere, it costs one home more.
        """
        home = self._routes.likely_home
        if home is not None and not self._routes.is_lone:
            link = self._routes.link_of_home(home)
            if link is not self.home:
                try:
                    self._go_to(link)
                except RolledBackError:
                    self._routes.likely_home = None  # it is away

    def find_homes(self, messages: MessageBuffer) -> None:
        """Find the homes that own the partitions of the messages and of the offsets; before ``reach`` and ``begin``.

        Raises:
            RolledBackError: they are too many, or one of them is away or not known.
        """
        if self._routes.is_lone:
            return
        self._has_homes, owners = True, self.owners(messages)
        if len(owners) > HOMES_MAX:
            raise RolledBackError(f"a transaction takes {HOMES_MAX} homes: {_several(owners)}", self.txid_or_none)
        if owners and not self.txid and self.home not in owners:
            self._go_to(next(iter(owners)))
        for home in owners:
            if home is not self.home and self._branch_at(home) is None:
                branch = HomeBranch(home, self._clock, self)
                branch.begin()
                self.branches.append(branch)
        if owners and self.txid:
            likely = self.home if self.home in owners else next(iter(owners))
            self._routes.likely_home = likely.session.home
        if self.acks is not None and self.acks is not self._own_acks:
            self._share(self.acks)

    def let_pass(self, messages: MessageBuffer, uuid: str = "") -> None:
        """Let earlier commits of this client to the same partitions go first, but for those of this last resource.

        Raises RolledBackError: they are not answered before the deadline. Brokers with a registry see to that order.
        """
        commits = self.commits
        if not (commits and self._routes.is_lone):
            return
        slots = [slot for slot in messages.slots() if commits.holds(slot, uuid)]
        if slots:
            self.reach()
            try:
                for slot in slots:
                    commits.wait(slot, self.deadline, uuid)
            except TxmqError as error:
                raise_rolled_back(error, self.txid_or_none)

    def owners(self, messages: MessageBuffer) -> dict[BranchHome, list[TopicPartition]]:
        """The homes of the partitions of the messages and of the offsets.

        Raises:
            RolledBackError: a home had to be asked for, and nobody has said which one it is; nothing happened.
        """
        owners: dict[BranchHome, list[TopicPartition]] = {}
        try:
            for slot in [*messages.slots(), *(() if self.acks is None else self.acks.slots())]:
                owners.setdefault(self._routes.link_for(*slot), []).append(slot)
        except TxmqError as error:
            raise_rolled_back(error, self.txid_or_none)
        return owners

    def _go_to(self, home: BranchHome) -> None:
        before = self.home, self.commits, self._control, self._is_attached
        self.home, self.commits, self._control, self._is_attached = home, home.branch_commits, home.control, False
        try:
            self.reach()
            attach_for_caller(self)
        except RolledBackError:
            self.home, self.commits, self._control, self._is_attached = before
            raise

    def _branch_at(self, home: Broker) -> HomeBranch | None:
        return next((branch for branch in self.branches if branch.broker.home is home), None)

    def _share(self, acks: SavedOffsets) -> None:
        """Each home saves the offsets of its own partitions."""
        for broker in (self, *(branch.broker for branch in self.branches)):
            own = frozenset(slot for slot in acks.slots() if self._routes.link_for(*slot) is broker.home)
            broker.acks = acks.of_home(own) if own else None
        self._own_acks = self.acks

    def take_parts(self, messages: MessageBuffer, *, keyed: bool = True) -> list[EncodedPart]:
        """As of ``BrokerTransaction``; parts for other homes go to their branches."""
        parts = super().take_parts(messages, keyed=keyed or self._has_homes)
        if not self.branches:
            return parts
        own = []
        for part in parts:
            branch = self._branch_at(self._routes.link_for(part.topic, part.partition))
            if branch is None:
                own.append(part)
            else:
                branch.add(part)
        return own

    def stream(self, parts: Sequence[EncodedPart]) -> None:
        """As of ``BrokerTransaction``."""
        super().stream(parts)
        for branch in self.branches:
            branch.stream()

    def prepare_branches(self) -> list[str]:
        """Prepare what goes to other homes, for a transaction that is decided later.

        Returns:
            The ids of these parts, for the deciding home to list.

        Raises:
            TxmqError: one of the homes refuses, or does not answer; the deciding home was not asked.
        """
        for branch in self.branches:
            branch.stream_if_large()
        for branch in self.branches:
            branch.submit_prepare(self._submit_branch)
        for branch in self.branches:
            branch.await_prepared()
        for branch in self.branches:
            if branch.error is not None:
                raise branch.error
        return [branch.broker.txid for branch in self.branches]

    def _submit_branch(self, home: BrokerTransaction, parts: Sequence[EncodedPart]) -> Answer:
        return home.submit_branch(self.txid, parts, is_held=False)

    def commit_branches(self) -> None:
        """Tell the other homes that the transaction is committed, for certain; their answers are not awaited."""
        for branch in self.branches:
            if branch.state is not BranchState.COMMITTED:
                branch.commit()

    def roll_back_branches(self) -> None:
        """Tell them that it is rolled back, for certain; what was left to a home stays so."""
        told = [branch for branch in self.branches if branch.state is not BranchState.LEFT]
        for branch in told:
            branch.submit_rollback()
        for branch in told:
            branch.await_rolled_back()

    def leave_branches(self) -> None:
        """Leave to the other homes what may be prepared there: they ask the one that decides."""
        for branch in self.branches:
            if not branch.has_ended:
                branch.leave()

    @property
    def pending_homes(self) -> tuple[str, ...]:
        """Homes that could not be told of the decision yet, or have yet to place their part, as far as is known."""
        if self._waiting is not None:
            self.commits.look()
        here = (_name_of_home(self.txid),) if self._waiting is not None and self._waiting.lines is None else ()
        return (*here, *(name for branch in self.branches if (name := branch.pending) is not None))

    def decided(self, lines: Sequence[PartResult]) -> None:
        """Take the answer to the decision: nothing of the same keys must pass what waits for its place."""
        slots = {(line.topic, line.partition) for line in lines if line.base_offset is None}
        if slots:
            self._waiting = WaitingPlace(self, slots, super().finished)
            self.commits.add(self._waiting)

    def gather(self, lines: Sequence[PartResult], deadline: float) -> list[PartResult]:
        """The places of all parts: waits for those that have none yet, and for the homes that were told.

        Args:
            lines: as the decision was answered.
            deadline: monotonic time.
        """
        waiting = self._waiting
        if waiting is not None:
            with suppress(TxmqError):
                self.commits.wait_for(waiting, deadline)
            lines = waiting.lines or lines
        return [*lines, *(line for branch in self.branches for line in branch.gather(deadline))]

    def finished_here(self) -> None:
        """``finished``, at the home that decides."""
        if self._waiting is None and any(branch.state is BranchState.LEFT for branch in self.branches):
            super().lost()  # that home asks this one, which must not wait for earlier ends to know of the rollback
        elif self._waiting is None:
            super().finished()
        else:
            self._waiting.over()

    def finished(self) -> None:
        """As of ``BrokerTransaction``, at every home."""
        self.finished_here()
        for branch in self.branches:
            branch.close()

    def lost(self) -> None:
        """As of ``BrokerTransaction``, at every home."""
        super().lost()
        for branch in self.branches:
            branch.leave()
            branch.close()


def _name_of_home(txid: str) -> str:
    return f"home {TxId.parse(txid).home:016x}"


def _several(owners: dict[BranchHome, list[TopicPartition]]) -> str:
    """The partitions, home by home."""
    found = []
    for home, slots in owners.items():
        names = ", ".join(f"{topic}-{partition}" for topic, partition in sorted(slots))
        found.append(f"{names} ({home!r})")
    return f"the partitions are of several homes: {'; '.join(sorted(found))}; nothing happened"
