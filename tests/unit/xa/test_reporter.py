"""What a desk tells the broker of its database: at once what changes, else now and then."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from tools.simulated.faults import Fault
from txmq.errors import ConnectionLostError, FencedError, UnavailableError
from txmq.xa import LastResource
from txmq.xa.reporter import LISTED_MAX, REPORT_EVERY_S
from txmq.xa.resolver import Resolver
from txmq.xa.two_phase.resource_ports import Bqual, encode_bqual
from txmq.xid import FORMAT_ID, TxId, Xid

from .support import LastResourceFixture
from .xa_support import Prepared, XAFixture


def hang(world: XAFixture, counter: int = 1, overdue_ms: int = -30_000) -> str:
    """A branch that is prepared in the first database, of an owner that is connected and has not decided."""
    home, database = world.home.session, world.databases[0]
    txid = str(TxId(home.cluster, home.home, home.id, counter))
    bqual = encode_bqual(Bqual(database.uuid, world.home.clock.now_ms() - overdue_ms, 1))
    database.prepared[Xid(FORMAT_ID, txid.encode(), bqual)] = Prepared([b"x"], txid, None)
    return txid


def told(world: XAFixture | LastResourceFixture) -> list[dict[str, Any]]:
    """The reports since the last look."""
    found = [json.loads(sent.body) for sent in world.home.sent if sent.verb == "resource"]
    world.home.sent.clear()
    return found


def test_undecided_branch_unknown_to_the_broker_is_reported_with_age() -> None:
    world = XAFixture("a")
    resolver = world.resolver()
    txid = hang(world)
    resolver.run_once()
    [first] = told(world)
    assert (first["kind"], first["uuid"], first["reachable"]) == ("xa", world.databases[0].uuid, True)
    assert (first["branches"], first["age_ms"]) == (1, 0)
    world.home.clock.advance(2.0)
    resolver.run_once()
    [second] = told(world)
    assert second["age_ms"] == 2000, "it hangs: told at once"
    [[listed, bqual, age_ms, why]] = second["oldest"]
    assert (listed, age_ms, why) == (txid, 2000, "nobody has decided yet")
    assert bqual.startswith(world.databases[0].uuid)


def test_unchanged_state_is_reported_sparingly_and_its_end_at_once() -> None:
    world = XAFixture("a")
    resolver = world.resolver()
    hang(world)
    resolver.run_once()
    world.home.clock.advance(2.0)
    resolver.run_once()
    told(world)
    for _ in range(4):
        world.home.clock.advance(1.0)
        resolver.run_once()
    assert told(world) == []
    world.home.clock.advance(REPORT_EVERY_S)
    resolver.run_once()
    assert [body["branches"] for body in told(world)] == [1]
    world.databases[0].prepared.clear()
    resolver.run_once()
    assert [(body["branches"], body["oldest"]) for body in told(world)] == [(0, [])]


def test_last_words_take_back_a_branch_that_is_gone() -> None:
    world = XAFixture("a")
    resolver = world.resolver()
    hang(world)
    resolver.run_once()
    world.databases[0].prepared.clear()
    resolver.run_once()
    assert [body["branches"] for body in told(world)] == [1], "a young one: told sparingly"
    resolver.close()
    assert [body["branches"] for body in told(world)] == [0]


def test_what_a_round_has_settled_is_not_reported() -> None:
    world = XAFixture("a")
    hang(world, overdue_ms=5000)  # the deadline has passed: it is fenced and rolled back
    assert world.resolver().run_once() == 1
    assert [body["branches"] for body in told(world)] == [0]


def test_branch_is_at_least_as_old_as_its_overdue_deadline() -> None:
    world = XAFixture("a")
    hang(world, overdue_ms=60_000)
    world.home.faults["outcome"].append(Fault(FencedError("its session is gone")))
    world.resolver().run_once()
    [body] = told(world)
    assert body["age_ms"] >= 60_000
    assert "not kept any more" in body["oldest"][0][3]


def test_a_broker_that_is_away_is_told_nothing() -> None:
    world = XAFixture("a")
    world.home.faults["recover"].append(Fault(UnavailableError("")))
    world.resolver().run_once()
    assert told(world) == []


def test_absent_database_is_reported_with_reason_and_last_look() -> None:
    world = XAFixture("a")
    resolver = world.resolver()
    hang(world)
    resolver.run_once()
    told(world)
    world.databases[0].is_away = True
    resolver.run_once()
    [body] = told(world)
    assert (body["reachable"], body["why"], body["branches"]) == (False, "DriverError: away", 1)
    world.databases[0].is_away = False
    resolver.run_once()
    [body] = told(world)
    assert (body["reachable"], body["why"]) == (True, None)


def test_the_oldest_are_listed_and_all_are_counted() -> None:
    world = XAFixture("a")
    for counter in range(1, 2 * LISTED_MAX + 1):
        hang(world, counter)
    world.resolver().run_once()
    [body] = told(world)
    assert (body["branches"], len(body["oldest"])) == (2 * LISTED_MAX, LISTED_MAX)


def test_a_report_that_fails_fails_no_round() -> None:
    world = XAFixture("a")
    world.home.faults["resource"].append(Fault(ConnectionLostError("planned")))
    resolver = world.resolver()
    resolver.run_once()
    assert resolver.problems() == []


def test_last_resource_is_reported_when_asked_and_when_unreachable(tmp_path: Path) -> None:
    world = LastResourceFixture(tmp_path)
    resolver = world.resolver()
    resolver.run_once()
    [body] = told(world)
    assert (body["kind"], body["reachable"], body["branches"]) == ("last-resource", True, 0)
    resolver.close()
    other = world.new_resource()
    lost_path = world.path.rename(tmp_path / "lost")
    resolver = Resolver(world.home, [other])
    resolver.run_once()
    [body] = told(world)
    assert (body["reachable"], body["uuid"]) == (False, None)
    lost_path.rename(world.path)
    resolver.run_once()
    assert [body["reachable"] for body in told(world)] == [True]
    busy = LastResource("orders-db", connect=lambda: sqlite3.connect(world.path, timeout=0.01))
    with closing(sqlite3.connect(world.path)) as writer:
        writer.execute("BEGIN EXCLUSIVE")
        Resolver(world.home, [busy]).run_once()
    assert [body["why"].partition(" ")[0] for body in told(world)] == ["RolledBackError:"]
    resolver.close()
    world.close()
