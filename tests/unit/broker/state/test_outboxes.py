"""Numbers of outbox series: which row has which, and how many are remembered."""

from __future__ import annotations

import json

from txmq.broker.state.outboxes import ROWS_KEPT, DrainedRow, Outboxes


def taken(*numbers: int) -> Outboxes:
    outboxes = Outboxes()
    for number in numbers:
        outboxes.take("s", number, DrainedRow(f"row-{number}", 1, number))
    return outboxes


def test_a_number_has_the_row_that_took_it() -> None:
    series = taken(1, 2, 3).series["s"]
    assert (series.last, series.at(2)) == (3, DrainedRow("row-2", 1, 2))
    assert (series.at(0), series.at(4)) == (None, None)
    assert [number for number, _ in series.behind(2)] == [2, 3]


def test_rows_beyond_the_newest_are_not_remembered() -> None:
    series = taken(*range(1, ROWS_KEPT + 3)).series["s"]
    assert (series.at(2), series.at(3)) == (None, DrainedRow("row-3", 1, 3))
    assert next(series.behind(0)) == (3, DrainedRow("row-3", 1, 3))
    assert len(list(series.behind(0))) == ROWS_KEPT


def test_a_copy_as_json_brings_all_series_back() -> None:
    outboxes = taken(*range(1, ROWS_KEPT + 3))
    outboxes.take("other", 1, DrainedRow("void", 2, 9))
    copied = json.loads(json.dumps([list(row) for row in outboxes.freeze()]))
    again = Outboxes()
    again.restore(copied)
    assert list(again.freeze()) == list(outboxes.freeze())
    again.take("s", ROWS_KEPT + 3, DrainedRow("next", 1, 9))
    assert (again.series["s"].at(3), outboxes.series["s"].at(3)) == (None, DrainedRow("row-3", 1, 3))
