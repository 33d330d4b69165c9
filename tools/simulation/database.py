"""A transactional database of one process: rows, a version per key under its row lock, markers, a COMMIT that may lose
its answer with either result."""

from __future__ import annotations

from dataclasses import dataclass, field

from txmq.model import TopicPartition

from .world import Simulation

Slot = tuple[TopicPartition, int]  # and a key


@dataclass(eq=False, slots=True)
class Session:
    """One open database transaction."""

    row: str
    key: int
    version: int
    marker: str | None = None


WAITING, PARKED, RECALLED = "waiting", "parked", "recalled"


@dataclass(eq=False, slots=True)
class OutboxRow:
    """The messages of a committed transaction that wait; ``number`` is 0 until a drainer gives one.

    Attributes:
        state: parked by an operator, recalled behind such a row of its slots, or waiting.
    """

    name: str
    body: bytes
    slots: frozenset[Slot]
    number: int = 0
    state: str = WAITING


@dataclass(slots=True)
class Outbox:
    """The table, as of its committed transactions, and what drainers were told.

    Attributes:
        taken: the row that took a number, or ``void``, as the broker told the first who asked.
    """

    rows: list[OutboxRow] = field(default_factory=list)
    last: int = 0
    taken: dict[int, str] = field(default_factory=dict)

    def holds(self, slots: set[Slot]) -> bool:
        """Whether a row of one of these partitions and keys waits."""
        return any(row.slots & slots for row in self.rows)

    def number(self) -> None:
        """Number what has no number yet, in the order of its commits, but for rows behind one that is kept back."""
        held = set[Slot]()
        for row in self.rows:
            if row.state != WAITING or row.slots & held:
                held |= row.slots
            elif not row.number:
                self.last += 1
                row.number = self.last

    def park(self, row: OutboxRow) -> None:
        """Keep a row back, and recall those behind it of its slots; their numbers are to be used up by voids."""
        row.state, held = PARKED, set(row.slots)
        for later in self.rows[self.rows.index(row) + 1 :]:
            if later.slots & held:
                held |= later.slots
                if later.number and later.state == WAITING:
                    later.state = RECALLED

    def release(self) -> None:
        """Let parked rows go whose numbers are used up."""
        for row in self.rows:
            if row.state == PARKED and not row.number:
                row.state = WAITING

    def voided(self, number: int, name: str) -> None:
        """The broker has a void for a row's number."""
        for row in self.rows:
            if (row.number, row.name) == (number, name):
                row.number, row.state = 0, PARKED if row.state == PARKED else WAITING

    @property
    def gone(self) -> int:
        """The highest number up to which no row is left."""
        return min((row.number for row in self.rows if row.number), default=self.last + 1) - 1

    def delete(self, number: int, name: str) -> None:
        """The broker has placed a row's messages."""
        self.rows = [row for row in self.rows if (row.number, row.name) != (number, name)]


@dataclass(slots=True)
class Database:
    """Committed state is ``rows`` (row: key and version) and ``markers``; open transactions hold locks."""

    world: Simulation
    rows: dict[str, tuple[int, int]] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)
    markers: dict[str, str] = field(default_factory=dict)
    open: list[Session] = field(default_factory=list)
    outbox: Outbox = field(default_factory=Outbox)

    def begin(self, row: str, key: int) -> Session | None:
        """Insert a row and count its key up; None where somebody holds the key's lock."""
        if any(other.key == key for other in self.open):
            return None
        session = Session(row, key, self.versions.get(key, 0) + 1)
        self.open.append(session)
        return session

    def insert_marker(self, session: Session, txid: str) -> bool:
        """The owner's committed marker, uncommitted yet."""
        if txid in self.markers:
            return False
        session.marker = txid
        return True

    def roll_back(self, session: Session) -> None:
        """End without effect; harmless for one that has ended."""
        if session in self.open:
            self.open.remove(session)

    def commit(self, session: Session, outcome: str = "committed") -> None:
        """All of it at once; the marker has the outcome."""
        self.open.remove(session)
        self.rows[session.row] = (session.key, session.version)
        self.versions[session.key] = session.version
        assert session.marker is not None
        self.markers[session.marker] = outcome

    def insert_rolled_back(self, txid: str) -> str:
        """A resolver's row, committed at once: ``inserted``, ``duplicate`` or ``locked``."""
        if any(session.marker == txid for session in self.open):
            return "locked"
        if txid in self.markers:
            return "duplicate"
        self.markers[txid] = "rolled-back"
        return "inserted"
