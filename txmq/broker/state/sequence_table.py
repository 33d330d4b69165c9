"""In which partitions producers have sequences, and how many that are. Derived: partitions keep the sequences."""

from __future__ import annotations

from txmq.broker.state.producer_sequences import Sequences
from txmq.broker.state.session import BrokerSession, count_for
from txmq.log.partition import Partition


class SequenceTable:
    """See the module's docstring.

    Args:
        sessions: the state's.
        by_user: ``Principals.sequences``, which is counted here.

    Attributes:
        produced_in: by producer id, the partitions.
        count: of all producers, each partition counted for each.
    """

    def __init__(self, sessions: dict[int, BrokerSession], by_user: dict[str, int]) -> None:
        self._sessions, self._by_user = sessions, by_user
        self.produced_in: dict[int, dict[Partition, None]] = {}
        self.count = 0

    def keep(self, producer: int, partition: Partition, sequences: Sequences) -> Sequences:
        """A producer has sequences in one more partition; returns them."""
        partition.producers[producer] = sequences
        self.produced_in.setdefault(producer, {})[partition] = None
        self._count(producer, 1)
        return sequences

    def forget(self, producer: int, partition: Partition) -> None:
        """The partition is deleted."""
        of_producer = self.produced_in[producer]
        del of_producer[partition]
        if not of_producer:
            del self.produced_in[producer]
        self._count(producer, -1)

    def take(self, producer: int, user: str) -> None:
        """A session that was nobody's is the user's now."""
        count_for(self._by_user, user, len(self.produced_in.get(producer, ())))

    def release(self, session: BrokerSession) -> None:
        """A session has ended, or its client is done with it: its sequences go."""
        partitions = self.produced_in.pop(session.number, {})
        for partition in partitions:
            partition.producers.pop(session.number, None)
        self.count -= len(partitions)
        count_for(self._by_user, session.user, -len(partitions))

    def _count(self, producer: int, more: int) -> None:
        self.count += more
        session = self._sessions.get(producer)
        if session is not None:
            count_for(self._by_user, session.user, more)
