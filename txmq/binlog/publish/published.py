"""What is published, as a position message says it: read at a start, and by ``txmq binlog status``.

``{"id", "position": {}, "open": {} | null, "parked": {}, "rows", "transactions", "source_ms", "published_ms"}``, and
``"snapshot": {}`` while one is unfinished, ``"ended": []`` after XA COMMITs, ``"spool": {}`` if changes may be in a
spool, and nowhere else (``publisher``), and ``"placing"`` unless it was written by an older version.

The first message of a position topic is ``{"genesis": true}``: the group then has an offset to save, and the first
transaction a message to acknowledge. More than one does no harm.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from txmq.binlog.decoded_changes import TableName
from txmq.binlog.errors import BinlogError
from txmq.binlog.position import Position
from txmq.binlog.publish.unread import SnapshotState

GENESIS = b'{"genesis": true}'


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """A transaction of the source of which a part is published.

    Args:
        gtid: its id.
        topics: those that have its begin marker, each with the table whose change came first.
        rows: how many of its changes are published.
    """

    gtid: str
    topics: Mapping[str, TableName] = field(default_factory=dict)
    rows: int = 0


@dataclass(frozen=True, slots=True)
class ParkedRows:
    """The changes of a prepared XA transaction in the parked topic.

    Args:
        gtid: of the prepare.
        offset: none of them stands before it.
        rows: how many there are.
    """

    gtid: str
    offset: int
    rows: int


@dataclass(frozen=True, slots=True)
class SpoolHeld:
    """The spool of an ordered reader, when its position was written.

    Args:
        host, path: where it is.
        messages, size_bytes: what waited in it.
        size_bytes_max: what it can hold.
    """

    host: str
    path: str
    messages: int = 0
    size_bytes: int = 0
    size_bytes_max: int = 0


@dataclass(frozen=True, slots=True)
class Published:
    """See the module's docstring.

    Args:
        id: names the message: of the reader's run, and a number.
        position: what is published.
        open: set between the parts of a large transaction.
        parked: prepared XA transactions, by xid.
        rows: changes published since the topic was made.
        transactions: transactions of the source, likewise.
        source_ms: when the newest of them was run there; 0 if there is none.
        published_ms: when the message was made.
        snapshot: what one has still to read; None if there is none.
        ended: the newest XA transactions that were committed: a server that is killed within an XA COMMIT writes it
            into its binlog again when the transaction manager repeats it.
        spool: that of an ordered reader; None if all of the changes are in their topics.
        placing: how changes got their partitions (``topics.placing_of``).
        epoch: the newest one (``publisher``).
        sent: the messages of this one, and of all before, are in their topics.
    """

    id: str
    position: Position
    open: OpenTransaction | None = None
    parked: Mapping[str, ParkedRows] = field(default_factory=dict)
    rows: int = 0
    transactions: int = 0
    source_ms: int = 0
    published_ms: int = 0
    snapshot: SnapshotState | None = None
    ended: tuple[str, ...] = ()
    spool: SpoolHeld | None = None
    placing: str = ""
    epoch: int = 0
    sent: int = 0

    @property
    def run(self) -> str:
        """The reader's run that wrote it."""
        return self.id.rpartition("-")[0]

    @property
    def is_sent(self) -> bool:
        """Whether the topics have all changes up to the position."""
        return self.spool is None or not self.spool.messages

    def to_json(self) -> bytes:
        """The message's value."""
        open_ = self.open
        fields: dict[str, Any] = {
            "id": self.id,
            "position": json.loads(self.position.to_json()),
            "open": None if open_ is None else {"gtid": open_.gtid, "topics": open_.topics, "rows": open_.rows},
            "parked": {xid: [rows.gtid, rows.offset, rows.rows] for xid, rows in self.parked.items()},
            "rows": self.rows, "transactions": self.transactions,
            "source_ms": self.source_ms, "published_ms": self.published_ms,
            "epoch": self.epoch, "sent": self.sent,
        }  # fmt: skip
        if self.snapshot is not None:
            fields["snapshot"] = self.snapshot.to_fields()
        if self.ended:
            fields["ended"] = self.ended
        if self.spool is not None:
            fields["spool"] = asdict(self.spool)
        if self.placing:
            fields["placing"] = self.placing
        return json.dumps(fields).encode()


def read_published(value: bytes | None, where: str) -> Published | None:
    """What a position message says; None for the first one.

    Args:
        where: names the message, for the error.

    Raises:
        BinlogError: it is none.
    """
    try:
        found: Any = json.loads(value or b"")
        if found == {"genesis": True}:
            return None
        open_ = found["open"]
        return Published(
            found["id"],
            Position.from_json(json.dumps(found["position"])),
            None if open_ is None else _open(open_),
            {xid: ParkedRows(*rows) for xid, rows in found["parked"].items()},
            found["rows"], found["transactions"], found["source_ms"], found["published_ms"],
            SnapshotState.from_fields(found["snapshot"]) if "snapshot" in found else None,
            ended=tuple(found.get("ended", ())),
            spool=SpoolHeld(**found["spool"]) if "spool" in found else None,
            placing=str(found.get("placing", "")), epoch=int(found["epoch"]), sent=int(found["sent"]),
        )  # fmt: skip
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BinlogError(
            f"{where} is no position ({error!r}): another program writes into the topic of the positions"
        ) from None


def _open(found: Any) -> OpenTransaction:
    topics = {topic: TableName(*table) for topic, table in found["topics"].items()}
    return OpenTransaction(found["gtid"], topics, found["rows"])
