"""L11 and L12: in a cluster what was acknowledged without its place holds up its own key only."""

from __future__ import annotations

import pytest

from tools.checkers.events import Drained, History, Operation, Send
from tools.checkers.history import check

PLACED, UNPLACED = 1, None


def _found(
    early_offset: int | None,
    late_key: str,
    late_kind: str,
    late_process: str,
    *,
    is_cluster: bool = True,
    is_pending: bool = False,
) -> list[str]:
    """Of two operations in one partition: the later one comes before the one that was acknowledged earlier."""
    partition = None if early_offset is None else 0
    early = Operation(
        "t1", "a", "txn", 10, [Send("orders", "ada", "a-1", partition, early_offset)], [], "ok", 20, is_pending
    )
    late = Operation("t2", late_process, late_kind, 30, [Send("orders", late_key, "b-1", 0, 0)], [], "ok", 40)
    drain = {("orders", 0): Drained(0, [(0, "b-1", late_key), (1, "a-1", "ada")])}
    history = History({"t1": early, "t2": late}, drain=drain, rows={}, in_doubt=[])
    return [finding.rule for finding in check(history, is_cluster=is_cluster).findings]


@pytest.mark.parametrize(("process", "rule"), [("a", "L11"), ("b", "L12")])
@pytest.mark.parametrize("key", ["ada", "ben"])
@pytest.mark.parametrize("is_cluster", [False, True])
def test_acknowledged_with_its_offset_holds_up_every_key(
    process: str, rule: str, key: str, *, is_cluster: bool
) -> None:
    assert _found(PLACED, key, "send", process, is_cluster=is_cluster) == [rule]


@pytest.mark.parametrize("is_pending", [False, True])
@pytest.mark.parametrize("kind", ["txn", "half"])
@pytest.mark.parametrize(("process", "rule"), [("a", "L11"), ("b", "L12")])
def test_acknowledged_without_offset_holds_up_its_key(process: str, rule: str, kind: str, *, is_pending: bool) -> None:
    assert rule in _found(UNPLACED, "ada", kind, process, is_pending=is_pending)
    assert rule not in _found(UNPLACED, "ben", kind, process, is_pending=is_pending)


def test_plain_message_of_the_same_client_waits_too() -> None:
    assert _found(UNPLACED, "ada", "send", "a") == ["L11"]
    assert _found(UNPLACED, "ada", "send", "b") == []


@pytest.mark.parametrize(("process", "rule"), [("a", "L11"), ("b", "L12")])
def test_lone_broker_keeps_the_order_of_the_whole_partition(process: str, rule: str) -> None:
    assert _found(UNPLACED, "ben", "send", process, is_cluster=False) == [rule]


@pytest.mark.parametrize("process", ["a", "b"])
def test_lone_broker_may_place_late_what_was_told_as_pending(process: str) -> None:
    assert _found(UNPLACED, "ada", "txn", process, is_cluster=False, is_pending=True) == []
