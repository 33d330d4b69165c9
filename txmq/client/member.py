"""A consumer's membership in its group: joins, beats, saves offsets, hands partitions over. A thread of its own.

Theory of operation. Heartbeats go over a connection of their own, so that the broker sees at once that a killed process
is gone. A beat waits at the broker until there is something to tell, at most ``heartbeat_interval``. What it tells is
given to the ``Partitions``: new ones with their generation and offset, those to be released, those that are lost. Who
cannot reach the broker for the session timeout takes itself for expelled and consumes nothing more: somebody else does.

Invariants:
    * a partition is released only when its messages under way are dealt with (or their time is over) and its offset is
      saved;
    * an offset is saved with the generation it was consumed under; refused means lost.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from txmq.client.connection import Connection
from txmq.client.tracker import Slot
from txmq.errors import ClosedError, TxmqError, UnknownMemberError
from txmq.runtime.logging import get_logger
from txmq.runtime.ports import Clock
from txmq.runtime.threads import Lock, Signal, start_daemon

REQUEST_TIMEOUT_S = 5.0
RETRY_S = 0.1


class Assigned(NamedTuple):
    """A partition to be consumed.

    Attributes:
        offset: None where the group has saved none.
        is_later: others were assigned before it.
    """

    slot: Slot
    generation: int
    offset: int | None
    aside: str | None
    is_later: bool = False


class Position(NamedTuple):
    """An offset to be saved."""

    slot: Slot
    generation: int
    offset: int
    aside: str | None = None


class Partitions(Protocol):
    """What consumes; called by the member's thread."""

    def assigned(self, assigned: Assigned) -> None:
        """Begin."""

    def revoked(self, slot: Slot) -> None:
        """Deliver nothing more."""

    def kept(self, slot: Slot) -> None:
        """Go on, also where it was revoked for a moment."""

    def lost(self, slot: Slot) -> None:
        """Somebody else has it."""

    def held(self) -> list[tuple[Slot, int]]:
        """What is consumed now, with generations."""

    def to_save(self, *, everything: bool) -> list[Position]:
        """Positions that the group does not know; ``everything``: also those whose time has not come."""

    def were_saved(self, positions: Iterable[Position]) -> None:
        """The group knows them."""

    def drained(self) -> list[Slot]:
        """Revoked partitions with nothing under way any more."""


class MemberSettings(NamedTuple):
    """Times in seconds."""

    group: str
    name: str
    topics: tuple[str, ...]
    strategy: str
    heartbeat_interval_s: float
    session_timeout_s: float
    save_interval_s: float


class GroupMember:
    """See the module's docstring. Thread safety: any thread."""

    def __init__(self, connection: Connection, clock: Clock, settings: MemberSettings, partitions: Partitions) -> None:
        self._connection, self._clock, self._settings, self._partitions = connection, clock, settings, partitions
        self._log = get_logger(group=settings.group, member=settings.name)
        self._view, self._is_joined, self._is_closing = 0, False, False
        self._has_view = False
        self._heard_at = clock.monotonic()
        self._save_at = 0.0
        self._saving = Lock()
        self._ended = Signal()
        self._released: list[Slot] = []

    def start(self) -> None:
        """Join; the thread goes on."""
        start_daemon(f"txmq-member-{self._settings.group}", self._run)

    def stop(self, timeout: float) -> None:
        """Save everything and leave."""
        self._is_closing = True
        try:
            self.save(everything=True)
            self._call("leave", [], {})
        except TxmqError as error:
            self._log.info("could not leave the group in order", error=repr(error))
        self._connection.close()
        self._ended.wait(timeout)

    def save(self, *, everything: bool = False) -> None:
        """Save what the group does not know. Durability: forced in the broker when this returns.

        Raises:
            TxmqError: the broker cannot be reached.
        """
        with self._saving:
            positions = self._partitions.to_save(everything=everything)
            if not positions:
                return
            rows = [[*position.slot, position.generation, position.offset, position.aside] for position in positions]
            answer = json.loads(self._call("save", rows, {}))
            refused = {(topic, partition) for topic, partition, _ in answer["refused"]}
            self._partitions.were_saved(position for position in positions if position.slot not in refused)
        for slot in refused:
            self._log.warning("offset refused: somebody else has the partition", topic=slot[0], partition=slot[1])
            self._partitions.lost(slot)

    def save_start(self, start: Position) -> bool:
        """Save where the group begins in a partition; False where the partition is somebody else's.

        Raises:
            TxmqError: the broker cannot be reached.

        Durability: forced in the broker when this returns.
        """
        row = [*start.slot, start.generation, start.offset, None]
        refused: list[Any] = json.loads(self._call("save", [row], {}))["refused"]
        return not refused

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
                except TxmqError as error:
                    self._cannot_reach(error)
        finally:
            self._ended.set()

    def _round(self) -> None:
        self._save_if_due()
        self._release_drained()
        if self._is_joined:
            self._beat()
        else:
            self._join()
        self._heard_at = self._clock.monotonic()

    def _join(self) -> None:
        settings = self._settings
        claims = [[*slot, generation] for slot, generation in self._partitions.held()]
        words: dict[str, str | int] = {
            "topics": ",".join(settings.topics), "strategy": settings.strategy,
            "timeout": int(settings.session_timeout_s * 1000),
        }  # fmt: skip
        view = self._call("join", claims, words)
        self._is_joined, self._released = True, []
        self._apply(json.loads(view))

    def _beat(self) -> None:
        wait_s = self._settings.heartbeat_interval_s
        now = self._clock.monotonic()
        if self._partitions.held():
            wait_s = min(wait_s, max(self._save_at - now, 0.0))
        released, self._released = self._released, []
        words: dict[str, str | int] = {"view": self._view}
        if not self._has_revoked:
            words["wait"] = max(1, int(wait_s * 1000))
        try:
            view = self._call("heartbeat", [list(slot) for slot in released], words)
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
        is_later, self._has_view = self._has_view or any(row[3] is not None for row in view["assigned"]), True
        assigned = [
            Assigned((t, p), generation, offset, aside, is_later)
            for t, p, generation, offset, aside in view["assigned"]
        ]
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
                self._partitions.assigned(item)
        self._has_revoked = bool(revoked)

    def _save_if_due(self) -> None:
        now = self._clock.monotonic()
        if self._is_joined and now >= self._save_at:
            self._save_at = now + self._settings.save_interval_s
            self.save()

    def _release_drained(self) -> None:
        drained = self._partitions.drained()
        if drained and self._is_joined:
            self.save(everything=True)
            for slot in drained:
                self._partitions.lost(slot)
            self._released.extend(drained)

    def _cannot_reach(self, error: TxmqError) -> None:
        away_s = self._clock.monotonic() - self._heard_at
        if away_s >= self._settings.session_timeout_s:
            for slot, _ in self._partitions.held():
                self._partitions.lost(slot)
            self._is_joined = False
        self._log.debug("the broker cannot be reached", error=repr(error), away_s=round(away_s, 1))
        self._clock.sleep(RETRY_S)

    def _call(self, action: str, rows: Sequence[Any], words: dict[str, str | int]) -> bytes:
        wait_s = int(words.get("wait", 0)) / 1000
        return self._connection.call(
            "group", action, self._settings.group, timeout=REQUEST_TIMEOUT_S + wait_s,
            extensions={"member": self._settings.name, **words}, body=[json.dumps(rows).encode()],
        )  # fmt: skip
