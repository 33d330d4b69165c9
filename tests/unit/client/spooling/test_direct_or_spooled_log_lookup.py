"""Looking for a batch in the log: what stands after it is of no interest."""

from __future__ import annotations

import pytest

from tests.unit.log.support import NUMBER, make_batch, make_placed
from tools.simulated.stand_in import AnyClass
from txmq.client.spooling.direct_or_spooled import StoredInLog, look_up
from txmq.client.spooling.spool import AssignedSequence, Entry, SpoolIdentity
from txmq.client.spooling.spool_homes import stamped
from txmq.errors import InvalidBatchError
from txmq.log import batch
from txmq.model import PartitionRange

ASSIGNED = AssignedSequence(SpoolIdentity(1, 1, 7, 1), 0, 0)


class Log(AnyClass):
    """A reader of one answer."""

    def __init__(self, content: bytes, end: int) -> None:
        self._content, self._end = content, end

    def fetch_raw(self, topic: str, partition: int, offset: int, max_bytes: int = 0, timeout: float = 0.0) -> bytes:
        """All there is."""
        return self._content

    def offsets(self, topic: str, partition: int) -> PartitionRange:
        """All there is."""
        return PartitionRange(topic, partition, 0, self._end)


def test_damage_after_the_batch_does_not_hide_it() -> None:
    content = bytes(make_batch())
    entry = Entry(1, "orders", NUMBER, content, 0, 0, "", False, 1, 7, ASSIGNED)
    held = stamped(content, ASSIGNED)
    batch.stamp(held, 7, NUMBER, 0, batch.stored_crc(held))
    damaged = make_placed(1)
    damaged[-2] ^= 1
    assert look_up(Log(bytes(held + damaged), 2), entry) is StoredInLog.STORED
    with pytest.raises(InvalidBatchError, match="CRC"):
        look_up(Log(bytes(damaged + held), 2), entry)
