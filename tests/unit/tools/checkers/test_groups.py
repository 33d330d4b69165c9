"""The group checker must say no, and say which: a valid history passes, each mutation of it is named, and only it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from tools.checkers.groups import (
    GroupHistory,
    GroupRules,
    Handled,
    Lag,
    Outage,
    Owned,
    Save,
    View,
    check_group,
    parse_group_history,
)
from tools.checkers.history import Verdict

SECOND = 1_000_000_000
RULES = GroupRules(exactly_once=True, stopped_s_max=3.0)
FIRST, SECOND_SLOT = ("t", 0), ("t", 1)


def _lines() -> list[dict[str, Any]]:
    """Two members, three messages in each of two partitions; the first one moves, and its old owner is refused."""
    ids = count()

    def event(t: float, p: str, f: str, ty: str, v: list[Any], id: str = "", **more: Any) -> dict[str, Any]:
        return {"t": int(t * SECOND), "p": p, "f": f, "ty": ty, "id": id or f"{f}-{next(ids)}", "v": v} | more

    def sent(t: float, partition: int, offset: int) -> dict[str, Any]:
        return event(t, "w", "send", "ok", [["send", "t", "", f"{partition}-{offset}", partition, offset]])

    return [
        event(0, "a", "view", "ok", [["t", 0, 1, None], ["t", 1, 1, None]]),
        *(sent(0.1 + offset, partition, offset) for offset in range(3) for partition in range(2)),
        event(0.5, "a", "handle", "ok", [["t", 0, 1, 0]]),
        event(0.6, "a", "handle", "ok", [["t", 1, 1, 0]]),
        event(0.7, "a", "save", "invoke", [["t", 0, 1, 1], ["t", 1, 1, 1]], "s1"),
        event(0.8, "a", "save", "ok", [], "s1"),
        event(1.0, "driver", "nemesis", "invoke", [], "n1", who="b"),
        event(1.1, "driver", "nemesis", "ok", [], "n1"),
        event(1.5, "b", "view", "ok", [["t", 0, 2, 1]]),
        event(1.6, "a", "save", "invoke", [["t", 0, 1, 1], ["t", 1, 1, 1]], "s2"),
        event(1.7, "a", "save", "ok", [["t", 0]], "s2"),
        event(1.8, "b", "handle", "ok", [["t", 0, 2, 1]]),
        event(1.9, "a", "handle", "ok", [["t", 1, 1, 1]]),
        event(2.5, "b", "handle", "ok", [["t", 0, 2, 2]]),
        event(2.6, "a", "handle", "ok", [["t", 1, 1, 2]]),
        event(2.7, "a", "save", "invoke", [["t", 1, 1, 3]], "s3"),
        event(2.8, "a", "save", "ok", [], "s3"),
        event(2.9, "b", "save", "invoke", [["t", 0, 2, 3]], "s4"),
        event(3.0, "b", "save", "ok", [], "s4"),
        event(3.1, "driver", "owned", "ok", [0.4, 3.0]),
        event(3.2, "driver", "lag", "ok", [["t", 0, 0, 3, 3], ["t", 1, 0, 3, 3]]),
    ]


def _history() -> GroupHistory:
    return parse_group_history(sorted(_lines(), key=lambda event: int(event["t"])))


def _names(verdict: Verdict) -> set[str]:
    return {f"{finding.rule} {finding.name}" for finding in verdict.findings}


def test_a_history_that_keeps_the_promises_is_valid() -> None:
    verdict = check_group(_history(), GroupRules(exactly_once=True, stays=1, refused=1))
    assert (verdict.result, verdict.findings, verdict.missing) == ("valid", (), ())
    counts = {"handled": 6, "saved": 5, "refused": 1, "tenures": 3, "stays": 1, "waited_ms_max": 800}
    assert verdict.counts == counts


def _saved_before_it_was_handled(history: GroupHistory) -> None:
    history.saves[1].offset = history.saves[3].offset = 2


def _unanswered_save_too_far(history: GroupHistory) -> None:
    history.saves.append(Save("a", SECOND_SLOT, 1, 2, int(0.9 * SECOND)))


def _handled_too_late(history: GroupHistory) -> None:
    last = history.handled[-1]
    history.handled[-1] = last._replace(handled_ns=int(2.75 * SECOND))


def _never_handled(history: GroupHistory) -> None:
    history.handled.pop()
    history.saves[-2].offset = 2
    history.lag = [history.lag[0], Lag(SECOND_SLOT, 0, 3, 3)]  # type: ignore[index]


def _handled_twice(history: GroupHistory) -> None:
    history.handled.append(Handled(int(2.65 * SECOND), "a", SECOND_SLOT, 1, 2))


def _handled_again_by_the_next_owner(history: GroupHistory) -> None:
    history.handled.append(Handled(int(1.7 * SECOND), "b", FIRST, 2, 0))


def _saved_offset_falls(history: GroupHistory) -> None:
    history.saves.append(Save("a", SECOND_SLOT, 1, 2, 3 * SECOND, "ok", 3 * SECOND))


def _saved_offset_falls_with_the_generation(history: GroupHistory) -> None:
    history.saves.append(Save("b", FIRST, 2, 0, int(1.6 * SECOND), "ok", int(1.7 * SECOND)))


def _new_owner_told_of_an_older_offset(history: GroupHistory) -> None:
    history.views[-1] = history.views[-1]._replace(offset=0)


def _new_owner_told_of_nothing(history: GroupHistory) -> None:
    history.views[-1] = history.views[-1]._replace(offset=None)


def _fenced_save_accepted(history: GroupHistory) -> None:
    history.saves[2].status = "ok"


def _fenced_by_a_save(history: GroupHistory) -> None:
    history.views.pop()
    history.saves.append(Save("a", FIRST, 1, 3, int(3.1 * SECOND), "ok", int(3.2 * SECOND)))


def _two_views_of_one_generation(history: GroupHistory) -> None:
    history.views.append(View(int(1.5 * SECOND), "b", SECOND_SLOT, 1, 1))


def _two_members_handle_under_one_generation(history: GroupHistory) -> None:
    history.handled[-1] = history.handled[-1]._replace(member="b")


def _owned_late(history: GroupHistory) -> None:
    history.owned[0] = Owned("n1", 3.1, 3.0)


def _lag_left(history: GroupHistory) -> None:
    history.lag = [Lag(FIRST, 0, 2, 3), history.lag[1]]  # type: ignore[index]


def _nothing_saved_at_the_end(history: GroupHistory) -> None:
    history.lag = [Lag(FIRST, 0, None, 3), history.lag[1]]  # type: ignore[index]


def _later(history: GroupHistory, seconds: float) -> None:
    """Everything after the fault comes later, acknowledgements of sends excepted."""

    def moved(time: int) -> int:
        return time + int(seconds * SECOND) if time > 1.2 * SECOND else time

    history.handled = [one._replace(handled_ns=moved(one.handled_ns)) for one in history.handled]
    history.views = [view._replace(learned_ns=moved(view.learned_ns)) for view in history.views]
    for save in history.saves:
        save.invoked_ns, save.completed_ns = moved(save.invoked_ns), moved(save.completed_ns or 0)


def _partition_that_stays_is_stopped(history: GroupHistory) -> None:
    _later(history, 3.0)


Mutation = Callable[[GroupHistory], None]
MUTATIONS: list[tuple[Mutation, str]] = [
    (_saved_before_it_was_handled, "G1 unhandled"),
    (_unanswered_save_too_far, "G1 unhandled"),
    (_handled_too_late, "G1 unhandled"),
    (_never_handled, "G1 unhandled"),
    (_handled_twice, "G1 handled-again"),
    (_handled_again_by_the_next_owner, "G1 handled-again"),
    (_saved_offset_falls, "G2 offset-fell"),
    (_saved_offset_falls_with_the_generation, "G2 offset-fell"),
    (_new_owner_told_of_an_older_offset, "G2 offset-fell"),
    (_new_owner_told_of_nothing, "G2 offset-fell"),
    (_fenced_save_accepted, "G3 fenced-save"),
    (_fenced_by_a_save, "G3 fenced-save"),
    (_two_views_of_one_generation, "G4 two-owners"),
    (_two_members_handle_under_one_generation, "G4 two-owners"),
    (_owned_late, "G5 unowned"),
    (_lag_left, "G5 lag-left"),
    (_nothing_saved_at_the_end, "G5 lag-left"),
    (_partition_that_stays_is_stopped, "G6 stopped"),
]


@pytest.mark.parametrize(("mutate", "name"), MUTATIONS, ids=lambda value: getattr(value, "__name__", ""))
def test_each_mutation_is_named_and_only_it(mutate: Mutation, name: str) -> None:
    history = _history()
    mutate(history)
    verdict = check_group(history, RULES)
    assert (verdict.result, _names(verdict)) == ("invalid", {name}), verdict.findings


@pytest.mark.parametrize("who", ["a", None])
def test_a_partition_waits_while_its_owner_or_everybody_cannot_work(who: str | None) -> None:
    history = _history()
    _later(history, 3.0)
    history.outages.append(Outage(int(1.3 * SECOND), who, int(4.0 * SECOND)))
    assert check_group(history, RULES).result == "valid"


@pytest.mark.parametrize(("who", "begun", "ended"), [("b", 1.3, 4.0), ("a", 0.0, 0.2), (None, 6.0, 7.0)])
def test_what_befell_others_or_was_over_excuses_nothing(who: str | None, begun: float, ended: float) -> None:
    history = _history()
    _later(history, 3.0)
    history.outages.append(Outage(int(begun * SECOND), who, int(ended * SECOND)))
    assert _names(check_group(history, RULES)) == {"G6 stopped"}


def test_a_partition_without_messages_does_not_count_as_stopped() -> None:
    history = _history()
    _later(history, 3.0)
    late = {place: time + 3 * SECOND for place, time in history.acknowledged_ns.items() if place[1] > 0}
    history.acknowledged_ns |= late
    assert check_group(history, RULES).result == "valid"


def test_at_least_once_allows_what_exactly_once_does_not() -> None:
    history = _history()
    _handled_twice(history)
    assert check_group(history, GroupRules()).result == "valid"


def test_a_refused_save_may_have_asked_for_anything() -> None:
    history = _history()
    history.saves[2].offset = 99
    assert check_group(history, RULES).result == "valid"


def test_run_that_did_not_end_or_fence_proves_nothing() -> None:
    assert check_group(_history(), GroupRules(refused=2)).missing == ("2 counted 'refused', not 1",)
    assert check_group(_history(), GroupRules(stays=2)).result == "unknown"
    history = _history()
    history.lag = None
    verdict = check_group(history)
    assert (verdict.result, verdict.missing) == ("unknown", ("the final read 'lag'",))
