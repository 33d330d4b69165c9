"""The checker must say no, and say which: valid histories pass, and each mutation of one is named, and only it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tools.checkers.events import (
    Drained,
    Fault,
    History,
    Log,
    Operation,
    Poll,
    ReportedOutcome,
    Row,
    RowRead,
    Send,
    TornUnit,
    merge,
    parse_history,
)
from tools.checkers.history import Coverage, Verdict, check

DB = "orders-db"
ORDERS, OTHER, AUDIT = ("orders", 0), ("orders", 1), ("audit", 0)


def _lines() -> list[dict[str, Any]]:
    """Two writers, a reader and a fault: every kind of operation with every status."""

    def event(t: int, p: str, f: str, ty: str, id: str, v: list[Any], **more: Any) -> dict[str, Any]:
        return {"t": t, "p": p, "f": f, "ty": ty, "id": id, "v": v} | more

    first = [["row", DB, "r1"], ["send", "orders", "ada", "a-1"]]
    both = [["send", "orders", "ben", "b-1"], ["send", "orders", "ben", "b-2"], ["send", "audit", "", "b-3"]]
    second = [["row", DB, "r2"], ["send", "orders", "ada", "a-2"]]
    return [
        event(10, "a", "txn", "invoke", "t1", first),
        event(20, "a", "txn", "ok", "t1", [first[0], [*first[1], 0, 0]], txid="x1"),
        event(30, "b", "txn", "invoke", "t2", both),
        event(40, "b", "txn", "ok", "t2", [[*both[0], 1, 0], [*both[1], 1, 1], [*both[2], 0, 0]], txid="x2"),
        event(50, "a", "send", "invoke", "s1", [["send", "audit", "", "a-3"]]),
        event(60, "a", "send", "ok", "s1", [["send", "audit", "", "a-3", 0, 1]]),
        event(61, "a", "send", "invoke", "s2", [["send", "audit", "", "a-4"]]),
        event(62, "a", "send", "ok", "s2", [["send", "audit", "", "a-4", 0, 2]]),
        event(70, "a", "txn", "invoke", "t3", second),  # overlaps t4, which has the same key
        event(71, "b", "txn", "invoke", "t4", [["row", DB, "r4"], ["send", "orders", "ada", "b-4"]]),
        event(72, "b", "txn", "ok", "t4", [["row", DB, "r4"], ["send", "orders", "ada", "b-4", None, None]], pend=True),
        event(80, "a", "txn", "ok", "t3", [second[0], [*second[1], 0, 1]], txid="x3"),
        event(90, "b", "txn", "invoke", "t5", [["row", DB, "r5"], ["send", "orders", "eva", "b-5"]]),
        event(95, "b", "txn", "fail", "t5", [], err="RolledBackError"),
        event(100, "chaos", "nemesis", "invoke", "n1", []),
        event(110, "a", "txn", "invoke", "t6", [["row", DB, "r6"], ["send", "orders", "ada", "a-6"]]),
        event(115, "b", "txn", "invoke", "t7", [["row", DB, "r7"], ["send", "orders", "ada", "b-7"]]),
        event(116, "a.1", "txn", "invoke", "t8", [["send", "orders", "ben", "a-8"], ["send", "orders", "ben", "a-9"]]),
        event(120, "a", "txn", "info", "t6", [], err="OutcomeUnknownError", txid="x6"),
        event(121, "d", "half", "invoke", "h1", [["row", DB, "r8"], ["send", "halves", "", "d-1"]], txid="x8"),
        event(122, "d.1", "half", "invoke", "h2", [["row", DB, "r9"], ["send", "halves", "", "d-2"]], txid="x9"),
        event(123, "e", "check", "ok", "h1", ["unknown"]),
        event(124, "e", "check", "ok", "h1", ["rollback"]),
        event(124, "e", "check", "ok", "h2", ["commit"]),
        event(125, "chaos", "nemesis", "ok", "n1", []),
        event(126, "chaos", "settled", "ok", "n1", [1.5, 5.0]),
        event(127, "chaos", "fence", "ok", "h1", []),
        event(128, "chaos", "inject", "ok", "i1", ["heuristic-rollback"], txid="x7"),
        event(129, "r", "bank", "ok", "bank1", [1000, 1000]),
        event(130, "b", "outcome", "ok", "t7", ["rolled-back"]),
        event(131, "a", "outcome", "ok", "t6", ["committed"]),
        event(140, "r", "poll", "ok", "p1", [["poll", "orders", 0, [[0, "a-1"], [1, "a-2"]]]]),
        event(141, "r", "dbread", "invoke", "d1", []),
        event(142, "r", "dbread", "ok", "d1", [["read", DB, "r1", True], ["read", DB, "r2", True]]),
        event(150, "r", "poll", "ok", "p2", [["poll", "orders", 0, [[2, "b-4"], [3, "a-6"]]]]),
        event(200, "chaos", "drain", "ok", "end", [
            ["drain", "orders", 0, 0, [[0, "a-1", "ada"], [1, "a-2", "ada"], [2, "b-4", "ada"], [3, "a-6", "ada"]]],
            ["drain", "orders", 1, 0, [[0, "b-1", "ben"], [1, "b-2", "ben"]]],
            ["drain", "audit", 0, 0, [[0, "b-3", ""], [1, "a-3", ""], [2, "a-4", ""]]],
            ["drain", "halves", 0, 0, [[0, "d-2", ""]]],
        ]),
        event(201, "chaos", "rows", "ok", "rows",
              [["rows", DB, [["r1", "ada"], ["r2", "ada"], ["r4", "ada"], ["r6", "ada"], ["r9", ""]]]]),
        event(202, "chaos", "in-doubt", "ok", "doubt", []),
        event(203, "chaos", "heuristics", "ok", "heuristics", [["x7", "heuristic-rollback"]]),
        event(204, "chaos", "decisions", "ok", "decisions", [["x1", "committed"], ["x7", "rolled-back"]]),
    ]  # fmt: skip


def _history() -> History:
    return parse_history(_lines())


def _names(verdict: Verdict) -> set[str]:
    return {f"{finding.rule} {finding.name}" for finding in verdict.findings}


def test_a_history_that_keeps_the_promises_is_valid() -> None:
    verdict = check(_history(), Coverage(ok=5, info=2, faults=1))
    assert (verdict.result, verdict.findings, verdict.missing) == ("valid", (), ())
    assert verdict.counts == {
        "ok": 6, "fail": 1, "info": 5, "faults": 1, "polled": 4, "row_reads": 2, "messages": 10, "rows": 5,
    }  # fmt: skip


def _messages(history: History, log: Log) -> list[tuple[int, str, str]]:
    assert history.drain is not None
    return history.drain[log].messages


def _rows(history: History) -> list[tuple[str, str]]:
    assert history.rows is not None
    return history.rows[DB]


def _place(history: History, operation: str, *places: tuple[int | None, int | None]) -> None:
    """Correct what the writer of an operation was told, so that only the order is wrong."""
    found = history.operations[operation]
    found.sends = [Send(*send[:3], *place) for send, place in zip(found.sends, places, strict=True)]


def _renumber(history: History, log: Log, order: list[int]) -> None:
    messages = _messages(history, log)
    messages[:] = [(offset, *messages[source][1:]) for offset, source in enumerate(order)]


def _answer_with_a_wrong_offset(history: History) -> None:
    _place(history, "s1", (0, 2))


def _poll_of_another_value(history: History) -> None:
    history.polls[1] = history.polls[1]._replace(messages=[(2, "a-6"), (3, "a-6")])


def _poll_of_a_failed_message(history: History) -> None:
    history.polls.append(Poll("r2", OTHER, 160, [(2, "b-5")]))


def _failed_send_in_the_log(history: History) -> None:
    history.operations["s2"].status = "fail"
    _place(history, "s2", (None, None))


def _last_send_lost(history: History) -> None:
    _messages(history, AUDIT).pop()


def _seen_and_gone(history: History) -> None:
    history.operations["t8"].sends.pop()
    history.polls.append(Poll("r2", OTHER, 160, [(2, "a-8")]))


def _phantom_message(history: History) -> None:
    _messages(history, AUDIT).append((3, "z-1", ""))


def _phantom_row(history: History) -> None:
    _rows(history).append(("r99", "zoe"))


def _send_twice(history: History) -> None:
    _messages(history, AUDIT).append((3, "a-4", ""))


def _missing_offset(history: History) -> None:
    messages = _messages(history, AUDIT)
    messages[-1] = (3, *messages[-1][1:])
    _place(history, "s2", (0, 3))


def _gap_inside_a_poll(history: History) -> None:
    history.polls.append(Poll("r2", ORDERS, 160, [(0, "a-1"), (2, "b-4")]))


def _step_back_inside_a_poll(history: History) -> None:
    history.polls.append(Poll("r2", ORDERS, 160, [(1, "a-2"), (0, "a-1")]))


def _gap_between_polls(history: History) -> None:
    history.polls.append(Poll("r2", ORDERS, 160, [(0, "a-1")]))
    history.polls.append(Poll("r2", ORDERS, 170, [(3, "a-6")]))


def _same_again_in_the_next_poll(history: History) -> None:
    history.polls.append(history.polls[-1]._replace(completed_ns=160))


def _sends_of_one_process_swapped(history: History) -> None:
    _renumber(history, AUDIT, [0, 2, 1])
    _place(history, "s1", (0, 2))
    _place(history, "s2", (0, 1))


def _later_send_of_another_in_front(history: History) -> None:
    _renumber(history, AUDIT, [1, 0, 2])
    _place(history, "s1", (0, 0))
    _place(history, "t2", (1, 0), (1, 1), (0, 1))


def _stranger_between_two_of_one_transaction(history: History) -> None:
    history.operations["t9"] = Operation("t9", "c", "send", 25, [Send("orders", "ben", "c-1", 1, 1)], [], "ok", 45)
    _messages(history, OTHER)[1:] = [(1, "c-1", "ben"), (2, "b-2", "ben")]
    _place(history, "t2", (1, 0), (1, 2), (0, 0))


def _acknowledged_row_gone(history: History) -> None:
    _rows(history).remove(("r2", "ada"))


def _acknowledged_message_gone(history: History) -> None:
    _messages(history, OTHER).pop()


def _failed_row_there(history: History) -> None:
    _rows(history).append(("r5", "eva"))


def _failed_message_there(history: History) -> None:
    _messages(history, OTHER).append((2, "b-5", "eva"))


def _unknown_row_without_message(history: History) -> None:
    history.outcomes.clear()
    _rows(history).append(("r7", "ada"))


def _unknown_message_without_row(history: History) -> None:
    _rows(history).remove(("r6", "ada"))


def _unknown_with_half_of_its_messages(history: History) -> None:
    _messages(history, OTHER).append((2, "a-8", "ben"))


def _unknown_with_half_of_its_rows(history: History) -> None:
    history.operations["t6"].rows.append(Row(DB, "r6b"))


def _unknown_with_one_of_two_databases(history: History) -> None:
    history.operations["t6"].rows.append(Row("stock-db", "r6b"))


def _in_doubt(history: History) -> None:
    history.in_doubt = ["x6"]


def _transaction_twice(history: History) -> None:
    _messages(history, ORDERS).append((4, "a-6", "ada"))


def _program_order_of_a_transaction(history: History) -> None:
    _renumber(history, OTHER, [1, 0])
    _place(history, "t2", (1, 1), (1, 0), (0, 0))


def _key_in_two_partitions(history: History) -> None:
    history.operations["s1"].sends = [Send("audit", "k", "a-3", 0, 1)]
    messages = _messages(history, AUDIT)
    messages[1] = (1, "a-3", "k")
    assert history.drain is not None
    history.drain["audit", 1] = Drained(0, [(0, "c-1", "k")])
    history.operations["t9"] = Operation("t9", "c", "send", 25, [Send("audit", "k", "c-1", 1, 0)], [], "ok", 45)


def _rows_in_another_order_than_messages(history: History) -> None:
    rows = _rows(history)
    rows[1], rows[2] = rows[2], rows[1]


def _row_not_there_when_its_message_was(history: History) -> None:
    history.reads.append(RowRead(160, Row(DB, "r6"), False))


def _told_committed(history: History) -> None:
    history.outcomes[0] = ReportedOutcome("t7", "committed")


def _told_rolled_back(history: History) -> None:
    history.outcomes[1] = ReportedOutcome("t6", "rolled-back")


def _unknown_in_fair_weather(history: History) -> None:
    history.faults["n1"] = Fault("n1", 1, 2)


def _late_resolution(history: History) -> None:
    history.resolutions[0] = history.resolutions[0]._replace(seconds=5.1)


def _effect_after_the_fence(history: History) -> None:
    history.fenced.append("t6")


def _heuristic_not_recorded(history: History) -> None:
    history.heuristics.clear()


def _heuristic_of_nobody(history: History) -> None:
    history.injected.clear()


def _money_gone(history: History) -> None:
    history.balances[0] = history.balances[0]._replace(total=990)


def _two_decisions(history: History) -> None:
    history.decisions.append(("x1", "rolled-back"))
    history.operations["t1"].txid = "x1 of another life"


def _rolled_back_and_visible(history: History) -> None:
    history.decisions.append(("x6", "rolled-back"))


def _half_dropped(history: History) -> None:
    history.checked["h1"].pop()


def _half_lost(history: History) -> None:
    _messages(history, ("halves", 0)).pop()


def _half_there_against_its_answer(history: History) -> None:
    history.checked["h2"] = ["rollback"]


def _unit_seen_in_part(history: History) -> None:
    history.torn.append(TornUnit("t1", ["t1.0"], 2))


Mutation = Callable[[History], None]
MUTATIONS: list[tuple[Mutation, str]] = [
    (_answer_with_a_wrong_offset, "L1 inconsistent-offset"),
    (_poll_of_another_value, "L1 inconsistent-offset"),
    (_poll_of_a_failed_message, "L2 aborted-read"),
    (_failed_send_in_the_log, "L2 aborted-read"),
    (_last_send_lost, "L5 lost-write"),
    (_seen_and_gone, "L5 lost-write"),
    (_phantom_message, "L6 unexpected"),
    (_phantom_row, "L6 unexpected"),
    (_send_twice, "L7 duplicate"),
    (_missing_offset, "L8 hole"),
    (_gap_inside_a_poll, "L9 int-poll"),
    (_step_back_inside_a_poll, "L9 int-poll"),
    (_gap_between_polls, "L10 poll"),
    (_same_again_in_the_next_poll, "L10 poll"),
    (_sends_of_one_process_swapped, "L11 nonmonotonic-send"),
    (_later_send_of_another_in_front, "L12 realtime-order"),
    (_stranger_between_two_of_one_transaction, "L13 torn-contiguity"),
    (_acknowledged_row_gone, "A1 ok-but-missing"),
    (_acknowledged_message_gone, "A1 ok-but-missing"),
    (_failed_row_there, "A2 fail-but-present"),
    (_failed_message_there, "A2 fail-but-present"),
    (_unknown_row_without_message, "A3 torn:db-only"),
    (_unknown_message_without_row, "A3 torn:msg-only"),
    (_unknown_with_half_of_its_messages, "A3 torn:partial-msg"),
    (_unknown_with_half_of_its_rows, "A3 torn:partial-rows"),
    (_unknown_with_one_of_two_databases, "A3 torn:cross-db"),
    (_in_doubt, "A4 in-doubt-left"),
    (_transaction_twice, "A5 exactly-once"),
    (_program_order_of_a_transaction, "A6 order"),
    (_key_in_two_partitions, "A6 order"),
    (_rows_in_another_order_than_messages, "A6 order"),
    (_row_not_there_when_its_message_was, "A7 visible-before-row"),
    (_told_committed, "A8 wrong-outcome-told"),
    (_told_rolled_back, "A8 wrong-outcome-told"),
    (_unknown_in_fair_weather, "A8 wrong-outcome-told"),
    (_late_resolution, "A9 resolution-time"),
    (_effect_after_the_fence, "A10 zombie"),
    (_heuristic_not_recorded, "A11 heuristic"),
    (_heuristic_of_nobody, "A11 heuristic"),
    (_money_gone, "A12 conservation"),
    (_two_decisions, "A13 decision-log"),
    (_rolled_back_and_visible, "A13 decision-log"),
    (_half_dropped, "A14 half"),
    (_half_lost, "A14 half"),
    (_half_there_against_its_answer, "A14 half"),
    (_unit_seen_in_part, "A15 unit"),
]


@pytest.mark.parametrize(("mutate", "name"), MUTATIONS, ids=[mutate.__name__.strip("_") for mutate, _ in MUTATIONS])
def test_each_mutation_is_named_and_only_it(mutate: Mutation, name: str) -> None:
    history = _history()
    mutate(history)
    verdict = check(history)
    assert (verdict.result, _names(verdict)) == ("invalid", {name}), verdict.findings


def test_what_was_not_promised_is_no_finding() -> None:
    history = _history()
    _stranger_between_two_of_one_transaction(history)
    assert check(history, unpromised=["L13"]).findings == ()


def test_a_unit_that_a_reader_saw_in_part_is_read() -> None:
    line = {"t": 999, "p": "r", "f": "unit", "ty": "ok", "id": "t1", "v": [["t1.0"], 2]}
    assert parse_history([line]).torn == [TornUnit("t1", ["t1.0"], 2)]


def test_what_retention_took_is_not_lost() -> None:
    history = _history()
    assert history.drain is not None
    history.drain[AUDIT] = Drained(2, history.drain[AUDIT].messages[2:])
    assert check(history).findings == ()


def test_a_pending_transaction_may_become_visible_late() -> None:
    history = _history()
    _renumber(history, ORDERS, [0, 1, 3, 2])  # t4, told as pending at 72, after t6, begun at 110
    rows = _rows(history)
    rows[2], rows[3] = rows[3], rows[2]
    history.polls.pop()
    assert check(history).findings == ()


@pytest.mark.parametrize("name", ["drain", "rows", "in-doubt"])
def test_a_run_without_its_final_reads_proves_nothing(name: str) -> None:
    verdict = check(parse_history(line for line in _lines() if line["f"] != name))
    assert (verdict.result, verdict.missing) == ("unknown", (f"the final read {name!r}",))


def test_a_run_without_the_asked_coverage_proves_nothing() -> None:
    verdict = check(_history(), Coverage(ok=6, info=6))
    assert verdict.result == "unknown"
    assert len(verdict.missing) == 1


def test_findings_go_before_missing_coverage() -> None:
    history = _history()
    _in_doubt(history)
    assert check(history, Coverage(ok=1000)).result == "invalid"


def test_files_of_several_writers_are_merged_without_torn_last_lines() -> None:
    events = _lines()
    ours = [json.dumps(event) + "\n" for event in events if event["p"] == "a"]
    others = [json.dumps(event) + "\n" for event in events if event["p"] != "a"]
    torn = [*ours, '{"t": 131, "p": "a", "f": "txn", "ty": "inv']
    assert list(merge([torn, others])) == events


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda events: events.insert(2, events[0]), "invoked twice"),
        (lambda events: events.insert(2, events[1]), "completed twice"),
        (lambda events: events[1].update(v=[]), "other messages"),
        (lambda events: events[0].update(f="sned"), "unknown operation"),
    ],
)
def test_a_history_that_contradicts_itself_is_refused(change: Callable[[list[Any]], None], message: str) -> None:
    events = _lines()
    change(events)
    with pytest.raises(ValueError, match=message):
        parse_history(events)


def _large(count: int) -> History:
    history = History(drain={}, rows={DB: []}, in_doubt=[])
    assert history.drain is not None
    assert history.rows is not None
    for partition in range(4):
        history.drain["orders", partition] = Drained(0, [])
    for number in range(count):
        partition, offset = number % 4, number // 4
        send = Send("orders", f"k{partition}", f"v{number}", partition, offset)
        row, begun = Row(DB, f"r{number}"), number * 10
        operation = Operation(f"t{number}", f"p{number % 8}", "txn", begun, [send], [row], "ok", begun + 25)
        history.operations[operation.id] = operation
        history.drain["orders", partition].messages.append((offset, send.value, send.key))
        history.rows[DB].append((row.rowid, send.key))
        history.polls.append(Poll("r", ("orders", partition), begun + 30, [(offset, send.value)]))
    return history


def test_work_grows_with_the_length_of_the_history() -> None:
    """Counted in function calls, not in seconds: ten times the history may cost little more than ten times the work."""
    work = {count: _calls(_large(count)) for count in (200, 2000)}
    assert work[2000] < 12 * work[200]


def _calls(history: History) -> int:
    import sys

    calls = 0

    def count(_frame: object, _event: str, _argument: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        verdict = check(history)
    finally:
        sys.setprofile(None)
    assert verdict.findings == ()
    return calls
