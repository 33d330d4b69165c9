"""The homes of a transaction: one decides, and has a part as each of the others has.

Theory of operation. A block takes its id late, when it is known which homes own the partitions that it wrote to, so
that a transaction on one home costs one home. If there are several, the home of the id decides; what goes to each of
the others is prepared there under an id of the client's own session at that home, and names the deciding one. The
decision lists these ids. After it each of them is committed: the request is written before the block returns, and its
answer is not awaited (``home_part``). A home that hears nothing asks the deciding one.

The partitions of a home, and the parts for it, are told by the routes; a partition's home never changes.

Invariants:
    * all parts of a transaction carry the deciding id, and their keys, once there are several homes: the brokers place
      parts of one partition and key in the order of the decisions;
    * a part that may be prepared is rolled back only when its transaction is, for certain;
    * nothing of this is done at a lone broker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from txmq.client.transaction.home_part import HomePart
from txmq.client.transaction.messages import MessageBuffer, SavedOffsets
from txmq.client.transaction.refusals import raise_rolled_back
from txmq.errors import RolledBackError, TxmqError
from txmq.model import TopicPartition
from txmq.protocol.transaction_parts import PartResult
from txmq.runtime.ports import Clock
from txmq.runtime.threads import Lock
from txmq.xa.resolver_ports import Answer
from txmq.xa.two_phase.coordinator import BranchState

if TYPE_CHECKING:
    from txmq.client.client import Client
    from txmq.client.home_link import HomeLink

HOMES_MAX = 32  # that a decision lists

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
