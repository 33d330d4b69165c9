"""A resource's outbox, as this process knows it: when blocks use it, how much it holds, how it is drained.

Theory of operation. A block that finds the broker away, or that waits for it longer than ``away_after_ms``, trips the
breaker: the blocks behind it do not try. The drainer, which looks at the broker in the background, closes it again.
Several blocks in turn that waited for a prepare for longer than ``slow_after_ms`` trip it, too.

Each home of a cluster is away, or there, by itself: ``at`` has what is known of one.

With ``when="always"`` all blocks use it that can wait in a database, and ask the broker for nothing: drainers of this
process are woken by their commits (``pump``). The breaker tells then whether a client that has no session yet may wait
for its broker.

Rows and bytes are counted by the drainer, and added up by this process's blocks in between: other processes' blocks of
the last second are not in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from txmq.errors import ConfigError
from txmq.runtime.owner import current_process
from txmq.runtime.ports import Clock
from txmq.runtime.threads import Signal
from txmq.xa.database.outbox_homes import LONE
from txmq.xa.database.outbox_tables import OutboxSize
from txmq.xa.database.outbox_topics import TopicSize

SLOW_IN_TURN = 3  # prepares
TRIPPED_S_MIN = 1.0
MARKERS_KEPT_S_MIN = 10.0  # half of it is the most that a resolver's clock and wait for a lock may be off
PLACED_MAX = 10_000  # rows that are remembered as placed
_NOTHING = OutboxSize(0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class OutboxOptions:
    """How a resource uses its outbox.

    Attributes:
        when: "away": while the broker is; "always": each block's messages ride in its database's commit.
        away_after_ms: a broker that has not prepared by then is away.
        slow_after_ms: so is one that keeps blocks waiting for longer, three in turn.
        rows_max: of the outbox; a block beyond it fails, as without an outbox.
        size_bytes_max: the same for its messages.
        alarm_after_s: messages that have waited for longer are logged as an error.
        markers_kept_s: with "always": how long behind its deadline a transaction's marker proves that it is committed.
    """

    when: Literal["away", "always"] = "away"
    away_after_ms: int = 500
    slow_after_ms: int = 200
    rows_max: int = 1_000_000
    size_bytes_max: int = 4 << 30
    alarm_after_s: float = 300.0
    markers_kept_s: float = 120.0

    def __post_init__(self) -> None:
        if self.when not in ("away", "always"):
            raise ConfigError(f"when={self.when!r}: expected 'away' or 'always'")
        if self.markers_kept_s < MARKERS_KEPT_S_MIN:
            raise ConfigError(f"markers_kept_s={self.markers_kept_s}: expected {MARKERS_KEPT_S_MIN:.0f} or more")
        for name in ("away_after_ms", "slow_after_ms", "rows_max", "size_bytes_max", "alarm_after_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}={getattr(self, name)}: expected more than 0")


class OutboxState:
    """See the module's docstring.

    Attributes:
        options: as given.
        is_tripped: blocks do not try the broker.
        size: how much waits, when it was counted last.
        problem: why nothing is drained, or None.
        told: topics as the database has them, as far as this process has told it.
        ages: topics as the database had them at an age, which is told, too (``outbox_topics``).
        distrusted: an age that rows do not have, though it is that of the topics.
        newest: stands for the last block that has added to it.
        pumped_in: the process whose blocks wake drainers of their own (``pump``); 0 for none.

    Thread safety: any thread; counts may be off by what is under way.
    """

    def __init__(
        self, options: OutboxOptions, clock: Clock, holder: str, told: dict[str, TopicSize] | None = None
    ) -> None:  # fmt: skip
        self._homes: dict[str, OutboxState] = {}
        self.options, self._holder, self._clock = options, holder, clock
        self._process = current_process()
        self.is_tripped = False
        self.size = _NOTHING
        self.problem: str | None = None
        self.told: dict[str, TopicSize] = {} if told is None else told
        self.ages: dict[str, tuple[TopicSize, int]] = {}
        self.distrusted: int | None = None
        self._slow_in_turn, self._tripped_at = 0, float("-inf")
        self.pumped_in = 0
        self._placed: dict[str, None] = {}
        self._watched: dict[str, list[Signal]] = {}
        self._is_used = True  # perhaps by a process before this one: looked at once
        self.newest: object = None

    def at(self, home: str) -> OutboxState:
        """The same outbox, as far as one home is concerned; LONE is this one."""
        if home == LONE:
            return self
        known = self._homes.get(home)
        if known is None:
            made = OutboxState(self.options, self._clock, self.holder, self.told)
            known = self._homes.setdefault(home, made)
        return known

    @property
    def holder(self) -> str:
        """Names this process among those that drain: a forked one is another than its parent."""
        process = current_process()
        return self._holder if process == self._process else f"{self._holder}-{process:x}"

    @holder.setter
    def holder(self, name: str) -> None:
        self._holder, self._process = name, current_process()

    @property
    def is_always(self) -> bool:
        """Whether blocks use it also while the broker is there."""
        return self.options.when == "always"

    @property
    def is_to_be_looked_at(self) -> bool:
        """Whether a drainer may have something to do: messages wait, or the broker was away."""
        return self.is_tripped or self.may_wait

    @property
    def may_wait(self) -> bool:
        """Whether messages wait, as far as was counted or added."""
        return self._is_used or self.size.rows > 0

    def age_of(self, sizes: Mapping[str, TopicSize]) -> int | None:
        """The age of the topics at which the database had these, all of them; None if that is not known."""
        found = {
            known[1] if (known := self.ages.get(name)) and known[0] == size else None for name, size in sizes.items()
        }
        return found.pop() if len(found) == 1 else None

    def distrust(self, sizes: Mapping[str, TopicSize], age: int | None) -> None:
        """A row had another age, though there is nothing newer."""
        self.distrusted = age
        for name in sizes:
            self.ages.pop(name, None)

    def trip(self) -> None:
        """The broker is away, or too slow."""
        self.is_tripped, self._tripped_at = True, self._clock.monotonic()

    def close(self) -> None:
        """The broker answers. Blocks try it again, but for a second: who is slow may be quick for once."""
        if self._clock.monotonic() >= self._tripped_at + TRIPPED_S_MIN:
            self.is_tripped, self._slow_in_turn = False, 0

    def prepared(self, waited_s: float) -> None:
        """The broker has prepared a block, which waited for that alone so long."""
        is_slow = waited_s * 1000 > self.options.slow_after_ms
        self._slow_in_turn = self._slow_in_turn + 1 if is_slow else 0
        if self._slow_in_turn >= SLOW_IN_TURN:
            self.trip()

    def has_room(self, size_bytes: int) -> bool:
        """Whether so much may be added."""
        rows, waiting_bytes = self.total
        return rows < self.options.rows_max and waiting_bytes + size_bytes <= self.options.size_bytes_max

    @property
    def total(self) -> tuple[int, int]:
        """Rows and bytes that wait, for all homes."""
        if not self._homes:
            return self.size.rows, self.size.size_bytes
        sizes = [self.size, *(state.size for state in list(self._homes.values()))]
        return sum(size.rows for size in sizes), sum(size.size_bytes for size in sizes)

    def added(self, size_bytes: int) -> None:
        """A block of this process has put its messages there."""
        self._is_used, self.newest = True, object()
        rows, waiting_bytes, parked, age_ms = self.size
        self.size = OutboxSize(rows + 1, waiting_bytes + size_bytes, parked, age_ms)

    def counted(self, size: OutboxSize, newest: object) -> None:
        """How much waits, by the database.

        Args:
            newest: when the counting began; a block that has committed since is perhaps not counted.
        """
        self.size = size
        if newest is self.newest:
            self._is_used = False

    def left(self, rows: int, size_bytes: int) -> None:
        """A drainer of this process has taken so many away."""
        size = self.size
        self.size = size._replace(rows=max(size.rows - rows, 0), size_bytes=max(size.size_bytes - size_bytes, 0))

    # --- who waits for a row to be placed ----------------------------------------------------------------------------

    def placed(self, row_ids: Iterable[str]) -> None:
        """The broker has placed these, by a drainer of this process."""
        placed, watched = self._placed, self._watched
        for row_id in row_ids:
            placed[row_id] = None  # first: who begins to watch now sees it, or is seen
            if watched:
                for signal in watched.pop(row_id, ()):
                    signal.set()
        while len(placed) > PLACED_MAX:
            placed.pop(next(iter(placed)), None)

    def is_placed(self, row_id: str) -> bool:
        """Whether a drainer of this process has seen it placed, lately."""
        return row_id in self._placed

    def watch(self, row_id: str) -> Signal:
        """What is set when a drainer of this process has seen the row placed; to be given up by ``unwatch``."""
        signal = Signal()
        self._watched.setdefault(row_id, []).append(signal)
        if row_id in self._placed:
            signal.set()
        return signal

    def unwatch(self, row_id: str) -> None:
        """Nobody waits for it any more."""
        self._watched.pop(row_id, None)
