"""What a block puts into its database when no broker is to hear of it before it has committed (``outbox="always"``).

A row of the outbox for each home, their keys, and a marker. Where statements may go out together, all of it is part of
what goes out with COMMIT (``committing``): the server does nothing behind a statement that fails, and the marker, which
comes last, fails unless deadline, identity and topics are as they should be. Of the topics their *age* says that, by
the place that the row in front of it was given (``outbox_topics``). Elsewhere the marker's INSERT has the same
conditions, reads the topics, and says by its count whether they held.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from txmq.errors import RolledBackError
from txmq.xa.database.installation import DatabaseSession
from txmq.xa.database.marker_table import ENCLOSED
from txmq.xa.database.outbox_keys import OutboxKey
from txmq.xa.database.outbox_tables import row_id
from txmq.xa.database.outbox_topics import TopicSize, is_of_age
from txmq.xa.database.statement import Statement

PACKET_BYTES_MAX = 256 << 10  # of messages, which are written in hex


class Waiting(NamedTuple):
    """A block's messages for one home, which wait in the database."""

    home: str
    batches: bytes
    keys: Collection[OutboxKey]


class GrownTopicsError(RolledBackError):
    """The block was routed by an older number of partitions than the database knows.

    Attributes:
        newer: what it knows.
    """

    def __init__(self, newer: Mapping[str, TopicSize], txid: str) -> None:
        super().__init__(f"{', '.join(sorted(newer))} has other partitions by now; run the block again", txid)
        self.newer = dict(newer)


class Enclosed(NamedTuple):
    """A block's marker and messages.

    Attributes:
        deadline_ms: by the database's clock.
        topics: by which the messages were routed.
        age: of the topics, if the database has none that is newer than these as long as it is of this age.
    """

    txid: str
    deadline_ms: int
    waiting: Sequence[Waiting]
    topics: Mapping[str, TopicSize]
    age: int | None

    def may_be_sent(self, session: DatabaseSession) -> bool:
        """Whether it may be sent with COMMIT."""
        if not (session.takes_packets and session.table.has_key) or (self.topics and self.age is None):
            return False
        size_bytes = 0
        for one in self.waiting:
            size_bytes += len(one.batches)
        return size_bytes <= PACKET_BYTES_MAX

    def statements(self, session: DatabaseSession, uuid: str) -> list[Statement]:
        """To be sent with COMMIT; the last one fails unless the marker gets in."""
        table, outbox = session.table, session.outbox
        assert outbox is not None
        found = list[Statement]()
        for number, one in enumerate(self.waiting):
            found += outbox.added(row_id(self.txid, number), one.batches, one.keys, one.home)
        condition = None if self.age is None or not found else is_of_age(self.age)
        return [*found, table.insert_committed_or_fail(self.txid, uuid, self.deadline_ms, ENCLOSED, condition)]

    def withdraw(self, session: DatabaseSession) -> None:
        """Take out what stands in front of a marker that was kept out, in the transaction that is open."""
        assert session.outbox is not None
        session.outbox.withdraw(session.connection, [row_id(self.txid, number) for number in range(len(self.waiting))])

    def put(self, session: DatabaseSession, uuid: str) -> bool:
        """Run it; False, and nothing was done, if the deadline has passed.

        Raises:
            GrownTopicsError: nothing was done, too.
            Exception: the driver's own.
        """
        table, outbox, connection = session.table, session.outbox, session.connection
        assert outbox is not None
        condition = outbox.topics.none_newer(self.topics)
        if not table.insert_enclosed(connection, self.txid, uuid, self.deadline_ms, condition):
            known = outbox.topics.newest(connection, self.topics) if self.topics else {}
            newer = {name: one for name, one in known.items() if one > self.topics[name]}
            if newer:
                raise GrownTopicsError(newer, self.txid)
            return False
        for number, one in enumerate(self.waiting):
            outbox.add(connection, row_id(self.txid, number), one.batches, one.keys, one.home)
        return True
