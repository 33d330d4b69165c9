"""Rules A9 to A14 of ``checker``: the fate of decisions, and the outcomes that were reported.

A9  resolution-time     something stayed in doubt for longer than promised, while every process was up
A10 zombie              an effect of a transaction whose rollback had been promised to another client
A11 heuristic           a heuristic decision that was not recorded, or one recorded that no resource made
A12 conservation        accounts and amounts under way do not add up
A13 decision-log        two decisions about one transaction in the journals of all epochs; or one against what is there
A14 half                a half message against its checker's answers, or dropped undecided
"""

from __future__ import annotations

from collections.abc import Iterator

from tools.checkers.index import Finding, Index, Rule


def _late(index: Index) -> Iterator[Finding]:
    for found in index.history.resolutions:
        if found.seconds > found.bound:
            text = f"{found.name}: in doubt for {found.seconds:.2f} s, promised are {found.bound:.2f} s"
            yield Finding("A9", "resolution-time", text)


def _zombies(index: Index) -> Iterator[Finding]:
    for name in index.history.fenced:
        operation = index.history.operations[name]
        there = index.messages_there(operation) + index.rows_there(operation)
        if there:
            yield Finding("A10", "zombie", f"{name} was fenced, {there} of its parts are there")


def _heuristics(index: Index) -> Iterator[Finding]:
    injected, recorded = index.history.injected, index.history.heuristics
    for txid in injected.keys() - recorded.keys():
        yield Finding("A11", "heuristic", f"{txid}: {injected[txid]} is not recorded")
    for txid in recorded.keys() - injected.keys():
        yield Finding("A11", "heuristic", f"{txid}: {recorded[txid]} is recorded, and nobody decided alone")


def _conservation(index: Index) -> Iterator[Finding]:
    for balance in index.history.balances:
        if balance.total != balance.expected:
            text = f"{balance.total} at {balance.completed_ns} ns, expected {balance.expected}"
            yield Finding("A12", "conservation", text)


def _decisions(index: Index) -> Iterator[Finding]:
    decided: dict[str, str] = {}
    for txid, decision in index.history.decisions:
        other = decided.setdefault(txid, decision)
        if other != decision:
            yield Finding("A13", "decision-log", f"{txid} is {other} and {decision}")
    for operation in index.operations:
        decision = decided.get(operation.txid or "", "")
        if decision == "rolled-back" and index.messages_there(operation):
            yield Finding("A13", "decision-log", f"{operation.id} is rolled back in the journal and visible")


def _halves(index: Index) -> Iterator[Finding]:
    listed = set(index.history.in_doubt or ())
    for operation in index.operations:
        if operation.kind != "half":
            continue
        answers = set(index.history.checked.get(operation.id, ()))
        is_committed = operation.status == "ok" or "commit" in answers
        is_rolled_back = operation.status == "fail" or "rollback" in answers
        there = index.messages_there(operation)
        if is_committed and there < len(operation.sends):
            yield Finding("A14", "half", f"{operation.id} was committed, and {there} of its messages are there")
        elif is_rolled_back and not is_committed and there:
            yield Finding("A14", "half", f"{operation.id} was rolled back and is there")
        elif operation.txid and not (is_committed or is_rolled_back or there or operation.txid in listed):
            yield Finding("A14", "half", f"{operation.id} was dropped undecided")


DECISION_RULES: tuple[Rule, ...] = (_late, _zombies, _heuristics, _conservation, _decisions, _halves)
