"""Crash points are declared, used, and stand for rows of the crash matrix."""

from __future__ import annotations

import ast
import itertools
import random
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from tools.crash.plan import LEFT_FOR_RESOLVER, SQLITE_POINTS, WORKERS, deaths
from txmq.runtime.crashpoints import POINTS

ROOT = Path(__file__).resolve().parents[2]
ROWS_OF_THE_MATRIX = 43
TABLES: dict[str, dict[str, dict[str, object]]] = tomllib.loads(
    (Path(__file__).parent / "points.toml").read_text("utf-8")
)
ROWS, BESIDE, HOMES = TABLES["row"], TABLES["beside"], TABLES["homes"]


def _used() -> Counter[str]:
    calls = [
        node
        for file in (ROOT / "txmq").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "crash_point"
    ]
    return Counter(ast.literal_eval(call.args[0]) for call in calls)


def test_declared_and_used_crash_points_are_equal() -> None:
    assert sorted(_used()) == sorted(POINTS)


def test_the_matrix_is_mapped_row_by_row() -> None:
    assert sorted(ROWS, key=int) == [str(number) for number in range(ROWS_OF_THE_MATRIX)]


@pytest.mark.parametrize("row", [*ROWS.values(), *HOMES.values()], ids=[*ROWS, *HOMES])
def test_a_row_has_points_or_a_reason(row: dict[str, object]) -> None:
    if "points" in row:
        assert row.keys() - {"short"} == {"points", "how"}
        assert set(row["points"]) <= POINTS.keys()  # type: ignore[call-overload]
    else:
        assert row.keys() in ({"later"}, {"not_applicable"})


def test_every_crash_point_stands_for_a_row_or_beside_them() -> None:
    rows = (*ROWS.values(), *BESIDE.values(), *HOMES.values())
    mapped = {point for row in rows for point in row.get("points", ())}  # type: ignore[attr-defined]
    assert mapped == POINTS.keys()


def test_a_plan_waits_for_no_point_of_other_tests() -> None:
    """A campaign reached broker.database.fenced after twenty deaths, and waited for it for ever."""
    assert set(SQLITE_POINTS) & {point for row in BESIDE.values() for point in row["points"]} == set()  # type: ignore[attr-defined]


def test_a_plan_goes_through_every_point_and_kills_everybody() -> None:
    plan = list(itertools.islice(deaths(random.Random(7)), 2 * len(SQLITE_POINTS)))
    assert {death.point for death in plan} == {*SQLITE_POINTS, None}
    assert {worker for death in plan for worker in death.workers} == set(range(WORKERS))
    assert any(death.broker and death.workers for death in plan)
    assert LEFT_FOR_RESOLVER.keys() == {point for point in SQLITE_POINTS if point.startswith("resolver.")}


def test_deaths_repeat_with_their_seed() -> None:
    first, again = (list(itertools.islice(deaths(random.Random(3)), 20)) for _ in range(2))
    assert first == again
