"""A consumer's membership in its group: joins, beats, saves offsets, hands partitions over. A thread of its own.

Theory of operation. Heartbeats go over a connection of their own, so that the broker sees at once that a killed process
is gone. A beat waits at the broker until there is something to tell, at most ``heartbeat_interval``. What it tells is
given to the ``Partitions``: new ones with their generation and offset, those to be released, those that are lost. Who
cannot reach the broker for the session timeout takes itself for expelled and consumes nothing more: somebody else does.
Each process has an *incarnation* beside the member's name: who joins under a name that another one has takes over, and
the other one is told, and ends.

Invariants:
    * a partition is released only when its messages under way are dealt with (or their time is over) and its offset is
      saved;
    * an offset is saved with the generation it was consumed under; refused means lost;
    * offsets that cannot be loaded or saved now (a store that is away) stop neither the beat nor other partitions.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from txmq.client.consumer.offsets.store import BrokerOffsetStore, OffsetPosition, OffsetStore, StoredOffset, asked
from txmq.client.transport.reconnecting import ReconnectingConnection
from txmq.errors import (
    ClosedError,
    FencedError,
    GroupActiveError,
    OverloadedError,
    StorageError,
    TxmqError,
    UnknownMemberError,
    UnknownTopicError,
)
from txmq.model import TopicPartition
from txmq.protocol.group_rows import in_pieces
from txmq.runtime.logging import get_logger
from txmq.runtime.ports import Clock
from txmq.runtime.threads import Lock, Signal, start_daemon

REQUEST_TIMEOUT_S = 5.0
RETRY_S = 0.1
Words = dict[str, str | int | None]


class Assigned(NamedTuple):
    """A partition to be consumed.

    Attributes:
        offset: None where the group has saved none.
        is_later: it came into being after the member did, or after others of its topic were begun.
    """

    slot: TopicPartition
    generation: int
    offset: int | None
    deferred: str | None
    is_later: bool = False


class Partitions(Protocol):
    """What consumes; called by the member's thread."""

    def assigned(self, assigned: Assigned) -> None:
        """Begin."""

    def revoked(self, slot: TopicPartition) -> None:
        """Deliver nothing more."""

    def kept(self, slot: TopicPartition) -> None:
        """Go on, also where it was revoked for a moment."""

    def lost(self, slot: TopicPartition) -> None:
        """Somebody else has it."""

    def held(self) -> list[tuple[TopicPartition, int]]:
        """What is consumed now, with generations."""

    def to_save(self, *, everything: bool) -> list[OffsetPosition]:
        """Positions that the group does not know; ``everything``: also those whose time has not come."""

    def were_saved(self, positions: Iterable[OffsetPosition]) -> None:
        """The group knows them."""

    def drained(self) -> list[TopicPartition]:
        """Revoked partitions with nothing under way any more."""

    def settle(self) -> None:
        """Look what became of messages that a transaction acknowledged."""

    def refused(self, error: TxmqError) -> None:
        """The group does not take us: it is over."""


class MemberSettings(NamedTuple):
    """Times in seconds."""

    group: str
    name: str
    topics: tuple[str, ...]
    strategy: str
    heartbeat_interval_s: float
    session_timeout_s: float
    save_interval_s: float
    incarnation: str = ""  # which process's it is, of those that have the name one after another


class _SupersededError(FencedError):
    """Another process has joined under our name: it has everything, and we have nothing more to say."""


class GroupMember:
    """See the module's docstring. Thread safety: any thread."""

    def __init__(
        self, connection: ReconnectingConnection, clock: Clock, settings: MemberSettings, partitions: Partitions,
        store: OffsetStore | None = None,
    ) -> None:  # fmt: skip
        self._connection, self._clock, self._settings, self._partitions = connection, clock, settings, partitions
        self._store: OffsetStore = store if store is not None else BrokerOffsetStore(self._save_in_broker)
        self._log = get_logger(group=settings.group, member=settings.name)
        self._view, self._is_joined, self._is_closing = 0, False, False
        self._has_view = self._has_looked = False
        self._told = ""  # why the broker refused
        self._heard_at = clock.monotonic()
        self._save_at = 0.0
        self._saving = Lock()
        self._ended = Signal()
        self._released: list[TopicPartition] = []
        self._incarnation: Words = {"incarnation": settings.incarnation} if settings.incarnation else {}

    def start(self) -> None:
        """Join; the thread goes on."""
        start_daemon(f"txmq-member-{self._settings.group}", self._run)

    def stop(self, timeout: float) -> None:
        """Save everything and leave."""
        self._is_closing = True
        try:
            self._partitions.settle()
            self._is_saved(everything=True)
            self._call("leave", [], {})
        except TxmqError as error:
            self._log.info("could not leave the group in order", error=repr(error))
        self._connection.close()
        self._ended.wait(timeout)

    def save(self, *, everything: bool = False) -> Collection[TopicPartition]:
        """Save what the group does not know. Durability: saved when this returns; in the broker: forced.

        Returns:
            Partitions whose offset was refused: they are lost.

        Raises:
            TxmqError: the broker, or where else the offsets are, cannot be reached.
        """
        with self._saving:
            positions = self._partitions.to_save(everything=everything)
            if not positions:
                return ()
            refused = asked(lambda: self._store.save(self._settings.group, positions))
            self._partitions.were_saved(position for position in positions if position.slot not in refused)
        current = set(self._partitions.held())
        for position in positions:
            if position.slot in refused and (position.slot, position.generation) in current:  # else it is ours anew
                topic, partition = position.slot
                self._log.warning("offset refused: somebody else has the partition", topic=topic, partition=partition)
                self._partitions.lost(position.slot)
        return refused

    def wait_saved(self) -> None:
        """No save that began before this is under way when it returns."""
        with self._saving:
            pass

    def save_start(self, start: OffsetPosition) -> bool:
        """Save where the group begins in a partition; False where the partition is somebody else's.

        Raises:
            TxmqError: the broker, or where else the offsets are, cannot be reached.

        Durability: saved when this returns.
        """
        return not asked(lambda: self._store.save(self._settings.group, [start]))

    def _save_in_broker(self, positions: Sequence[OffsetPosition]) -> list[TopicPartition]:
        rows = [[*position.slot, position.generation, position.offset, position.deferred] for position in positions]
        order = max(position.order for position in positions)
        refused: dict[TopicPartition, int] = {}
        for piece in in_pieces(rows):
            answer = json.loads(self._call("save", piece, {"order": order} if order else {}))
            refused.update({(topic, partition): newest for topic, partition, newest in answer["refused"]})
        ours = [p.slot for p in positions if refused.get(p.slot) in (0, p.generation)]
        if ours:  # the broker was restarted, and we have to join again; or a transaction of ours overtook this
            raise StorageError(f"the offset of {ours[0][0]}-{ours[0][1]} cannot be saved now")
        return list(refused)

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
                except _SupersededError as error:
                    self._partitions.refused(FencedError(*error.args))
                    for slot, _ in self._partitions.held():
                        self._partitions.lost(slot)
                    return
                except TxmqError as error:
                    self._cannot_reach(error)
        finally:
            self._ended.set()

    def _round(self) -> None:
        self._save_if_due()
        self._release_drained()
        if self._is_joined:
            self._heartbeat()
        else:
            self._join()
        self._heard_at = self._clock.monotonic()

    def _is_refused(self, error: GroupActiveError) -> bool:
        """One of the two must be alone; but who was killed a moment ago is a member until the group has noticed."""
        if self._clock.monotonic() - self._heard_at < self._settings.session_timeout_s + RETRY_S:
            self._clock.sleep(RETRY_S)
            return False
        self._partitions.refused(error)
        return True

    def _join(self) -> None:
        settings = self._settings
        # One request claims all; what does not fit is handed over anew, and goes on from what is saved.
        pending_acks = in_pieces([*slot, generation] for slot, generation in self._partitions.held())[0]
        words: Words = {
            "topics": ",".join(settings.topics), "strategy": settings.strategy,
            "timeout": int(settings.session_timeout_s * 1000),
        }  # fmt: skip
        if not self._store.is_shared:
            words["alone"] = None
        view = json.loads(self._call("join", pending_acks, words))
        self._is_joined, self._released = True, []
        self._apply(view)
        if not self._has_looked:
            self._has_looked = True
            self._tell_missing({topic for topic, *_ in view["assigned"]})

    def _tell_missing(self, assigned: Collection[str]) -> None:
        """A topic may come into being later; one that is misspelt would be waited for in silence."""
        for topic in self._settings.topics:
            try:
                if topic not in assigned:
                    self._connection.call("meta", topic, timeout=REQUEST_TIMEOUT_S)
            except UnknownTopicError:
                self._log.warning("there is no such topic yet: it is waited for", topic=topic)
            except TxmqError:
                return

    def _heartbeat(self) -> None:
        wait_s = self._settings.heartbeat_interval_s
        now = self._clock.monotonic()
        if self._partitions.held():
            wait_s = min(wait_s, max(self._save_at - now, 0.0))
        released, self._released = self._released, []
        words: Words = {"view": self._view}
        if not self._has_revoked:
            words["wait"] = max(1, int(wait_s * 1000))
        try:
            *first, last = in_pieces(released)
            for piece in first:
                self._call("heartbeat", piece, {})
            view = self._call("heartbeat", last, words)
        except TxmqError:
            self._released = released  # said again
            raise
        self._apply(json.loads(view))
        if self._has_revoked:
            self._clock.sleep(RETRY_S / 10)

    _has_revoked = False

    def _apply(self, view: dict[str, Any]) -> None:
        self._view = view["view"]
        held = dict(self._partitions.held())
        begun = {topic for topic, _, _, offset, _ in view["assigned"] if offset is not None}
        assigned = [
            Assigned((topic, number), generation, offset, deferred, self._has_view or topic in begun)
            for topic, number, generation, offset, deferred in view["assigned"]
        ]
        # Who stands by, or waits for somebody's end, has not seen yet what there is.
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
                self._released.append(slot)  # released while the group wanted it back for a moment: said again
        for item in assigned:
            if held.get(item.slot) == item.generation:
                self._partitions.kept(item.slot)
            else:
                self._begin(item)
        self._has_revoked = bool(revoked)

    def _begin(self, item: Assigned) -> None:
        """Load a partition. Where that cannot be now it is not ours yet, and the next view says it again."""
        if isinstance(self._store, BrokerOffsetStore):
            told = None if item.offset is None else StoredOffset(item.offset, item.deferred)
            self._store.told(item.slot, item.generation, told)
        try:
            found = asked(lambda: self._store.load(self._settings.group, item.slot, item.generation))
        except (FencedError, StorageError) as error:
            topic, partition = item.slot
            self._log.warning("offset could not be loaded", topic=topic, partition=partition, error=repr(error))
            return
        offset, deferred = found if found is not None else (None, None)
        self._partitions.assigned(item._replace(offset=offset, deferred=deferred))

    def _save_if_due(self) -> None:
        now = self._clock.monotonic()
        if self._is_joined and (now >= self._save_at or self._has_revoked):
            self._partitions.settle()
        if self._is_joined and now >= self._save_at:
            self._save_at = now + self._settings.save_interval_s
            self._is_saved()

    def _is_saved(self, *, everything: bool = False) -> bool:
        """Save; False where that cannot be now, and will be tried again: the beat goes on meanwhile."""
        try:
            self.save(everything=everything)
        except (OverloadedError, StorageError) as error:
            self._log.warning("offsets could not be saved; it is tried again", error=repr(error))
            return False
        return True

    def _release_drained(self) -> None:
        drained = self._partitions.drained()
        if drained and self._is_joined and self._is_saved(everything=True):
            for slot in drained:
                self._partitions.lost(slot)
            self._released.extend(drained)

    def _cannot_reach(self, error: TxmqError) -> None:
        away_s = self._clock.monotonic() - self._heard_at
        if away_s >= self._settings.session_timeout_s:
            for slot, _ in self._partitions.held():
                self._partitions.lost(slot)
            if self._is_joined:
                self._log.warning("the broker cannot be reached: partitions are given up", error=repr(error))
            self._is_joined = False
        if isinstance(error, OverloadedError) and str(error) != self._told:
            self._told = str(error)
            self._log.warning("the broker refuses the group for now; it is tried again", error=self._told)
        self._log.debug("the broker cannot be reached", error=repr(error), away_s=round(away_s, 1))
        self._clock.sleep(RETRY_S)

    def _call(self, action: str, rows: Sequence[Any], words: Words) -> bytes:
        wait_s = int(words.get("wait") or 0) / 1000
        try:
            return self._connection.call(
                "group", action, self._settings.group, timeout=REQUEST_TIMEOUT_S + wait_s,
                extensions={"member": self._settings.name, **self._incarnation, **words},
                body=[json.dumps(rows).encode()],
            )  # fmt: skip
        except FencedError as error:
            raise _SupersededError(*error.args) from error
