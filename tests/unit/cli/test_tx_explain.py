"""What an operator is told about a transaction that hangs."""

from __future__ import annotations

import sqlite3
from typing import Any

import pytest

from txmq.cli import tx_explain
from txmq.errors import ConfigError

TXID = "00000000000000c1-00000000000000a1-7-1"
PREPARED: dict[str, Any] = {
    "txid": TXID, "state": "prepared", "kind": "last-resource", "resource": "shop", "uuid": "ab" * 16,
    "table": "shop_marker",
    "deadline_ms": 30_000, "prepared_ms": 1000, "age_ms": 5000, "owner_connected": False, "owner_gone_ms": 4000,
}  # fmt: skip
BRANCH: dict[str, Any] = {
    "resource": "a", "uuid": "ab" * 16, "bqual": "b.1.2", "connection": 42, "wrote": True, "marker": True,
    "table": "stock_marker",
    "complete": False, "heuristic": None,
}  # fmt: skip
DECIDED = PREPARED | {"state": "decided", "kind": "xa", "is_held": True, "branches": [BRANCH]}
HEURISTIC = PREPARED | {
    "state": "heuristic",
    "heuristics": [{"what": "heuristic-commit", "resource": "shop", "reason": "x", "outcome": "committed"}],
}


HOME = "00000000000000b2"
BRANCH_HERE = PREPARED | {"kind": "branch", "of": f"00000000000000c1-{HOME}-3-9", "resource": HOME, "uuid": ""}


def test_branch_names_the_home_that_decides() -> None:
    said = tx_explain.why(BRANCH_HERE)
    assert f"a part of transaction 00000000000000c1-{HOME}-3-9, about which home {HOME} decides" in said
    first, last = tx_explain.next_steps(BRANCH_HERE)
    assert f"bring home {HOME} back" in first
    assert f"txmq tx commit|rollback {TXID} --heuristic" in last
    behind = BRANCH_HERE | {"is_decided": True}
    assert "committed; its messages wait for their place" in tx_explain.why(behind)
    assert "settle the branches" in tx_explain.next_steps(behind)[0]


def test_last_resource_whose_commit_waits_for_its_turn_is_committed() -> None:
    assert tx_explain.why(PREPARED | {"is_decided": True}).startswith("committed; its messages wait for their place")


def test_part_that_an_operator_decided_names_no_home() -> None:
    fact = {"what": "heuristic-rollback", "kind": "branch", "resource": HOME, "reason": "x", "outcome": "rolled-back"}
    row = HEURISTIC | {"heuristics": [fact]}
    assert tx_explain.why(row) == "heuristic-rollback: x (the transaction is rolled-back)"
    assert "if its rows are in the application" in tx_explain.next_steps(row)[0]


@pytest.mark.parametrize("bqual", ["Ä", "b" * 65, "\x1b[2J"])
def test_bqual_that_no_database_can_have_is_told(bqual: str) -> None:
    """An older broker kept what it was told."""
    row = DECIDED | {"branches": [BRANCH | {"bqual": bqual}, BRANCH | {"resource": "c"}]}
    lines = tx_explain.sql(row)
    assert tx_explain.NO_BRANCH in lines
    assert sum(line.startswith("XA COMMIT ") for line in lines) == 1
    seen = {"txid": TXID, "resource": "a", "bqual": bqual}
    assert tx_explain.branches_sql([seen], "committed")[-1] == tx_explain.NO_BRANCH


def test_placed_part_names_the_home_that_decided() -> None:
    row = BRANCH_HERE | {"state": "placed", "is_held": False}
    said = f"a part of transaction {row['of']}; committed; home {HOME} has not been told"
    assert tx_explain.why(row) == said
    assert tx_explain.why(row | {"is_held": True}) == f"{said}; readers do not see its messages yet"
    first, last = tx_explain.next_steps(row)
    assert f"bring home {HOME} back" in first
    assert last == f"home lost for ever: txmq tx give-up {TXID} --home {HOME} --reason WHY"
    assert tx_explain.sql(row) == []


def test_decision_names_the_homes_it_waits_for() -> None:
    other = {"txid": f"00000000000000c1-{HOME}-3-9", "complete": False}
    row = DECIDED | {"branches": [], "homes": [other], "is_held": False}
    said = "committed; not known to have committed in home 00000000000000b2; its messages are visible already"
    assert tx_explain.why(row) == said
    assert "homes back" in tx_explain.next_steps(row)[0]
    give_up = f"txmq tx give-up {TXID} --home {HOME} --reason WHY"
    assert tx_explain.next_steps(row)[1].endswith(give_up)
    assert tx_explain.next_steps(row | {"branches": [BRANCH]})[-1].endswith(give_up)
    assert "wait for their place" in tx_explain.why(row | {"is_placed": False})
    placing = PREPARED | {"state": "placing", "kind": "local"}
    assert "wait for their place" in tx_explain.why(placing)
    assert "settle the branches" in tx_explain.next_steps(placing)[0]


def test_home_given_up_is_told_with_its_repair() -> None:
    fact = {"what": "heuristic-hazard", "resource": HOME, "branch": "t", "reason": "burnt", "outcome": "committed"}
    row = HEURISTIC | {"heuristics": [fact]}
    assert tx_explain.why(row) == f"heuristic-hazard in home {HOME}: burnt (the transaction is committed)"
    repair, forget = tx_explain.next_steps(row)
    assert f"its messages at home {HOME} are lost: send them again" in repair
    assert forget == f"txmq tx forget {TXID}"


def test_marker_of_a_part_is_that_of_its_transaction() -> None:
    of = f"00000000000000c1-{HOME}-3-9"
    lines = tx_explain.sql(PREPARED | {"of": of})
    assert (sum(of in line for line in lines), sum(TXID in line for line in lines)) == (2, 0)


@pytest.mark.parametrize(
    ("text", "ms"), [("0s", 0), ("250ms", 250), ("30s", 30_000), ("5m", 300_000), ("2h", 7_200_000), ("1d", 86_400_000)]
)
def test_a_duration_has_a_unit(text: str, ms: int) -> None:
    assert tx_explain.duration_ms(text) == ms


@pytest.mark.parametrize("text", ["30", "s", "-1s", "1.5s", "30 s", "1w"])
def test_what_is_no_duration_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(ConfigError, match="such as 30s"):
        tx_explain.duration_ms(text)


@pytest.mark.parametrize(
    ("ms", "text"), [(0, "0ms"), (999, "999ms"), (61_500, "1m 1s"), (3_600_000, "1h 0m"), (90_061_000, "1d 1h")]
)
def test_an_age_is_told_in_its_two_largest_units(ms: int, text: str) -> None:
    assert tx_explain.age(ms) == text


def test_prepared_one_is_told_with_its_owner_and_who_decides() -> None:
    assert tx_explain.why(PREPARED) == "its owner has been gone for 4s; the marker row in shop decides"
    connected = PREPARED | {"owner_connected": True}
    assert "may still decide" in tx_explain.why(connected)
    assert "past its deadline" in tx_explain.why(connected | {"age_ms": 31_000})
    assert "may still decide" in tx_explain.why(connected | {"age_ms": 31_000, "deadline_ms": 0})


def test_halves_and_foreign_ones_are_told_with_who_decides() -> None:
    half = PREPARED | {"kind": "half", "group": "g", "checks": 3}
    assert "the checker of producer group g decides (asked 3 times" in tx_explain.why(half)
    assert "not asked yet" in tx_explain.why(half | {"checks": 0})
    assert "another transaction manager" in tx_explain.why(PREPARED | {"kind": "foreign"})
    assert "producer group g" in tx_explain.next_steps(half)[0]
    assert tx_explain.sql(half) == []


def test_parts_of_a_batch_are_told_under_their_query() -> None:
    spark = PREPARED | {"kind": "spark", "query": "q", "epoch": 3, "batch": 7, "task": 1, "attempt": 12}
    told = "its owner has been gone for 4s; task 1, attempt 12 of batch 7 of query q, whose Spark driver decides"
    assert tx_explain.why(spark) == told
    assert tx_explain.next_steps(spark)[0].endswith("it never runs again: txmq query delete q")


def test_decided_transaction_is_explained_with_missing_branches_and_sql() -> None:
    done = BRANCH | {"resource": "b", "complete": True}
    row = DECIDED | {"branches": [BRANCH, done]}
    assert tx_explain.why(row) == "committed; not known to have committed in a; readers do not see its messages yet"
    assert "visible already" in tx_explain.why(row | {"is_held": False})
    statement = f"XA COMMIT X'{TXID.encode().hex()}',X'{b'b.1.2'.hex()}',1954049393;"
    lines = tx_explain.sql(row)
    assert [line for line in lines if line.startswith("XA COMMIT")] == [statement]
    assert any("KILL 42" in line for line in lines)
    assert f"SELECT outcome FROM stock_marker WHERE txid = '{TXID}';" in lines
    unmarked = tx_explain.sql(DECIDED | {"branches": [BRANCH | {"connection": None, "marker": False}]})
    assert not any("KILL" in line or "SELECT" in line for line in unmarked)


def test_sql_of_last_resource_reads_first_and_then_bars_way() -> None:
    select, insert = (line for line in tx_explain.sql(PREPARED) if not line.startswith("--"))
    assert select == f"SELECT outcome FROM shop_marker WHERE txid = '{TXID}';"
    assert insert == (
        "INSERT INTO shop_marker (txid, outcome, deadline_ms, written_ms, seen) SELECT "
        f"'{TXID}', 'rolled-back', 30000, 1000, 0 FROM shop_marker_identity WHERE id = 1 AND uuid = '{'ab' * 16}';"
    )


def test_no_sql_can_run_where_broker_was_never_told_table() -> None:
    """A journal of before has prepared ones without it."""
    untold = {key: value for key, value in PREPARED.items() if key != "table"}
    select, insert = (line for line in tx_explain.sql(untold) if not line.startswith("--"))
    for statement in (select, insert):
        with pytest.raises(sqlite3.OperationalError, match="syntax error"):
            sqlite3.connect(":memory:").execute(statement)


def test_each_answer_of_the_marker_row_has_its_command() -> None:
    _, committed, rolled_back, _ = tx_explain.next_steps(PREPARED)
    assert f"says 'committed': txmq tx commit {TXID} --heuristic" in committed
    assert f"went in (1 row): txmq tx rollback {TXID} --heuristic" in rolled_back


@pytest.mark.parametrize("row", [PREPARED, DECIDED])
def test_first_advice_is_resolver_and_last_is_heuristic(row: dict[str, Any]) -> None:
    steps = tx_explain.next_steps(row)
    assert "txmq resolver" in steps[0]
    assert "heuristic" in steps[-1]
    assert TXID in steps[-1]


def test_heuristic_transaction_is_explained_until_it_is_forgotten() -> None:
    assert tx_explain.why(HEURISTIC) == "heuristic-commit in shop: x (the transaction is committed)"
    assert tx_explain.next_steps(HEURISTIC)[-1] == f"txmq tx forget {TXID}"
    assert tx_explain.sql(HEURISTIC) == []


def test_of_one_that_is_over_nothing_is_advised() -> None:
    assert (tx_explain.next_steps({"txid": TXID}), tx_explain.sql({"txid": TXID})) == ([], [])
