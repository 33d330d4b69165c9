"""Which rows are the next page: a prefix by id that splits no unit and passes no parked row of a key."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from txmq.outbox.page import BEHIND, REFUSED, UNKNOWN_TOPIC, OutboxRow, Page, Waiting, build, runs, whole_units


def row(number: int, unit: int | None = None, topic: str = "a", key: bytes | None = None) -> OutboxRow:
    return OutboxRow(number, unit, topic, key, b"")


def ids(rows: object) -> list[int]:
    return [one.id for one in rows]  # type: ignore[attr-defined]


def parked(page: Page, *reasons: str) -> list[int]:
    """The ids that are parked for one of these reasons."""
    return [one.id for one, why in page.parked if why in reasons]


def test_page_ends_before_a_unit_that_goes_on_after_it() -> None:
    rows = [row(1), row(2, 7), row(3), row(4, 7)]
    assert ids(whole_units(Waiting(rows))) == [1, 2, 3, 4]
    assert ids(whole_units(Waiting(rows, cut={7}))) == [1]


def test_end_before_one_unit_cuts_no_other() -> None:
    rows = [row(1), row(2, 5), row(3, 7), row(4, 5), row(5, 7)]
    assert ids(whole_units(Waiting(rows, cut={7}))) == [1]


def test_nothing_fits_if_the_first_unit_goes_on() -> None:
    assert whole_units(Waiting([row(1, 7), row(2)], cut={7})) == []


def test_unit_stands_with_the_parked_rows_of_its_keys() -> None:
    rows = [row(5, 1, key=b"x"), row(6, 1, key=b"y"), row(7, 2, key=b"y"), row(8, 3, key=b"z"), row(9)]
    page = build(Waiting(rows, held={("a", b"x"): 3}), {"a"})
    assert (ids(page.rows), parked(page, BEHIND)) == ([8, 9], [5, 6, 7])


def test_parked_row_of_a_higher_id_holds_nobody() -> None:
    page = build(Waiting([row(2, key=b"x")], held={("a", b"x"): 3}), {"a"})
    assert ids(page.rows) == [2]


def test_unit_with_an_unknown_topic_ends_the_page() -> None:
    rows = [row(1), row(2, 7), row(3, 7, topic="gone"), row(4)]
    page = build(Waiting(rows), {"a"})
    assert (ids(page.rows), parked(page, UNKNOWN_TOPIC)) == ([1], [2, 3])


def test_unit_that_was_refused_alone_is_bad() -> None:
    rows = [row(1, 7), row(2, 7), row(3)]
    page = build(Waiting(rows), {"a"}, refused={7})
    assert (ids(page.rows), parked(page, REFUSED)) == ([], [1, 2])


def test_unit_for_a_home_that_is_away_is_parked_whole() -> None:
    rows = [row(1, 7), row(2, 8, topic="b"), row(3, 8), row(4)]
    page = build(Waiting(rows), {"a", "b"}, away={8: "away"})
    assert (ids(page.rows), parked(page, "away")) == ([1], [2, 3])


def test_line_waits_before_what_finds_no_room_among_the_parked() -> None:
    rows = [row(1), row(2, 7), row(3, topic="gone"), row(4, 7), row(5)]
    page = build(Waiting(rows, room=0), {"a"})
    assert page == Page([rows[0]], (), is_full=True)
    assert build(Waiting(rows[2:], room=0), {"a"}) == Page([], (), is_full=True)
    assert ids(build(Waiting(rows[:2], room=-1), {"a"}).rows) == [1, 2], "nothing is parked"


def test_shortest_page_has_the_first_units_only() -> None:
    rows = [row(1, 7), row(2, 8), row(3, 7), row(4, 8), row(5)]
    assert ids(build(Waiting(rows), {"a"}, is_shortest=True).rows) == [1, 2, 3, 4]
    assert ids(build(Waiting(rows[4:]), {"a"}, is_shortest=True).rows) == [5]


@given(st.sets(st.integers(1, 40)))
def test_runs_cover_exactly_the_ids(numbers: set[int]) -> None:
    found = runs(sorted(numbers))
    assert [one for first, last in found for one in range(first, last + 1)] == sorted(numbers)
    assert all(last + 1 < first for (_, last), (first, _) in pairwise(found))
