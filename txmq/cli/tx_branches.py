"""Findings of resolvers, for people: prepared branches that the broker does not know, databases not reached.

Pure functions over the rows of ``client.transactions.resources`` (``resource list`` in docs/protocol.md).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from txmq.cli.tx_explain import NO_BRANCH, Row, age
from txmq.xid import branch_xid, xid_sql

STATE = "in-database"
WHERE_TO_LOOK = "look: XA RECOVER in that database; txmq tx show TXID; docs/how-to/in-doubt-at-3am.md"


def hanging(resources: Sequence[Row], listed: Collection[str], older_ms: int) -> list[dict[str, Any]]:
    """The oldest branches of each database as rows of a list, but for transactions that are listed anyway."""
    return [
        {
            "txid": branch["txid"], "state": STATE, "kind": row["kind"], "resource": row["resource"],
            "uuid": row["uuid"], "bqual": branch["bqual"], "age_ms": branch["age_ms"] + row["seen_ms_ago"],
            "why": branch["why"], "by": row["by"], "seen_ms_ago": row["seen_ms_ago"],
        }
        for row in resources
        for branch in row["oldest"]
        if branch["txid"] not in listed and branch["age_ms"] + row["seen_ms_ago"] >= older_ms
    ]  # fmt: skip


def lines(resources: Sequence[Row], hung: Sequence[Row], older_ms: int) -> Iterator[tuple[str, str]]:
    """The lines of ``tx list`` about them, each after its indent: a database, its branches, and the next step."""
    is_any = False
    for row in resources:
        if row["branches"] and row["age_ms"] >= older_ms:
            is_any = True
            yield (
                "",
                f"{row['resource']}: {_count(row['branches'])} prepared for up to {age(row['age_ms'])}, rows locked "
                f"({_seen(row)})",
            )
            of_one = [
                branch for branch in hung if (branch["resource"], branch["uuid"]) == (row["resource"], row["uuid"])
            ]
            for branch in of_one:
                yield "", branch["txid"]
                yield "    ", f"{STATE}, {branch['kind']}, {age(branch['age_ms'])}: {branch['why']}"
        if not row["reachable"] and row["unreachable_ms"] >= older_ms:
            is_any = True
            yield "", f"{row['resource']}: not reached for {age(row['unreachable_ms'])} ({_seen(row)}): {row['why']}"
    if is_any:
        yield "", WHERE_TO_LOOK


def of_transaction(resources: Sequence[Row], txid: str) -> list[dict[str, Any]]:
    """The branches of one transaction that resolvers saw."""
    return [row for row in hanging(resources, (), 0) if row["txid"] == txid]


def sql(branches: Sequence[Row], outcome: str) -> list[str]:
    """Statements to paste that end branches as the broker has decided; none while nothing is decided."""
    verb = {"committed": "COMMIT", "rolled-back": "ROLLBACK"}.get(outcome)
    found = []
    for branch in branches:
        found += [f"-- in {branch['resource']}: is the branch listed?", "XA RECOVER;"]
        named = branch_xid(branch["txid"], branch["bqual"])
        if named is None:
            found.append(NO_BRANCH)
            continue
        xid = xid_sql(named)
        found += (
            [f"XA {verb} {xid};"]
            if verb
            else [f"-- after the fence, and only if it says rolled-back: XA ROLLBACK {xid};"]
        )
    return found


def next_steps(txid: str, branches: Sequence[Row], outcome: str) -> list[str]:
    """Advice for branches that no resolver ends, the safest first."""
    names = ", ".join(dict.fromkeys(branch["resource"] for branch in branches))
    first = f"run a resolver that reaches {names}: txmq resolver --config resolver.toml"
    if outcome != "unknown":
        return [first, f"or paste the SQL: the broker says {outcome}"]
    return [
        f"its owner may be about to decide; it has gone: {first}",
        f"no resolver can run: txmq tx fence {txid} (then nothing of it can commit any more), then show this again",
    ]


def _count(number: int) -> str:
    return f"{number} branch{'es' * (number != 1)}"


def _seen(row: Row) -> str:
    return f"{row['by']}, {age(row['seen_ms_ago'])} ago"
