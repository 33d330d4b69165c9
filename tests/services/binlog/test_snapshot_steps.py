"""What a snapshot hands over at a time: a small table without a key is there whole, with its end, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing

import pytest

from tests.services.binlog.reading import Reading
from txmq.binlog.config import SnapshotSettings
from txmq.binlog.decoded_changes import Row, TableName, TableSchema
from txmq.binlog.position import Position
from txmq.binlog.publish.unread import SnapshotState
from txmq.binlog.snapshot import Snapshot
from txmq.runtime.clocks import OSClock
from txmq.testing.processes.database_programs import Ability

pytestmark = pytest.mark.needs(Ability.SNAPSHOTS)


class Recorded:
    """Takes a snapshot's rows: how many at a time, and what is then still to be read."""

    def __init__(self, position: Position, snapshot: SnapshotState) -> None:
        self.position, self.steps = position, list[tuple[int, SnapshotState | None]]()
        self.snapshot: SnapshotState | None = snapshot

    def publish_read(
        self, schema: TableSchema | None, rows: Sequence[Row], behind: Callable[[int], SnapshotState | None]
    ) -> None:
        """Take rows."""
        self.snapshot = behind(len(rows))
        self.steps.append((len(rows), self.snapshot))


@pytest.mark.parametrize(("rows", "steps"), [(0, [0]), (9, [9]), (10, [10, 0]), (13, [10, 3])])
def test_last_rows_of_a_table_without_key_end_it(reading: Reading, rows: int, steps: list[int]) -> None:
    inserts = [f"INSERT INTO plain VALUES {', '.join(['(1)'] * rows)}"] if rows else []
    reading.run("CREATE TABLE plain (x INT)", *inserts)
    plain = TableName(reading.database, "plain")
    settings = SnapshotSettings(chunk_rows=10)
    recorded = Recorded(reading.source.current_position(), SnapshotState((plain,), tables=1))
    made = Snapshot(reading.source._options, settings, lambda _: True, OSClock(), lambda: False)
    with closing(made) as snapshot:
        assert snapshot.is_due(recorded)
        snapshot.read(recorded)
    assert [count for count, _ in recorded.steps] == [*steps, 0]
    assert [None if state is None else (state.rows, state.current) for _, state in recorded.steps[-2:]] == [
        (rows, None), None,
    ]  # fmt: skip
