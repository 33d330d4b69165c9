"""What the model is made of: databases that show before they keep, homes, and what actors hand to one another."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.outbox.page import OutboxRow
from txmq.outbox.relay_core import RelayRow

if TYPE_CHECKING:
    from .world import World

NOT_OWNER = "not-owner"
TOPIC_HOME = {"a": 0, "b": 1}  # home 0 is the anchor: it decides, and keeps the chain


class Violation(Exception):
    """A promise is broken."""


class Lost(Exception):
    """The database connection is gone; a commit may or may not have happened."""


class Tables(NamedTuple):
    """One committed state. ``ledger``: the application's rows, (message, unit, is locked), in commit order."""

    rows: dict[int, OutboxRow]
    parked: dict[int, OutboxRow]
    relay: RelayRow
    ledger: tuple[tuple[int, int, bool], ...] = ()


class Database:
    """Committed states, of which those up to ``durable`` are on disk."""

    def __init__(self, name: str, first: Tables) -> None:
        self.name, self.states, self.durable, self.next_id = name, [first], 0, 1
        self.locks: dict[Any, object] = {}
        self.generation = 0

    @property
    def now(self) -> Tables:
        return self.states[-1]

    def commit(self, tables: Tables, *, forced: bool) -> None:
        self.states.append(tables)
        if forced:
            self.durable = len(self.states) - 1

    def back_to(self, state: int) -> None:
        """A crash (to what is durable), or a fail-over or restore (to before that)."""
        self.states = self.states[: state + 1]
        self.durable = state
        self.locks.clear()
        self.generation += 1
        known = [*self.now.rows, *self.now.parked]
        self.next_id = max(known, default=0) + 1 if random_bool(self, known) else self.next_id

    def clone(self, name: str) -> Database:
        other = Database(name, self.now)
        other.next_id = self.next_id
        return other


def random_bool(database: Database, known: list[int]) -> bool:
    """Whether the counter of ids falls back; not where it would meet ids that are there."""
    return database.generation % 2 == 1 and bool(known)


class Session:
    """One database transaction of a relay or operator, at READ COMMITTED, that has locked the relay row."""

    def __init__(self, world: World, database: Database, who: object, *, is_locking: bool = True) -> None:
        self.world, self.database, self.who, self.is_locking = world, database, who, is_locking
        self.generation = database.generation
        if is_locking:
            if database.locks.get("relay") is not None:
                raise Lost
            database.locks["relay"] = self

    def read(self) -> Tables:
        self._check()
        return self.database.now

    def commit(self, change: Callable[[Tables], Tables], *, forced: bool = True) -> None:
        self._check()
        self.database.commit(change(self.database.now), forced=forced)
        self.close()
        if self.world.chance(0.03):
            raise Lost  # it has happened, and nobody was told

    def close(self) -> None:
        if self.database.locks.get("relay") is self:
            del self.database.locks["relay"]

    def _check(self) -> None:
        is_killed = self.is_locking and self.database.locks.get("relay") is not self
        if self.generation != self.database.generation or is_killed:
            raise Lost


class Placed(NamedTuple):
    message: int
    unit: int
    topic_id: int
    topic: str
    key: str
    partitions: int  # how many the relay counted on


@dataclass
class Home:
    """A broker: what its journal holds. A request is executed and forced, or it is not; its answer may be lost."""

    number: int
    identity: int = (
        0  # the journal's: a directory restored in a cluster is another home; a broker alone stays what it was
    )
    topics: dict[str, tuple[int, int]] = field(default_factory=dict)  # name -> (id, partitions)
    sessions: set[str] = field(default_factory=set)
    outcomes: dict[str, bool] = field(default_factory=dict)
    chain: dict[str, str | None] = field(default_factory=dict)  # outbox -> txid of its last page
    prepared: dict[str, list[Placed]] = field(default_factory=dict)  # branches, in the order of their prepare
    placed: list[Placed] = field(default_factory=list)

    def refusal(self, parts: list[Placed]) -> str | None:
        for part in parts:
            if part.topic not in self.topics:
                return "404"
            topic_id, partitions = self.topics[part.topic]
            if topic_id != part.topic_id or partitions < part.partitions:
                return "stale"
        return None

    def commit(self, world: World, txid: str, uuid: str, after: str | None, parts: list[Placed]) -> str:
        """The page: one ordinary transaction, and the chain's link in the same record."""
        if txid in self.outcomes:
            return "200" if self.outcomes[txid] else "409"
        if session_of(txid) not in self.sessions:
            return "410"
        if self.chain.get(uuid) != after and not world.is_broken("chain_ignored"):
            return "409"
        refused = self.refusal(parts)
        if refused:
            return refused
        self.outcomes[txid] = True
        self.chain[uuid] = txid
        self.placed += parts
        world.check_placed(self)
        return "200"

    def outcome(self, txid: str, *, fence: bool) -> str:
        if txid in self.outcomes:
            return "committed" if self.outcomes[txid] else "rolled-back"
        if session_of(txid) not in self.sessions:
            return "410"
        if fence:
            self.outcomes[txid] = False
        return "rolled-back"

    def prepare(self, txid: str, parts: list[Placed]) -> str:
        if txid in self.outcomes:
            return "409"
        refused = self.refusal(parts)
        if refused is None:
            self.prepared[txid] = parts
        return refused or "200"

    def finish(self, world: World, txid: str, *, committed: bool) -> bool:
        """Place a branch, after earlier ones that share a key; or drop it. False if it has to wait."""
        if txid not in self.prepared:
            self.outcomes.setdefault(txid, committed)
            return True
        mine = {(part.topic, part.key) for part in self.prepared[txid]}
        for other, parts in self.prepared.items():
            if other == txid:
                break
            if committed and mine & {(part.topic, part.key) for part in parts}:
                return False
        parts = self.prepared.pop(txid)
        self.outcomes[txid] = committed
        if committed:
            self.placed += parts
            world.check_placed(self)
        return True


def session_of(txid: str) -> str:
    return txid.split("/")[0]


@dataclass(eq=False)
class Request:
    home: int
    run: Callable[[], Any]
    sender: Actor
    answer: Any = None
    is_done: bool = False  # the sender may go on: answered, or the link is lost (answer None)


Steps = Generator[Any, Any, None]


@dataclass(eq=False)
class Actor:
    name: str
    steps: Steps
    database: Database
    waits_for: Request | None = None
