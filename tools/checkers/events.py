"""The operations of a test run and their results, as JSON lines: the input of ``tools.checkers.history``.

Theory of operation. Every process of a run writes one line before an operation (``invoke``) and one after it (``ok``,
``fail`` or ``info``); ``merge`` puts the files of all processes into the order of their clocks, ``parse_history`` folds
the lines into a ``History``. An operation without a second line is one whose process died: as good as ``info``.

A line is an object with these members (Jepsen's words, as far as they fit):

    t    time in ns of one monotonic clock for all processes        p    process
    ty   invoke | ok | fail | info                                  f    what, below
    id   the operation; invoke and completion share it              v    micro-operations
    txid the transaction's id if it is known                        err  the error's text
    pend true: told that the decision is durable, while readers may see the messages later (``tx.pending``)

    f          ty       v
    send txn   invoke   ["send", topic, key, value] and ["row", resource, rowid], in program order
    half       invoke   the same: a half message and the row that its checker looks for
               ok       the same, sends followed by partition and offset if they are known
    poll       ok       ["poll", topic, partition, [[offset, value]...]]
    unit       ok       [[value...], wanted]: a reader saw these messages of operation ``id``, and of so many that it
                        should see together no others
    dbread     invoke   none                          ok: ["read", resource, rowid, present]
    outcome    ok       ["committed" | "rolled-back" | "unknown"]; ``id`` is the operation asked about
    fence      ok       none: the rollback of operation ``id`` was acknowledged to another client than its owner
    check      ok       ["commit" | "rollback" | "unknown"]: a checker's answer for the half message ``id``
    inject     ok       [what]: the test made a resource decide alone about the transaction ``txid``
    settled    ok       [seconds, bound]: how long it took until nothing was in doubt, while every process was up
    bank       ok       [total, expected] of all accounts and amounts under way
    nemesis    invoke   a fault begins                ok: its effects have ended
    drain      ok       ["drain", topic, partition, start, [[offset, value, key]...]]: everything that can be read
    rows       ok       ["rows", resource, [[rowid, key]...]] in the order of their commits
    in-doubt   ok       [txid...]
    heuristics ok       [[txid, what]...]: what is recorded of lone decisions
    decisions  ok       [[txid, "committed" | "rolled-back"]...]: all that the journals of all incarnations hold

Rules of the writer:

* a value is used once in the whole run, a rowid too; a process has one operation in flight;
* ``fail`` only if the library promises that nothing happened; a timeout or a lost connection is ``info``, and the
  process that got it goes on under another name, because its operation may still take effect;
* ``drain``, ``rows`` and ``in-doubt`` are written after healing, with the writers at rest; the last ones count.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Log = tuple[str, int]  # topic, partition


class Send(NamedTuple):
    """One message of an operation; place and offset if the writer knows them."""

    topic: str
    key: str
    value: str
    partition: int | None = None
    offset: int | None = None


class Row(NamedTuple):
    """One row of an operation."""

    resource: str
    rowid: str


@dataclass(slots=True)
class Operation:
    """One attempt: a plain send or a transaction."""

    id: str
    process: str
    kind: str  # send | txn | half
    invoked_ns: int
    sends: list[Send]
    rows: list[Row]
    status: str = "info"
    completed_ns: int | None = None
    is_pending: bool = False
    txid: str | None = None
    error: str | None = None


class Poll(NamedTuple):
    """The messages that one read of a partition returned."""

    process: str
    log: Log
    completed_ns: int
    messages: list[tuple[int, str]]


class TornUnit(NamedTuple):
    """What a reader saw of messages that it should see together."""

    operation: str
    values: list[str]
    wanted: int


class RowRead(NamedTuple):
    """Whether a row could be read, by a fresh session that was opened at ``invoked_ns`` or later."""

    invoked_ns: int
    row: Row
    is_present: bool


class ReportedOutcome(NamedTuple):
    """An answer to the question what became of an operation."""

    operation: str
    outcome: str


@dataclass(slots=True)
class Fault:
    """A fault and the time until its effects ended."""

    name: str
    begun_ns: int
    ended_ns: int | None = None


class Resolution(NamedTuple):
    """The time until nothing was in doubt, while every process was up, and the time allowed."""

    name: str
    seconds: float
    bound: float


class Balance(NamedTuple):
    """The sum of all accounts and of the messages under way."""

    completed_ns: int
    total: int
    expected: int


class Drained(NamedTuple):
    """A partition at the end: its first offset, and all messages as offset, value, key."""

    start: int
    messages: list[tuple[int, str, str]]


@dataclass(slots=True)
class History:
    """A whole run. ``drain``, ``rows`` and ``in_doubt`` are None if the run did not get that far."""

    operations: dict[str, Operation] = field(default_factory=dict)
    polls: list[Poll] = field(default_factory=list)
    reads: list[RowRead] = field(default_factory=list)
    outcomes: list[ReportedOutcome] = field(default_factory=list)
    faults: dict[str, Fault] = field(default_factory=dict)
    drain: dict[Log, Drained] | None = None
    rows: dict[str, list[tuple[str, str]]] | None = None
    in_doubt: list[str] | None = None
    fenced: list[str] = field(default_factory=list)
    torn: list[TornUnit] = field(default_factory=list)
    checked: dict[str, list[str]] = field(default_factory=dict)
    injected: dict[str, str] = field(default_factory=dict)
    resolutions: list[Resolution] = field(default_factory=list)
    balances: list[Balance] = field(default_factory=list)
    heuristics: dict[str, str] = field(default_factory=dict)
    decisions: list[tuple[str, str]] = field(default_factory=list)


def merge(files: Iterable[Iterable[str]]) -> Iterator[dict[str, Any]]:
    """The lines of several writers in the order of their clock; a torn last line of a killed writer is left out."""
    return heapq.merge(*(_whole_lines(lines) for lines in files), key=lambda event: int(event["t"]))


def _whole_lines(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    return (json.loads(line) for line in lines if line.endswith("\n"))


def parse_history(events: Iterable[dict[str, Any]]) -> History:
    """Fold events, in the order of their times, into a history.

    Raises:
        ValueError: a line breaks the rules of the module's description; the test is wrong, not what it tests.
    """
    history = History()
    read_started: dict[str, int] = {}
    for event in events:
        what, kind = event["f"], event["ty"]
        if what in ("send", "txn", "half"):
            (_invoked if kind == "invoke" else _completed)(history, event)
        elif what == "dbread" and kind == "invoke":
            read_started[event["id"]] = event["t"]
        elif what == "dbread":
            history.reads += [RowRead(read_started[event["id"]], Row(part[1], part[2]), part[3]) for part in event["v"]]
        elif what in _SEEN:
            _SEEN[what](history, event)
        else:
            raise ValueError(f"unknown operation {what!r}")
    return history


def _invoked(history: History, event: dict[str, Any]) -> None:
    if event["id"] in history.operations:
        raise ValueError(f"operation {event['id']} is invoked twice")
    sends = [Send(*part[1:]) for part in event["v"] if part[0] == "send"]
    rows = [Row(*part[1:]) for part in event["v"] if part[0] == "row"]
    history.operations[event["id"]] = Operation(
        event["id"], event["p"], event["f"], event["t"], sends, rows, txid=event.get("txid")
    )


def _completed(history: History, event: dict[str, Any]) -> None:
    operation = history.operations[event["id"]]
    if operation.completed_ns is not None:
        raise ValueError(f"operation {operation.id} is completed twice")
    operation.status, operation.completed_ns = event["ty"], event["t"]
    operation.txid = event.get("txid") or operation.txid
    operation.error = event.get("err")
    operation.is_pending = bool(event.get("pend"))
    if event["ty"] == "ok":
        sends = [Send(*part[1:]) for part in event["v"] if part[0] == "send"]
        if [send[:3] for send in sends] != [send[:3] for send in operation.sends]:
            raise ValueError(f"operation {operation.id} completed with other messages than it was invoked with")
        operation.sends = sends


def _polled(history: History, event: dict[str, Any]) -> None:
    for _, topic, partition, messages in event["v"]:
        found = [(offset, value) for offset, value in messages]
        history.polls.append(Poll(event["p"], (topic, partition), event["t"], found))


def _outcome(history: History, event: dict[str, Any]) -> None:
    history.outcomes.append(ReportedOutcome(event["id"], event["v"][0]))


def _fault(history: History, event: dict[str, Any]) -> None:
    if event["ty"] == "invoke":
        history.faults[event["id"]] = Fault(event["id"], event["t"])
    else:
        history.faults[event["id"]].ended_ns = event["t"]


def _drained(history: History, event: dict[str, Any]) -> None:
    history.drain = {
        (topic, partition): Drained(start, [(offset, value, key) for offset, value, key in messages])
        for _, topic, partition, start, messages in event["v"]
    }


def _rows(history: History, event: dict[str, Any]) -> None:
    history.rows = {resource: [(rowid, key) for rowid, key in rows] for _, resource, rows in event["v"]}


def _in_doubt(history: History, event: dict[str, Any]) -> None:
    history.in_doubt = list(event["v"])


def _fenced(history: History, event: dict[str, Any]) -> None:
    history.fenced.append(event["id"])


def _torn(history: History, event: dict[str, Any]) -> None:
    history.torn.append(TornUnit(event["id"], *event["v"]))


def _checked(history: History, event: dict[str, Any]) -> None:
    history.checked.setdefault(event["id"], []).append(event["v"][0])


def _injected(history: History, event: dict[str, Any]) -> None:
    history.injected[event["txid"]] = event["v"][0]


def _resolved(history: History, event: dict[str, Any]) -> None:
    history.resolutions.append(Resolution(event["id"], *event["v"]))


def _bank(history: History, event: dict[str, Any]) -> None:
    history.balances.append(Balance(event["t"], *event["v"]))


def _heuristics(history: History, event: dict[str, Any]) -> None:
    history.heuristics = dict(event["v"])


def _decisions(history: History, event: dict[str, Any]) -> None:
    history.decisions = [(txid, decision) for txid, decision in event["v"]]


_SEEN: dict[str, Callable[[History, dict[str, Any]], None]] = {
    "poll": _polled, "outcome": _outcome, "nemesis": _fault, "drain": _drained, "rows": _rows, "in-doubt": _in_doubt,
    "fence": _fenced, "check": _checked, "inject": _injected, "settled": _resolved, "bank": _bank,
    "heuristics": _heuristics, "decisions": _decisions, "unit": _torn,
}  # fmt: skip
