"""How markers leave: of this process's own transactions, of others', page by page, and at the end."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from tests.logged import said
from tools.simulated.connection import Sent
from tools.simulated.faults import Fault
from txmq.errors import FencedError, ForbiddenError, NeverIssuedError, NotOwnerError
from txmq.xa import resolver_ports
from txmq.xa.database.marker_sweep import MarkerSweep
from txmq.xa.resolver import Resolver
from txmq.xa.resolver_ports import cluster_of

from ..support import LastResourceFixture, abandon
from ..xa_support import Notes, XAFixture

DAY_MS = 24 * 3600 * 1000


class Table:
    """Markers that are old, in memory, for a sweep alone."""

    def __init__(self, world: LastResourceFixture, count: int) -> None:
        self.uuid = world.resource.uuid or ""
        self.txids = [world.home.session.next_txid()[1] for _ in range(count)]
        self.left = sorted(self.txids)

    def committed_before(self, _age_ms: int, after: str, limit: int) -> list[str]:
        """A page."""
        return [txid for txid in self.left if txid > after][:limit]

    def delete_committed(self, txids: Any) -> None:
        """Rows leave."""
        self.left = [txid for txid in self.left if txid not in set(txids)]


def _age(world: LastResourceFixture, milliseconds: int = resolver_ports.SWEEP_AGE_MS + 60_000) -> None:
    with world.outside() as connection:
        connection.execute("UPDATE txmq_marker SET written_ms = written_ms - ?", (milliseconds,))


def _swept(world: LastResourceFixture, table: Table, words: dict[str, Any], minutes: int) -> list[str]:
    """What is left when the broker says these words, and every other one is committed."""
    world.home.stand_in("outcome", lambda sent: _answer(words.get(sent.txid, b"committed\n")))
    sweep = MarkerSweep(world.home, world.home.clock, world.home.routes, name="orders-db")
    for _ in range(minutes):
        sweep.keep(lambda: table)
        world.home.clock.advance(resolver_ports.SWEEP_EVERY_S)
    return table.left


def _answer(word: Any) -> bytes:
    if isinstance(word, Exception):
        raise word
    return bytes(word)


# --- of others -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "word",
    [b"unknown\n", b"prepared\n", b"rolled-back\n", NotOwnerError("another broker's"), NeverIssuedError("restored")],
    ids=str,
)
def test_markers_that_must_stay_keep_no_later_one_from_leaving(world: LastResourceFixture, word: Any) -> None:
    """The 500 oldest were looked at each time: 500 of these, and nothing was swept any more."""
    table = Table(world, 3 * resolver_ports.DELETE_SIZE)
    staying = dict.fromkeys(sorted(table.txids)[: resolver_ports.DELETE_SIZE + 7], word)
    assert _swept(world, table, dict(staying), 3) == sorted(staying)


@pytest.mark.parametrize("is_older", [False, True], ids=["names its database", "cannot, and is refused"])
def test_markers_of_other_users_leave_when_their_outcome_is_told(
    world: LastResourceFixture, caplog: pytest.LogCaptureFixture, is_older: bool
) -> None:
    table = Table(world, 2)
    world.home.session.fences_by_database = not is_older

    def outcome(sent: Sent) -> bytes:
        if sent.line.split(" ")[2:-1] != [f"uuid={table.uuid}"]:
            raise ForbiddenError("another user's")
        return b"committed\n"

    world.home.stand_in("outcome", outcome)
    sweep = MarkerSweep(world.home, world.home.clock, world.home.routes, name="orders-db")
    for _ in range(3):
        sweep.keep(lambda: table)
        world.home.clock.advance(resolver_ports.SWEEP_EVERY_S)
    assert len(table.left) == 2 * is_older
    assert len([line for line in said(caplog) if "markers of other users stay" in line["event"]]) == is_older


def test_markers_whose_outcome_is_no_longer_kept_leave(world: LastResourceFixture) -> None:
    """410 of their home, and it lists nothing: the transaction is over, and nobody will ever ask."""
    table = Table(world, resolver_ports.DELETE_SIZE + 7)
    assert _swept(world, table, dict.fromkeys(table.txids, FencedError("no longer kept")), 2) == []


def test_markers_that_prove_a_loss_are_named_once_as_errors(
    world: LastResourceFixture, caplog: pytest.LogCaptureFixture
) -> None:
    """The broker was restored from an older copy: their messages are gone, and nobody else says so."""
    table = Table(world, 3)
    lost = dict.fromkeys(table.txids[:2], NeverIssuedError("was never issued here"))
    assert _swept(world, table, dict(lost), 3) == sorted(lost)
    lines = [line for line in said(caplog) if "heuristic" in line["event"]]
    assert [(line["level"], line["txid"]) for line in lines] == [("error", txid) for txid in lost]


def test_loss_of_living_session_is_kept_by_the_broker(
    world: LastResourceFixture, caplog: pytest.LogCaptureFixture
) -> None:
    """The copy had the session, and knows nothing of the transaction; when the session ends, it would look settled."""
    table = Table(world, 3)
    lost = table.txids[0]
    assert _swept(world, table, {lost: b"unknown\n"}, 2) == [lost]
    ((what, reason),) = world.home.heuristics(lost)
    assert (what, "the rows are committed" in reason) == ("hazard", True)
    assert [(line["level"], line["txid"]) for line in said(caplog) if "heuristic" in line["event"]] == [("error", lost)]


def test_sweep_goes_on_where_it_may_not_report_a_loss(world: LastResourceFixture) -> None:
    table = Table(world, 3)
    world.home.faults["rollback"].append(Fault(ForbiddenError("another user's")))
    assert _swept(world, table, {table.txids[0]: b"unknown\n"}, 1) == table.txids[:1]


def test_a_pass_begins_anew_where_it_ended(world: LastResourceFixture) -> None:
    table = Table(world, 5)
    words: dict[str, Any] = dict.fromkeys(table.txids, b"prepared\n")
    assert _swept(world, table, words, 2) == sorted(table.txids)
    assert _swept(world, table, {}, 1) == []


def test_full_table_is_swept_at_once_not_page_minute(world: LastResourceFixture) -> None:
    table = Table(world, 4 * resolver_ports.DELETE_SIZE)
    sweep = MarkerSweep(world.home, world.home.clock, world.home.routes, name="orders-db")
    world.home.stand_in("outcome", lambda _: b"committed\n")
    for _ in range(5):
        sweep.keep(lambda: table)
        world.home.clock.advance(resolver_ports.POLL_S)
    assert table.left == []


@pytest.mark.parametrize("state", ["prepared", "heuristic"])
def test_what_the_broker_still_lists_keeps_its_marker(world: LastResourceFixture, state: str) -> None:
    """The proof of what an operator decided alone stays until he has the broker forget it."""
    resolved = abandon(world, b"y", "client.tx.committed")
    listed = abandon(world, b"z", "client.tx.db_committed")
    if state == "heuristic":
        world.home.call("commit", listed, extensions={"heuristic": "by%20hand"}, body=())
    world.home.stand_in("outcome", lambda _: _answer(FencedError("no longer kept")))
    _age(world)
    assert set(world.markers()) == {resolved, listed}
    with closing(world.new_resource().open_for_resolver(cluster_of(world.home))) as database:
        MarkerSweep(world.home, world.home.clock, world.home.routes, name="orders-db").keep(lambda: database)
    assert set(world.markers()) == {listed}


def test_old_committed_markers_of_others_leave_if_the_broker_agrees(world: LastResourceFixture) -> None:
    world.order(b"x")
    resolved = abandon(world, b"y", "client.tx.committed")
    prepared = abandon(world, b"z", "client.tx.db_committed", dies=False)
    _age(world, resolver_ports.SWEEP_AGE_MS - 60_000)
    world.resolver().run_once()
    assert {resolved, prepared} <= set(world.markers())
    _age(world, 120_000)
    world.resolver().run_once()
    assert world.markers() == {prepared: "committed"}


@pytest.mark.parametrize(("column", "is_kept"), [("", False), ("deadline_ms", True), ("written_ms", True)])
def test_rolled_back_markers_leave_a_day_behind_their_deadline(
    world: LastResourceFixture, column: str, is_kept: bool
) -> None:
    abandon(world, b"x")
    world.resolver().run_once()
    assert set(world.markers().values()) == {"rolled-back"}
    now = "CAST((julianday('now') - 2440587.5) * 86400000.0 AS INTEGER)"
    old, new = f"{now} - {DAY_MS + 60_000}", f"{now} - {DAY_MS - 60_000}"
    with world.outside() as connection:
        for name in ("deadline_ms", "written_ms"):
            connection.execute(f"UPDATE txmq_marker SET {name} = {new if name == column else old}")
    world.resolver().run_once()
    assert bool(world.markers()) is is_kept


def test_xa_markers_whose_outcome_is_no_longer_kept_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    world = XAFixture("a")
    monkeypatch.setattr("txmq.client.transaction.block.resolver_of", lambda _client: Notes(world.home))
    world.transfer(b"x")
    world.die()
    world.databases[0].has_old_markers = True
    world.home.faults["outcome"].append(Fault(FencedError("no longer kept")))
    world.resolver().run_once()
    assert world.databases[0].markers == {}


# --- of this process -------------------------------------------------------------------------------------------------


def test_the_last_markers_leave_when_the_resolver_is_closed(world: LastResourceFixture) -> None:
    resolver = Resolver(world.home, [world.resource], world.home.clock)
    world.order(b"1")
    resolver.run_once()
    world.order(b"2")
    resolver.run_once()
    assert set(world.markers().values()) == {"committed"}, "few wait for more"
    resolver.close()
    assert world.markers() == {}


def test_database_absent_at_the_end_keeps_its_markers_without_error(world: LastResourceFixture) -> None:
    world.order(b"1")
    resolver = Resolver(world.home, [world.resource], world.home.clock)
    world.path.rename(world.path.with_suffix(".away"))
    resolver.close()
    world.path.with_suffix(".away").rename(world.path)
    assert set(world.markers().values()) == {"committed"}
    Resolver(world.home, [world.resource], world.home.clock).close()
    assert world.markers() == {}


def test_the_last_xa_markers_leave_when_the_resolver_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    world = XAFixture("a")
    notes = Notes(world.home)
    monkeypatch.setattr("txmq.client.transaction.block.resolver_of", lambda _client: notes)
    world.transfer(b"x")
    assert world.databases[0].markers
    notes.resolver.close()
    assert world.databases[0].markers == {}
