"""Explains a transaction that hangs to an operator: why, what to look at, what to paste, what to do next.

Pure functions over the fields of ``client.transactions.show`` (``recover`` in docs/protocol.md), and over what
resolvers have found (``client.transactions.resources``, ``resource list``): prepared branches that the broker does not
know, databases not reached. The order of the advice is the order of safety: let the resolver do it; look at what the
database says; only then decide alone.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from txmq.errors import ConfigError
from txmq.xid import TxId, branch_xid, xid_sql

_UNITS_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION = re.compile(r"([0-9]{1,9})(ms|s|m|h|d)\Z")
_DEADLINE_PASSED_MS = 1000  # what a resolver waits after a deadline

Row = Mapping[str, Any]

_PLACING = "its messages wait for their place, behind transactions that are in doubt here and have the same keys"
NO_BRANCH = "-- its bqual is none that a database can have: no branch of that name was ever prepared"
_RESOLVER = "txmq resolver --config resolver.toml (seconds; txmq resolver --help shows the file)"
IN_DATABASE = "in-database"
WHERE_TO_LOOK = "look: XA RECOVER in that database; txmq tx show TXID; docs/how-to/in-doubt-at-3am.md"


def duration_ms(text: str) -> int:
    """``30s`` and the like in milliseconds.

    Raises:
        ConfigError: not a number with one of the units.
    """
    match = _DURATION.match(text)
    if match is None:
        raise ConfigError(f"--older-than {text[:40]!r}: expected a number with ms, s, m, h or d, such as 30s")
    return int(match[1]) * _UNITS_MS[match[2]]


def age(ms: int) -> str:
    """A duration for people: its two largest units."""
    units = [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000)]
    words: list[str] = []
    for name, size in units:
        count, ms = divmod(ms, size)
        if count or words:
            words.append(f"{count}{name}")
    return " ".join(words[:2]) or f"{ms}ms"


def why(row: Row) -> str:
    """Why it is listed, in one sentence."""
    if row["state"] == "heuristic":
        return "; ".join(_fact(fact) for fact in row["heuristics"])
    if row["state"] == "decided":
        return _why_decided(row)
    if row["state"] == "placing":
        return f"committed; {_PLACING}"
    if row["state"] == "placed":
        seen = "; readers do not see its messages yet" if row["is_held"] else ""
        return "; ".join([*_part_of(row), "committed", f"home {_home(row['of'])} has not been told{seen}"])
    if row.get("is_decided"):
        return "; ".join([*_part_of(row), "committed", _PLACING])
    return f"{_owner(row)}; {_decider(row)}"


def _part_of(row: Row) -> list[str]:
    return [f"a part of transaction {row['of']}"] if "of" in row else []


def _why_decided(row: Row) -> str:
    waiting = [branch["resource"] for branch in row["branches"] if not branch["complete"]]
    waiting += [f"home {_home(branch['txid'])}" for branch in row.get("homes", ()) if not branch["complete"]]
    said = [f"not known to have committed in {', '.join(waiting)}"] if waiting else []
    if not row.get("is_placed", True):
        said.append(_PLACING)
    else:
        said.append("readers do not see its messages yet" if row["is_held"] else "its messages are visible already")
    return "; ".join(["committed", *said])


def _home(txid: str) -> str:
    return f"{TxId.parse(txid).home:016x}"


def _owner(row: Row) -> str:
    if not row["owner_connected"]:
        return f"its owner has been gone for {age(row['owner_gone_ms'])}"
    is_late = 0 < row["deadline_ms"] < row["prepared_ms"] + row["age_ms"] - _DEADLINE_PASSED_MS
    return "its owner is connected, past its deadline" if is_late else "its owner is connected and may still decide"


def _decider(row: Row) -> str:
    kind = row["kind"]
    if kind == "half":
        asked = f"asked {row['checks']} times" if row["checks"] else "not asked yet"
        return f"the checker of producer group {row['group']} decides ({asked} since the broker's start)"
    if kind == "foreign":
        return "another transaction manager decides"
    if kind == "spark":
        where = f"batch {row['batch']} of query {row['query']}"
        return f"task {row['task']}, attempt {row['attempt']} of {where}, whose Spark driver decides"
    if kind == "branch":
        return f"a part of transaction {row['of']}, about which home {_home(row['of'])} decides"
    return f"the marker row in {row['resource']} decides"


def _fact(fact: Row) -> str:
    where = f" in {_place(fact)}" if fact.get("resource") and not _is_part(fact) else ""
    return f"{fact['what']}{where}: {fact['reason'] or 'no reason was given'} (the transaction is {fact['outcome']})"


def _is_part(fact: Row) -> bool:
    """Whether it is of a part that was decided here, in the stead of the home that its resource names."""
    return fact.get("kind") == "branch" and "branch" not in fact


def _place(fact: Row) -> str:
    return f"home {fact['resource']}" if "branch" in fact else str(fact["resource"])


def _repair(fact: Row) -> str:
    """The damage that a heuristic decision may have done, and its repair."""
    if "branch" in fact:
        return f"its messages at {_place(fact)} are lost: send them again, by what its other messages and its rows tell"
    where = "the application" if _is_part(fact) else fact.get("resource") or "the application"
    if fact["outcome"] == "rolled-back":
        return f"its messages were never sent: if its rows are in {where}, send what they tell, or take them back"
    if fact["what"] == "heuristic-rollback":
        return f"its messages are out, its rows in {where} are not: write those rows by hand, as the messages tell"
    return (
        f"its messages are out: look whether its rows are in {where}; if not, write them by hand, as the messages tell"
    )


def _give_up(when: str, txid: str, home: str) -> str:
    return f"{when}: txmq tx give-up {txid} --home {home} --reason WHY"


def sql(row: Row) -> list[str]:
    """Statements to paste: reading first. Each is for the database that the comment names."""
    if row.get("state") == "decided":
        return [line for branch in row["branches"] if not branch["complete"] for line in _branch_sql(row, branch)]
    if row.get("state") == "prepared" and row["kind"] == "last-resource":
        txid = row.get("of", row["txid"])  # its marker row has the id that all homes know
        return [
            f"-- in {row['resource']} itself, not in a copy of it: is there a row, and what does it say?",
            f"SELECT outcome FROM {_table(row)} WHERE txid = '{txid}';",  # noqa: S608  pasted by a person
            "-- no row: make sure that none can come any more, before you roll back. 1 row: it went in;",
            "-- 0 rows: this is another resource's table; an error for the key: there is a row by now, read again",
            f"INSERT INTO {_table(row)} (txid, outcome, deadline_ms, written_ms, seen)"  # noqa: S608
            f" SELECT '{txid}', 'rolled-back', {row['deadline_ms']}, {row['prepared_ms']}, 0"
            f" FROM {_table(row)}_identity WHERE id = 1 AND uuid = '{row['uuid']}';",
        ]
    return []


def _branch_sql(row: Row, branch: Row) -> list[str]:
    lines = [f"-- in {branch['resource']}: is the branch listed?", "XA RECOVER;"]
    xid = branch_xid(row["txid"], branch["bqual"])
    if xid is None:
        return [*lines, NO_BRANCH]
    if branch["connection"] is not None:
        lines.append(f"-- listed, and XA COMMIT says 'unknown XID': KILL {branch['connection']}; and once more")
    lines.append(f"XA COMMIT {xid_sql(xid)};")
    if branch["marker"]:
        lines.append("-- not listed: did it commit?")
        lines.append(f"SELECT outcome FROM {_table(branch)} WHERE txid = '{row['txid']}';")  # noqa: S608  as above
    return lines


def _table(fact: Row) -> str:
    """The marker table; a placeholder if the journal is too old to name it."""
    return str(fact.get("table", "TABLE"))


def next_steps_unknown(txid: str) -> list[str]:
    """The next steps for an id that is open, or was never seen."""
    return [
        "ask again: its owner may be about to commit (txmq stats transactions counts the open ones)",
        f"it has no owner, but a database lists it: txmq tx fence {txid} (then nothing of it can commit any more)",
    ]


def next_steps(row: Row) -> list[str]:
    """The next steps, the safest first."""
    txid = row["txid"]
    if row.get("state") == "heuristic":
        return [*dict.fromkeys(_repair(fact) for fact in row["heuristics"]), f"txmq tx forget {txid}"]
    if row.get("state") == "decided":
        homes = [_home(branch["txid"]) for branch in row.get("homes", ()) if not branch["complete"]]
        lost = [_give_up("home lost for ever, or its part settled there by hand", txid, home) for home in homes]
        if not any(not branch["complete"] for branch in row["branches"]):
            return ["txmq cluster describe: bring the homes back that it waits for; the brokers do the rest", *lost]
        first = f"make the databases reachable, and run: {_RESOLVER}"
        last = f"database gone for ever: txmq tx complete {txid} --resource NAME --heuristic hazard --reason WHY"
        return [first, "or paste the SQL; the resolver sees it and completes the branch", last, *lost]
    if row.get("state") == "placing" or row.get("is_decided"):
        return ["txmq tx list --state prepared: settle the branches of the same partitions; the broker does the rest"]
    if row.get("state") == "placed":
        home = _home(row["of"])
        first = f"bring home {home} back (txmq cluster describe): it is told within seconds, and that ends it"
        return [first, _give_up("home lost for ever", txid, home)]
    if row.get("state") != "prepared":
        return []
    settle = f"txmq tx commit|rollback {txid} --heuristic --reason WHY"
    if row["kind"] == "last-resource":
        return [
            f"make the database reachable, and run: {_RESOLVER}",
            f"or paste the SQL; it says 'committed': txmq tx commit {txid} --heuristic --reason WHY",
            f"it says 'rolled-back', or the INSERT went in (1 row): txmq tx rollback {txid} --heuristic --reason WHY",
            f"database gone for ever: by what its backup or the business says: {settle}",
        ]
    if row["kind"] == "branch":
        last = "home gone for ever: commit if another part of it is placed (txmq tx list), else as the business says"
        return [
            f"bring home {_home(row['of'])} back (txmq cluster describe): the brokers settle it within seconds",
            f"{last}: {settle}",
        ]
    first = {
        "half": f"run a member of producer group {row.get('group')}: its checker is asked within a minute",
        "foreign": "let its transaction manager recover: it asks recover() and commits or rolls back",
        "spark": "run the query again (same checkpoint, or same queryId and batchId): it rolls back what its former "
        f"driver left; it never runs again: txmq query delete {row.get('query')}",
    }.get(row["kind"], "look into docs/how-to/in-doubt-at-3am.md")
    then = "no other way: find out what the application did, then the same to the messages:"
    return [first, f"{then} {settle}"]


# --- findings of resolvers --------------------------------------------------------------------------------------------


def hanging(resources: Sequence[Row], listed: Collection[str], older_ms: int) -> list[dict[str, Any]]:
    """The oldest branches of each database as rows of a list, but for transactions that are listed anyway."""
    return [
        {
            "txid": branch["txid"], "state": IN_DATABASE, "kind": row["kind"], "resource": row["resource"],
            "uuid": row["uuid"], "bqual": branch["bqual"], "age_ms": branch["age_ms"] + row["seen_ms_ago"],
            "why": branch["why"], "by": row["by"], "seen_ms_ago": row["seen_ms_ago"],
        }
        for row in resources
        for branch in row["oldest"]
        if branch["txid"] not in listed and branch["age_ms"] + row["seen_ms_ago"] >= older_ms
    ]  # fmt: skip


def branch_lines(resources: Sequence[Row], hung: Sequence[Row], older_ms: int) -> Iterator[tuple[str, str]]:
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
                yield "    ", f"{IN_DATABASE}, {branch['kind']}, {age(branch['age_ms'])}: {branch['why']}"
        if not row["reachable"] and row["unreachable_ms"] >= older_ms:
            is_any = True
            yield "", f"{row['resource']}: not reached for {age(row['unreachable_ms'])} ({_seen(row)}): {row['why']}"
    if is_any:
        yield "", WHERE_TO_LOOK


def branches_of(resources: Sequence[Row], txid: str) -> list[dict[str, Any]]:
    """The branches of one transaction that resolvers saw."""
    return [row for row in hanging(resources, (), 0) if row["txid"] == txid]


def branches_sql(branches: Sequence[Row], outcome: str) -> list[str]:
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


def next_steps_of_branches(txid: str, branches: Sequence[Row], outcome: str) -> list[str]:
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
