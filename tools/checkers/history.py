"""Whether a history keeps the promises: no dependency, no knowledge of txmq's code, n log n at most.

Theory of operation. ``check`` builds one index over a ``History`` (the writer of a value, where it is at the end, where
readers saw it), and asks every rule. A rule yields findings; each finding has the number and the name of its rule, so
that a broken promise is named, not only noticed. The rules of one defect are kept apart: what A1 says of an
acknowledged transaction, L5 says only of plain sends, and so on.

    L1  inconsistent-offset      one offset, two values: among answers, polls and the end
    L2  aborted-read             a reader saw what failed
    L5  lost-write               acknowledged or once visible, and not there at the end
    L6  unexpected               a value or row that no operation attempted
    L7  duplicate                a plain send at two places
    L8  hole                     offsets of a partition are not dense
    L9  int-poll                 a gap or a step back inside one poll
    L10 poll                     a gap or a step back between two polls of a process
    L11 nonmonotonic-send        ``order``: one process's operations out of order in a partition
    L12 realtime-order           written after another was acknowledged, and at a lower offset
    L13 torn-contiguity          another message between two of one transaction
    A1  ok-but-missing           a transaction acknowledged, and not all of it there
    A2  fail-but-present         a transaction refused, and some of it there
    A3  torn:...                 a transaction half there: db-only, msg-only, partial-msg, partial-rows, cross-db
    A4  in-doubt-left            something is in doubt after the time to settle
    A5  exactly-once             a transaction's message at two places
    A6  order                    one transaction's messages, or one key's messages against its rows, out of order
    A7  visible-before-row       a message was visible, its row was not yet
    A8  wrong-outcome-told       ``outcome`` contradicts what is there, or "unknown" was told without any fault
    A9 to A14                    ``decisions``: settled in time, zombies, heuristics, conservation, decisions,
                                 half messages
    A15 unit                     a reader saw a part of what it should see together

Numbers and names come from reference "History checker" (Jepsen's Kafka workload, extended to databases). L3 and L4,
L14 and above need reads inside transactions, replicas or groups.

The verdict is ``valid`` only if nothing was found, the final reads are complete and the asked coverage was reached;
a run that proves nothing is ``unknown``, never ``valid``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise
from math import inf

from tools.checkers.decisions import DECISION_RULES
from tools.checkers.events import History, Log, Operation, Row
from tools.checkers.index import Finding, Index, LogPosition, Rule, at
from tools.checkers.order import program_order, realtime_order

FINDINGS_PER_RULE_MAX = 20  # of one defect the first few tell the story


@dataclass(frozen=True, slots=True)
class Coverage:
    """The least that a run must contain to prove anything."""

    ok: int = 1
    info: int = 0
    faults: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """``result`` is valid, invalid or unknown; ``missing`` says why it is unknown."""

    result: str
    findings: tuple[Finding, ...]
    missing: tuple[str, ...]
    counts: dict[str, int]


def check(
    history: History, minimum: Coverage = Coverage(), *, is_cluster: bool = False, unpromised: Collection[str] = ()
) -> Verdict:
    """Ask every rule.

    Args:
        is_cluster: whether there were several brokers; see ``order``.
        unpromised: rules, as ``L13``, that do not hold for what was tested.

    Returns:
        The verdict; at most ``FINDINGS_PER_RULE_MAX`` findings of each rule.
    """
    counts = _count(history)
    missing = _missing(history, counts, minimum)
    if history.drain is None or history.rows is None or history.in_doubt is None:
        return Verdict("unknown", (), missing, counts)
    index = Index(history, is_cluster=is_cluster)
    findings: list[Finding] = []
    for rule in RULES:
        found = (finding for finding in rule(index) if finding.rule not in unpromised)
        findings += islice(found, FINDINGS_PER_RULE_MAX)
    result = "invalid" if findings else "unknown" if missing else "valid"
    return Verdict(result, tuple(findings), missing, counts)


def _count(history: History) -> dict[str, int]:
    counts = Counter(operation.status for operation in history.operations.values())
    return {
        "ok": counts["ok"],
        "fail": counts["fail"],
        "info": counts["info"],
        "faults": len(history.faults),
        "polled": sum(len(poll.messages) for poll in history.polls),
        "row_reads": len(history.reads),
        "messages": sum(len(drained.messages) for drained in (history.drain or {}).values()),
        "rows": sum(len(rows) for rows in (history.rows or {}).values()),
    }


def _missing(history: History, counts: dict[str, int], minimum: Coverage) -> tuple[str, ...]:
    reads = {"drain": history.drain, "rows": history.rows, "in-doubt": history.in_doubt}
    missing = [f"the final read {name!r}" for name, found in reads.items() if found is None]
    for name in ("ok", "info", "faults"):
        wanted = getattr(minimum, name)
        if counts[name] < wanted:
            missing.append(f"{wanted} operations or faults counted {name!r}, not {counts[name]}")
    return tuple(missing)


# --- the log -------------------------------------------------------------------------------------------------------


def _inconsistent_offsets(index: Index) -> Iterator[Finding]:
    held: dict[tuple[Log, int], str] = {}
    for log, offset, value in _known_offsets(index):
        other = held.setdefault((log, offset), value)
        if other != value:
            yield Finding("L1", "inconsistent-offset", f"{at(log, offset)} is {other!r} and {value!r}")


def _known_offsets(index: Index) -> Iterator[tuple[Log, int, str]]:
    for log, drained in index.drain.items():
        for offset, value, _key in drained.messages:
            yield log, offset, value
    for operation in index.operations:
        for send in operation.sends:
            if send.partition is not None and send.offset is not None:
                yield (send.topic, send.partition), send.offset, send.value
    for poll in index.history.polls:
        for offset, value in poll.messages:
            yield poll.log, offset, value


def _aborted_reads(index: Index) -> Iterator[Finding]:
    for operation in index.operations:
        if operation.status != "fail":
            continue
        for send in operation.sends:
            is_there = send.value in index.positions
            if (send.value in index.seen and not is_there) or (is_there and operation.kind == "send"):
                yield Finding("L2", "aborted-read", f"{send.value!r} of {operation.id} was read, and it had failed")


def _lost_writes(index: Index) -> Iterator[Finding]:
    for operation in index.operations:
        wanted = len(operation.sends)
        if operation.kind == "send" and operation.status == "ok" and index.messages_there(operation) < wanted:
            yield Finding("L5", "lost-write", f"{operation.id}: {operation.sends} was acknowledged and is not there")
        elif operation.status == "info":
            for send in operation.sends:
                seen = index.seen.get(send.value)
                if seen and send.value not in index.positions and not index.has_expired(seen[0]):
                    yield Finding("L5", "lost-write", f"{operation.id}: {send.value!r} was visible and is not there")


def _unexpected(index: Index) -> Iterator[Finding]:
    for value in (index.positions.keys() | index.seen.keys()) - index.owner.keys():
        yield Finding("L6", "unexpected", f"message {value!r} was never attempted")
    for row in index.rows - index.row_owner.keys():
        yield Finding("L6", "unexpected", f"row {row.rowid!r} of {row.resource} was never attempted")


def _duplicates(index: Index) -> Iterator[Finding]:
    for value, positions in index.positions.items():
        owner = index.owner.get(value)
        if len(positions) > 1 and owner is not None:
            rule, name = ("A5", "exactly-once") if owner.kind == "txn" else ("L7", "duplicate")
            yield Finding(
                rule, name, f"{value!r} of {owner.id} is at {', '.join(at(*position) for position in positions)}"
            )


def _holes(index: Index) -> Iterator[Finding]:
    for log, drained in index.drain.items():
        for expected, (offset, _value, _key) in enumerate(drained.messages, drained.start):
            if offset != expected:
                yield Finding("L8", "hole", f"{at(log, expected)} is missing, {offset} follows")
                break


def _polls_inside(index: Index) -> Iterator[Finding]:
    for poll in index.history.polls:
        for (before, _), (after, value) in pairwise(poll.messages):
            if after != before + 1:
                yield Finding(
                    "L9", "int-poll", f"{poll.process} read {value!r} at {at(poll.log, after)} after {before}"
                )


def _polls_between(index: Index) -> Iterator[Finding]:
    following: dict[tuple[str, Log], int] = {}
    for poll in index.history.polls:
        if not poll.messages:
            continue
        reader, first = (poll.process, poll.log), poll.messages[0][0]
        expected = following.get(reader, first)
        if first != expected and not (first > expected and index.has_expired(LogPosition(poll.log, expected))):
            yield Finding("L10", "poll", f"{poll.process} read {at(poll.log, first)}, due was {expected}")
        following[reader] = poll.messages[-1][0] + 1


def _contiguity(index: Index) -> Iterator[Finding]:
    for operation in index.operations:
        for log, offsets in index.offsets_of(operation).items():
            if max(offsets) - min(offsets) != len(offsets) - 1:
                yield Finding("L13", "torn-contiguity", f"{operation.id} in {log[0]}/{log[1]} at {offsets}")


# --- rows against messages -----------------------------------------------------------------------------------------


def _missing_and_torn(index: Index) -> Iterator[Finding]:
    for operation in index.operations:
        if operation.kind != "txn":
            continue
        messages, rows = index.messages_there(operation), index.rows_there(operation)
        text = (
            f"{operation.id} (txid {operation.txid}): {messages} of {len(operation.sends)} messages, "
            f"{rows} of {len(operation.rows)} rows"
        )
        is_whole = messages == len(operation.sends) and rows == len(operation.rows)
        if operation.status == "ok" and not is_whole:
            yield Finding("A1", "ok-but-missing", text)
        elif operation.status == "fail" and messages + rows:
            yield Finding("A2", "fail-but-present", text)
        elif operation.status == "info" and not is_whole and messages + rows:
            yield Finding("A3", f"torn:{_kind_of_tear(index, operation, messages)}", text)


def _kind_of_tear(index: Index, operation: Operation, messages: int) -> str:
    rows = index.rows_there(operation)
    if 0 < messages < len(operation.sends):
        return "partial-msg"
    if 0 < rows < len(operation.rows):
        resources = {row.resource for row in operation.rows}
        whole = [len({row in index.rows for row in operation.rows if row.resource == name}) == 1 for name in resources]
        return "cross-db" if len(resources) > 1 and all(whole) else "partial-rows"
    return "msg-only" if messages else "db-only"


def _in_doubt_left(index: Index) -> Iterator[Finding]:
    for txid in index.history.in_doubt or ():
        yield Finding("A4", "in-doubt-left", f"{txid} is in doubt")


def _order_inside(index: Index) -> Iterator[Finding]:
    for operation in index.operations:
        for log, offsets in index.offsets_of(operation).items():
            if offsets != sorted(offsets):
                yield Finding("A6", "order", f"{operation.id} in {log[0]}/{log[1]} is in the order {offsets}")


def _one_partition_per_key(index: Index) -> Iterator[Finding]:
    partition_of: dict[tuple[str, str], int] = {}
    for log, drained in index.drain.items():
        for offset, _value, key in drained.messages:
            if partition_of.setdefault((log[0], key), log[1]) != log[1]:
                yield Finding("A6", "order", f"key {key!r} is in {at(log, offset)} and in {partition_of[log[0], key]}")


def _order_of_rows(index: Index) -> Iterator[Finding]:
    """A key's messages come in the order in which the rows of that key were committed."""
    for resource, rows in (index.history.rows or {}).items():
        last: dict[tuple[str, str], tuple[LogPosition, str]] = {}
        for rowid, key in rows:
            operation = index.row_owner.get(Row(resource, rowid))
            for send in operation.sends if operation is not None else ():
                if send.key != key or send.value not in index.positions:
                    continue
                position = index.positions[send.value][0]
                before, other = last.get((send.topic, key), (position, rowid))
                if before.log == position.log and before.offset > position.offset:
                    text = f"row {other!r} before {rowid!r}, messages {at(*before)} and {at(*position)}"
                    yield Finding("A6", "order", text)
                last[send.topic, key] = (position, rowid)


def _visible_before_row(index: Index) -> Iterator[Finding]:
    for read in index.history.reads:
        operation = index.row_owner.get(read.row)
        if read.is_present or operation is None:
            continue
        for send in operation.sends:
            seen = index.seen.get(send.value)
            if seen is not None and seen[1] < read.invoked_ns:
                text = f"{send.value!r} was visible at {at(*seen[0])}, row {read.row.rowid!r} was not readable then"
                yield Finding("A7", "visible-before-row", text)
                break


def _torn_units(index: Index) -> Iterator[Finding]:
    for found in index.history.torn:
        text = f"of {found.operation} a reader saw {', '.join(found.values)}, and no others of {found.wanted}"
        yield Finding("A15", "unit", text)


def _wrong_outcomes(index: Index) -> Iterator[Finding]:
    for found in index.history.outcomes:
        operation = index.history.operations[found.operation]
        there = index.messages_there(operation) + index.rows_there(operation)
        wrong = (found.outcome == "committed" and not there) or (found.outcome == "rolled-back" and there)
        if wrong:
            yield Finding(
                "A8", "wrong-outcome-told", f"{operation.id} was told {found.outcome!r}, {there} parts are there"
            )


def _unknown_without_fault(index: Index) -> Iterator[Finding]:
    """ "Unknown" is allowed only if a fault overlapped the operation."""
    starts, ends = _running_ends(index.history)
    for operation in index.operations:
        if operation.status == "info" and operation.completed_ns is not None:
            begun_before = bisect_right(starts, operation.completed_ns)
            if not begun_before or ends[begun_before - 1] < operation.invoked_ns:
                text = f"{operation.id} was told 'unknown' while nothing was wrong: {operation.error}"
                yield Finding("A8", "wrong-outcome-told", text)


def _running_ends(history: History) -> tuple[list[int], list[float]]:
    """When faults began, in order, and for each the latest end of it and all before it."""
    faults = sorted(
        (fault.begun_ns, inf if fault.ended_ns is None else fault.ended_ns) for fault in history.faults.values()
    )
    ends = accumulate((ended for _, ended in faults), max)
    return [begun for begun, _ in faults], list(ends)


RULES: tuple[Rule, ...] = (
    _inconsistent_offsets, _aborted_reads, _lost_writes, _unexpected, _duplicates, _holes, _polls_inside,
    _polls_between, program_order, realtime_order, _contiguity, _missing_and_torn, _in_doubt_left, _order_inside,
    _one_partition_per_key, _order_of_rows, _visible_before_row, _wrong_outcomes, _unknown_without_fault,
    _torn_units, *DECISION_RULES,
)  # fmt: skip


def describe(findings: Iterable[Finding]) -> str:
    """One finding a line."""
    return "\n".join(map(str, findings))
