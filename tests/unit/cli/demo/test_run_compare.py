"""The demo's comparison: it must be able to say no."""

from __future__ import annotations

import dataclasses

import pytest

from txmq.cli.demo.run import Reported, Row, Sent, compare, compare_handed_over

ROWS = [Row("r1", "ada"), Row("r2", "ben"), Row("r3", "ada"), Row("r4", "ada")]
ORDERS = [Sent(0, 0, "ada", "r1"), Sent(1, 0, "ben", "r2"), Sent(0, 1, "ada", "r3"), Sent(0, 2, "ada", "r4")]
PAID = [Sent(0, 0, "ada", "p1"), Sent(0, 1, "ada", "p2")]
REPORTED = Reported(orders=frozenset({"r1", "r3"}), payments=frozenset({"p1"}), declined=frozenset({"d1"}))


def test_equal_rows_and_messages_hold() -> None:
    found = compare(ROWS, ORDERS, PAID, PAID, REPORTED)
    assert found.holds
    assert (found.rows, found.messages, found.payments, found.acknowledged) == (4, 4, 2, 3)


def _with(**changes: object) -> dict[str, object]:
    return {"rows": ROWS, "orders": ORDERS, "payments": PAID, "audit": PAID, "reported": REPORTED} | changes


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({"orders": ORDERS[:3]}, "missing"),
        ({"rows": ROWS[:3]}, "phantoms"),
        ({"reported": dataclasses.replace(REPORTED, declined=frozenset({"r2"}))}, "phantoms"),
        ({"orders": [*ORDERS, Sent(0, 3, "ada", "r4")]}, "duplicates"),
        ({"payments": [*PAID, Sent(0, 2, "ada", "p2")]}, "duplicates"),
        ({"audit": [*PAID, Sent(3, 2, "ada", "p2")]}, "duplicates"),
        ({"reported": dataclasses.replace(REPORTED, orders=frozenset({"r9"}))}, "lost"),
        ({"reported": dataclasses.replace(REPORTED, payments=frozenset({"p9"}))}, "lost"),
        ({"audit": PAID[:1]}, "torn"),
        ({"payments": PAID[:1]}, "torn"),
        ({"rows": [ROWS[2], ROWS[1], ROWS[0], ROWS[3]]}, "misordered"),
        ({"orders": [ORDERS[0], ORDERS[1], ORDERS[2], Sent(2, 0, "ada", "r4")]}, "misordered"),
    ],
)
def test_each_kind_of_damage_is_counted(changes: dict[str, object], count: str) -> None:
    found = compare(**_with(**changes))  # type: ignore[arg-type]
    assert getattr(found, count) == 1
    assert not found.holds


def test_lost_row_and_its_lost_message_are_lost_when_acknowledged() -> None:
    found = compare(ROWS[1:], ORDERS[1:], PAID, PAID, REPORTED)
    assert (found.lost, found.missing, found.phantoms) == (1, 0, 0)


def test_nothing_at_all_proves_nothing() -> None:
    assert not compare([], [], [], [], Reported(frozenset(), frozenset(), frozenset())).holds


def test_an_outbox_whose_rows_and_messages_are_equal_holds() -> None:
    found = compare_handed_over(ROWS, ORDERS, frozenset({"r1"}))
    assert found.holds
    assert (found.shipments, found.handed_over) == (4, 4)


@pytest.mark.parametrize(
    ("rows", "messages", "committed", "count"),
    [
        (ROWS, ORDERS[:3], frozenset(), "not_handed_over"),
        (ROWS[:3], ORDERS, frozenset(), "invented"),
        (ROWS, [*ORDERS, Sent(0, 3, "ada", "r4")], frozenset(), "twice"),
        (ROWS, ORDERS, frozenset({"r9"}), "shipments_lost"),
        ([ROWS[2], ROWS[1], ROWS[0], ROWS[3]], ORDERS, frozenset(), "customers_misordered"),
    ],
)
def test_an_outbox_that_differs_does_not(
    rows: list[Row], messages: list[Sent], committed: frozenset[str], count: str
) -> None:
    found = compare_handed_over(rows, messages, committed)
    assert not found.holds
    assert getattr(found, count) == 1
