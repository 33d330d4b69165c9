"""A transactional database of one process: rows, a version per key under its row lock, markers, a COMMIT that may lose
its answer with either result."""

from __future__ import annotations

from dataclasses import dataclass, field

from .world import Simulation


@dataclass(eq=False, slots=True)
class Session:
    """One open database transaction."""

    row: str
    key: int
    version: int
    marker: str | None = None


@dataclass(slots=True)
class Database:
    """Committed state is ``rows`` (row: key and version) and ``markers``; open transactions hold locks."""

    world: Simulation
    rows: dict[str, tuple[int, int]] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)
    markers: dict[str, str] = field(default_factory=dict)
    open: list[Session] = field(default_factory=list)

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

    def commit(self, session: Session) -> None:
        """All of it at once."""
        self.open.remove(session)
        self.rows[session.row] = (session.key, session.version)
        self.versions[session.key] = session.version
        assert session.marker is not None
        self.markers[session.marker] = "committed"

    def insert_rolled_back(self, txid: str) -> str:
        """A resolver's row, committed at once: ``inserted``, ``duplicate`` or ``locked``."""
        if any(session.marker == txid for session in self.open):
            return "locked"
        if txid in self.markers:
            return "duplicate"
        self.markers[txid] = "rolled-back"
        return "inserted"
