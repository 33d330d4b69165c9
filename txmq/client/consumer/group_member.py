"""A consumer's membership in its group at one home: joins, sends heartbeats, hands partitions over. Its own thread.

Theory of operation. A heartbeat waits at the broker until the member's view of the group has changed, at most
``heartbeat_interval``. The changes go to the ``Handover``: new partitions with their generation and offset, partitions
to be released, partitions that are lost. A member that cannot reach the broker for the session timeout counts itself as
expelled and consumes nothing more, because its partitions go to other members. Each process has an *incarnation*
besides the member's name. A process that joins under a name in use takes over, and the older one ends with an error.

Invariants:
    * a partition is released only when its messages under way are dealt with (or their time is over) and its offset is
      saved;
    * a member joins when its consumer is in the offset store: what others could load it does not hold;
    * offsets that cannot be loaded or saved now (a store that is away) stop neither heartbeats nor other partitions;
    * partitions are begun in slices, with a heartbeat in between: many of them, or a slow store, expel nobody;
    * the thread survives every error: without it the consumer would go on with partitions that are others' by then.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.client.consumer.assigned_partitions import AssignedPartitions
from txmq.client.consumer.offsets.offset_store import OffsetPosition, StoredOffset
from txmq.client.consumer.options import MemberSettings
from txmq.client.transport.reconnecting import ReconnectingConnection
from txmq.errors import (
    ClosedError,
    FencedError,
    ForbiddenError,
    GroupActiveError,
    OverloadedError,
    StorageError,
    TxmqError,
    UnknownMemberError,
    UnknownTopicError,
)
from txmq.log.history import LogHistory, parsed
from txmq.model import TopicPartition
from txmq.protocol.group_rows import in_pieces
from txmq.runtime.backoff import Backoff
from txmq.runtime.logging import Sparingly, get_logger
from txmq.runtime.ports import Clock
from txmq.runtime.threads import Signal, start_daemon

if TYPE_CHECKING:
    from txmq.client.consumer.offsets.saver import OffsetSaver
    from txmq.client.consumer.partition_handover import Handover
    from txmq.client.consumer.transactional_acks import PendingAcks

REQUEST_TIMEOUT_S = 5.0
Fields = dict[str, str | int | None]
RETRY_S = 0.1
ENTER_AGAIN_S = Backoff(0.1, 2.0)
LOADED_TOGETHER_MAX = 200


class SupersededError(FencedError):
    """Another process joined the group under this member's name and took over its partitions."""


class GroupRequests:
    """A member's requests to the broker about its group, over a connection of their own.

    The broker notices at once if a process is killed, because its connection ends.

    Thread safety: any thread.
    """

    def __init__(self, connection: ReconnectingConnection, settings: MemberSettings) -> None:
        self._connection, self._settings = connection, settings
        self._incarnation: Fields = {"incarnation": settings.incarnation} if settings.incarnation else {}

    def call(self, action: str, rows: Sequence[Any], fields: Fields) -> bytes:
        """Send ``group <action>``.

        Raises:
            SupersededError: another process has the member's name.
            TxmqError: the broker refused, or cannot be reached.
        """
        wait_s = int(fields.get("wait") or 0) / 1000
        try:
            return self._connection.call(
                "group", action, self._settings.group, timeout=REQUEST_TIMEOUT_S + wait_s,
                extensions={"member": self._settings.name, **self._incarnation, **fields},
                body=[json.dumps(rows).encode()],
            )  # fmt: skip
        except FencedError as error:
            raise SupersededError(*error.args) from error

    def save(self, positions: Sequence[OffsetPosition]) -> list[TopicPartition]:
        """Save offsets in the broker; those that were refused, because another member has the partition.

        Raises:
            StorageError: the broker was restarted, and the member has to join again; or a transaction of the member's
                own overtook this.
        """
        rows = [[*position.slot, position.generation, position.offset, position.deferred] for position in positions]
        order = max(position.order for position in positions)
        refused: dict[TopicPartition, int] = {}
        for piece in in_pieces(rows):
            answer = json.loads(self.call("save", piece, {"order": order} if order else {}))
            refused.update({(topic, partition): newest for topic, partition, newest in answer["refused"]})
        ours = [p.slot for p in positions if refused.get(p.slot) in (0, p.generation)]
        if ours:
            raise StorageError(f"the offset of {ours[0][0]}-{ours[0][1]} cannot be saved now")
        return list(refused)

    def has_topic(self, topic: str) -> bool:
        """Whether there is such a topic."""
        try:
            self._connection.call("meta", topic, timeout=REQUEST_TIMEOUT_S)
        except UnknownTopicError:
            return False
        return True

    def close(self) -> None:
        """End the connection."""
        self._connection.close()


class ExclusiveGrant:
    """The grant of a consumer that must be the only one of its group, over several homes.

    One home, the group's anchor, says which member has everything, under a number that grows. The consumer joins the
    other homes under that number: each lets go of whichever member had an older one. A consumer begins nothing before
    every home has heard of its grant, unless the holder before it left in order. So a consumer that is taken for gone
    at the anchor, and is alive at another home, never consumes at the same time as its successor. A home that is away
    holds up a successor that way, and never the holder.

    Invariant: a consumer that loses its grant, or cannot reach the anchor for the session timeout, gives up everything.

    A broker that is alone, and members that share, know of no grant. Thread-safe.

    Args:
        count_homes: how many homes there are.

    Attributes:
        anchor: the number of the consumer's home that grants; None while it is not known.
        number: of the grant; 0 without one.
    """

    def __init__(self, assignment: AssignedPartitions, count_homes: Callable[[], int]) -> None:
        self._assignment, self._count_homes = assignment, count_homes
        self.anchor: int | None = None
        self.number = 0
        self._is_clean = False
        self._heard: frozenset[int] = frozenset()  # the homes that know this grant

    def seen(self, home: int, view: dict[str, Any], stated: int) -> None:
        """A home has answered a member that stated a grant."""
        if "grant" in view:
            self.anchor = home
            if view["grant"] != self.number:
                self.lose()
            self.number, self._is_clean = view["grant"], view["clean"]
        if stated == self.number or home == self.anchor:
            self._heard |= {home}

    def lose(self) -> None:
        """It is another member's by now, or may be: give up everything."""
        self.number, self._heard = 0, frozenset()
        with self._assignment.changed:
            held = list(self._assignment.partitions)
        for slot in held:
            self._assignment.lost(slot)

    def may_begin(self) -> bool:
        """Whether no other consumer has anything."""
        return self.anchor is None or (self.number > 0 and (self._is_clean or len(self._heard) >= self._count_homes()))


class Assigned(NamedTuple):
    """A partition to be consumed.

    Attributes:
        offset: None if the group has saved none.
        is_later: created after the member joined, or after the group began with other partitions of the topic.
        log: the history of the log that is there; None: it has to be asked for.
        read: which one the offset counts in, as an offset store says; None: that one, or it is not known.
    """

    slot: TopicPartition
    generation: int
    offset: int | None
    deferred: str | None
    is_later: bool = False
    log: LogHistory | None = None
    read: str | None = None


class OtherHomes(NamedTuple):
    """What a member shares with those at the consumer's other homes; a broker that is alone has none.

    Attributes:
        number: of the home that this member is at.
        held: tells what the consumer has at the others.
        after_round: called after each try.
        grant: of a consumer that must be the only one.
        enter: lets the consumer into its offset store; False while that does not answer.
    """

    number: int = 0
    held: Callable[[], frozenset[TopicPartition]] = frozenset
    after_round: Callable[[], None] = lambda: None
    grant: ExclusiveGrant | None = None
    enter: Callable[[], bool] = lambda: True


class GroupMember:
    """See the module's docstring. Thread safety: any thread."""

    def __init__(
        self, requests: GroupRequests, clock: Clock, settings: MemberSettings, partitions: Handover,
        offsets: OffsetSaver, acks: PendingAcks, others: OtherHomes | None = None,
    ) -> None:  # fmt: skip
        self._requests, self._clock, self._settings = requests, clock, settings
        self._partitions, self._offsets, self._acks = partitions, offsets, acks
        self._others = others or OtherHomes()
        self._grant, self._home = self._others.grant, self._others.number
        self._stated = 0  # the grant under which it has joined
        self._reported: frozenset[TopicPartition] = frozenset()  # of what the consumer has elsewhere
        self._log = get_logger(group=settings.group, member=settings.name)
        self._sparingly = Sparingly(self._log, clock)
        self._view, self._is_joined, self._is_closing = 0, False, False
        self._is_inside, self._is_entering, self._waits = False, False, 0  # the offset store
        self._closing = Signal()
        self._has_view = self._has_looked = self._has_revoked = False
        self._has_more = False  # partitions that are assigned and were not tried yet
        self._tried: set[TopicPartition] = set()  # since there were more than a slice takes
        self._refusal = ""  # the broker's, as far as it is logged
        self._heard_at = clock.monotonic()
        self._save_at = 0.0
        self._ended = Signal()
        self._released: list[TopicPartition] = []

    def start(self) -> None:
        """Start the thread, which joins."""
        start_daemon(f"txmq-member-{self._settings.group}", self._run)

    def end(self) -> None:
        """End the thread; ``stop`` leaves the group."""
        self._is_closing = True
        self._closing.set()

    def stop(self, timeout: float) -> None:
        """Save everything, leave the group and end the thread; one that is in the hands of a store ends by itself."""
        self.end()
        if self._is_entering:
            self._requests.close()
            return
        try:
            self._acks.resolve()
            self._is_saved(everything=True)
            self._requests.call("leave", [], {})
        except TxmqError as error:
            self._log.info("could not leave the group in order", error=repr(error))
        self._requests.close()
        self._ended.wait(timeout)

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_closing:
                try:
                    self._round()
                except ClosedError:
                    return
                except UnknownMemberError:
                    self._is_joined = False
                except GroupActiveError as error:
                    if self._is_refused(error):
                        return
                except SupersededError as error:
                    self._end_by(FencedError(*error.args))
                    return
                except ForbiddenError as error:
                    self._end_by(error)
                    return
                except TxmqError as error:
                    self._cannot_reach(error)
                except Exception as error:  # noqa: BLE001  no thread can be started, memory is short, a defect
                    self._sparingly.error("the member's thread failed; it goes on", error=repr(error), exc_info=error)
                    self._cannot_reach(error)
                self._others.after_round()
        finally:
            self._ended.set()

    def _round(self) -> None:
        if self._stands_by() or not self._has_entered():
            self._heard_at = self._clock.monotonic()
            return
        self._save_if_due()
        self._release_drained()
        if self._is_joined:
            self._heartbeat()
        else:
            self._join()
        self._heard_at = self._clock.monotonic()

    def _stands_by(self) -> bool:
        """Wait a moment if another home says which member has everything, and it is not this one."""
        grant = self._grant
        if grant is None or grant.anchor in (None, self._home):
            return False
        if self._is_joined and self._stated != grant.number:
            self._is_joined = False
            self._lose_held()
        if grant.number == 0:
            self._clock.sleep(RETRY_S)
        return grant.number == 0

    def _has_entered(self) -> bool:
        """Whether the consumer is in its offset store; waits a moment if that does not answer."""
        if self._is_inside:
            return True
        self._is_entering = True
        try:
            self._is_inside = self._others.enter()
        except TxmqError as error:
            self._end_by(error)
            self.end()
        self._is_entering = not self._is_inside
        if self._is_entering:
            self._closing.wait(ENTER_AGAIN_S.after(self._waits))
            self._waits += 1
        return self._is_inside and not self._is_closing

    def _is_refused(self, error: GroupActiveError) -> bool:
        """Whether to give up: one member must be alone. A member that was killed counts until the group has noticed."""
        if self._clock.monotonic() - self._heard_at < self._settings.session_timeout_s + RETRY_S:
            self._clock.sleep(RETRY_S)
            return False
        self._partitions.refused(error)
        return True

    def _join(self) -> None:
        settings = self._settings
        # One request names all held partitions; what does not fit goes on from its saved offset.
        held: list[Sequence[Any]] = list(self._partitions.claims())
        told = self._others.held()
        rows = in_pieces([*held, *sorted(told)])[0]
        fields: Fields = {
            "topics": ",".join(settings.topics), "strategy": settings.strategy,
            "timeout": int(settings.session_timeout_s * 1000),
        }  # fmt: skip
        if not self._offsets.is_shared:
            fields["alone"] = None
        stated = self._grant.number if self._grant is not None else 0
        if stated:
            fields["grant"] = stated
        view = json.loads(self._asked_to_join(rows, fields))
        self._is_joined, self._released, self._stated = True, [], stated
        if "anchor" in view and self._grant is not None:
            self._grant.seen(self._home, view, stated)
            if view["view"] == 0:  # another home is the anchor: join with its grant
                self._is_joined = False
                self._clock.sleep(RETRY_S if self._grant.anchor is not None else self._settings.heartbeat_interval_s)
                return
        self._reported = told if len(rows) == len(held) + len(told) else frozenset()
        self._apply(view)
        if not self._has_looked:
            self._has_looked = True
            self._report_missing({topic for topic, *_ in view["assigned"]})

    def _asked_to_join(self, rows: Sequence[Any], fields: Fields) -> bytes:
        try:
            return self._requests.call("join", rows, fields)
        except UnknownMemberError:  # there is a newer grant
            self._lose_held()
            self._clock.sleep(RETRY_S)
            raise

    def _end_by(self, error: TxmqError) -> None:
        """End the consumer; it has nothing any more when the application hears of that."""
        self._lose_held()
        self._partitions.refused(error)

    def _lose_held(self) -> None:
        for slot, _ in self._partitions.held():
            self._partitions.lost(slot)

    def _report_missing(self, assigned: Collection[str]) -> None:
        """Log which topics are missing: one may be created later, but a misspelt one would be waited for in silence."""
        for topic in self._settings.topics:
            try:
                if topic not in assigned and not self._requests.has_topic(topic):
                    self._log.warning("there is no such topic yet: it is waited for", topic=topic)
            except TxmqError:
                return

    def _tell_elsewhere(self) -> None:
        elsewhere = self._others.held()
        if elsewhere != self._reported:
            for number, piece in enumerate(in_pieces(sorted(elsewhere))):
                self._requests.call("elsewhere", piece, {"more": None} if number else {})
            self._reported = elsewhere

    def _heartbeat(self) -> None:
        self._tell_elsewhere()
        wait_s = self._settings.heartbeat_interval_s
        now = self._clock.monotonic()
        if self._partitions.held():
            wait_s = min(wait_s, max(self._save_at - now, 0.0))
        released, self._released = self._released, []
        fields: Fields = {"view": self._view}
        if not (self._has_revoked or self._has_more):
            fields["wait"] = max(1, int(wait_s * 1000))
        try:
            *first, last = in_pieces(released)
            for piece in first:
                self._requests.call("heartbeat", piece, {})
            view = self._requests.call("heartbeat", last, fields)
        except TxmqError:
            self._released = released  # sent again
            raise
        self._apply(json.loads(view))
        if self._has_revoked:
            self._clock.sleep(RETRY_S / 10)

    def _apply(self, view: dict[str, Any]) -> None:
        if "grant" in view and self._grant is not None:
            self._grant.seen(self._home, view, 0)
        self._view = view["view"]
        held = dict(self._partitions.held())
        begun = {topic for topic, _, _, offset, _ in view["assigned"] if offset is not None}
        assigned = [
            Assigned(
                (topic, number),
                generation,
                offset,
                deferred,
                self._has_view or topic in begun,
                None if log is None else parsed(log),
            )
            for (topic, number, generation, offset, deferred), log in zip(view["assigned"], view["logs"], strict=True)
        ]
        # A member that stands by, or waits for the end of another one, has not seen yet which partitions there are.
        self._has_view = self._has_view or bool(assigned) or view["members"] == 1
        revoked = {(topic, partition) for topic, partition in view["revoked"]}
        mine = {item.slot: item.generation for item in assigned}
        for slot, generation in held.items():
            if slot not in revoked and mine.get(slot) != generation:
                self._partitions.lost(slot)
        for slot in revoked:
            if slot in held:
                self._partitions.revoked(slot)
            elif slot not in self._released:
                self._released.append(slot)  # released while the group wanted it back for a moment: sent again
        for item in assigned:
            if held.get(item.slot) == item.generation:
                self._partitions.kept(item.slot, item.log)
        self._has_revoked = bool(revoked)
        self._begin_some([item for item in assigned if held.get(item.slot) != item.generation])

    def _begin_some(self, items: Sequence[Assigned]) -> None:
        """Begin partitions until a heartbeat is due; the next view assigns the others again, and they come first."""
        items = sorted(items, key=lambda item: item.slot in self._tried)
        until = self._clock.monotonic() + self._settings.heartbeat_interval_s
        loaded: Mapping[TopicPartition, StoredOffset | None] = {}
        for number, item in enumerate(items):
            if number and self._clock.monotonic() >= until:
                self._has_more = True
                self._tried.update(one.slot for one in items[:number])
                return
            if self._grant is not None and not self._grant.may_begin():
                break
            if number % LOADED_TOGETHER_MAX == 0:
                some = items[number : number + LOADED_TOGETHER_MAX]
                loaded = self._offsets.load_many([(one.slot, one.generation) for one in some])
                if loaded and not number:  # worth more than one of them, however long it took
                    until = self._clock.monotonic() + self._settings.heartbeat_interval_s
            self._begin(item, loaded)
        self._has_more = False
        self._tried.clear()

    def _begin(self, item: Assigned, loaded: Mapping[TopicPartition, StoredOffset | None]) -> None:
        """Load and begin a partition. If that fails, the next view assigns it again."""
        log = None if item.log is None else item.log.text  # the broker keeps its offsets with the log
        in_broker = None if item.offset is None else StoredOffset(item.offset, item.deferred, log)
        try:
            found = (
                loaded[item.slot] if item.slot in loaded
                else self._offsets.load(item.slot, item.generation, in_broker)
            )  # fmt: skip
        except (FencedError, StorageError) as error:
            topic, partition = item.slot
            self._sparingly.warning(
                "offset could not be loaded; it is tried again", topic=topic, partition=partition, error=repr(error)
            )
            return
        offset, deferred, read = found if found is not None else (None, None, None)
        try:
            self._partitions.assigned(item._replace(offset=offset, deferred=deferred, read=read))
        except StorageError as error:
            self._sparingly.warning("a partition is not begun yet", error=str(error))
        except BaseException:
            self._partitions.lost(item.slot)  # what was begun of it
            raise

    def _save_if_due(self) -> None:
        now = self._clock.monotonic()
        if self._is_joined and (now >= self._save_at or self._has_revoked):
            self._acks.resolve()
        if self._is_joined and now >= self._save_at:
            self._save_at = now + self._settings.save_interval_s
            self._is_saved()

    def _is_saved(self, *, everything: bool = False) -> bool:
        """Save; False if that fails now: it is tried again, and heartbeats go on meanwhile."""
        try:
            self._offsets.save(everything=everything)
        except (OverloadedError, StorageError) as error:
            self._sparingly.warning("offsets could not be saved; it is tried again", error=repr(error))
            return False
        return True

    def _release_drained(self) -> None:
        drained = self._partitions.drained()
        if drained and self._is_joined and self._is_saved(everything=True):
            for slot in drained:
                self._partitions.lost(slot)
            self._released.extend(drained)

    def _cannot_reach(self, error: Exception) -> None:
        away_s = self._clock.monotonic() - self._heard_at
        if away_s >= self._settings.session_timeout_s:
            if self._grant is not None and self._grant.anchor == self._home:
                self._grant.lose()
            self._lose_held()
            if self._is_joined:
                self._log.warning("the broker cannot be reached: partitions are given up", error=repr(error))
            self._is_joined = False
        if isinstance(error, OverloadedError) and str(error) != self._refusal:
            self._refusal = str(error)
            self._log.warning("the broker refuses the group for now; it is tried again", error=self._refusal)
        self._log.debug("the broker cannot be reached", error=repr(error), away_s=round(away_s, 1))
        self._clock.sleep(RETRY_S)
