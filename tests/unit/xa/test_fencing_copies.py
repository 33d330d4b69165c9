"""A database and its copies: in which of them a missing marker proves a rollback."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from copy import deepcopy
from pathlib import Path

import pytest

from tests.crash_points import at_moment, crash_at
from tests.logged import said
from tools.simulated.faults import lost
from txmq.errors import BrokerAwayError, ConfigError, OutcomeUnknownError, RolledBackError
from txmq.runtime.crashpoints import SimulatedCrash
from txmq.xa import LastResource
from txmq.xa.fencing import DRAW_EVERY_S, StrangeServerError
from txmq.xa.resolver import Resolver

from .support import NAME, LastResourceFixture, abandon


def copied(world: LastResourceFixture, name: str = "staging.db") -> Path:
    """A copy of the file."""
    return Path(shutil.copy(world.path, world.path.parent / name))


def resource_at(path: Path) -> LastResource:
    """The resource, as somebody sees it whose configuration leads there."""
    return LastResource(NAME, connect=lambda: sqlite3.connect(path, timeout=0.05))


def resolve(world: LastResourceFixture, path: Path | None = None, rounds: int = 1) -> Exception | None:
    """A new resolver over the database, or over that file; what kept its last round from proving."""
    resolver = Resolver(world.home, [resource_at(path or world.path)])
    try:
        for _ in range(rounds):
            resolver.run_once()
    except SimulatedCrash:
        for one in resolver._resource_resolvers:
            one.close()  # the connection alone, as of a process that dies
        raise
    problems = [error for _, error in resolver.problems()]
    resolver.close()
    return problems[0] if problems else None


def another_goes_on(world: LastResourceFixture) -> None:
    """A copy that is nowhere to be seen has drawn."""
    uuid = world.resource.uuid or ""
    after = {"after": world.home.tokens[uuid]} if uuid in world.home.tokens else {}
    world.home.call("token", uuid, "f" * 32, extensions=after)


def copied_and_gone_on(world: LastResourceFixture) -> Path:
    """A copy, after which somebody has drawn in the original."""
    resolve(world)
    path = copied(world)
    resolve(world)
    return path


def test_copy_proves_no_rollback_and_says_so_once(world: LastResourceFixture, caplog: pytest.LogCaptureFixture) -> None:
    """A resolver on a staging copy, with production's broker, rolled back what production was about to commit."""
    path = copied_and_gone_on(world)
    txid = abandon(world, b"left")
    error = resolve(world, path, rounds=3)
    assert isinstance(error, StrangeServerError)
    assert "txmq resolver adopt" in str(error)
    assert world.home.states() == {txid: "prepared"}
    with closing(sqlite3.connect(path)) as copy:
        assert copy.execute("SELECT * FROM txmq_marker").fetchall() == []
    assert [line["event"] for line in said(caplog) if line["level"] == "error"] == ["rollback not proved"]
    assert resolve(world) is None
    assert world.home.states() == {txid: "rolled-back"}


def test_database_that_is_outdated_again_is_told_of_again(
    world: LastResourceFixture, caplog: pytest.LogCaptureFixture
) -> None:
    resolver = world.resolver()
    resolver._resource_resolvers[0]._clock = world.home.clock
    for number in range(1, 3):
        resolver.run_once()  # it goes on here
        resource_at(copied(world, f"copy{number}.db")).install(world.home, adopt=True)
        world.home.clock.advance(DRAW_EVERY_S + 1)
        resolver.run_once()
        assert [line["event"] for line in said(caplog) if line["level"] == "error"] == ["rollback not proved"]
        world.new_resource().install(world.home, adopt=True)
        world.home.clock.advance(DRAW_EVERY_S + 1)


def test_a_committed_marker_proves_a_commit_wherever_it_is(world: LastResourceFixture) -> None:
    """After more undecided ones than a round has patience for."""
    copied_and_gone_on(world)
    absent = [abandon(world, b"%d" % number) for number in range(5)]
    committed = abandon(world, b"left", "client.tx.db_committed")
    late = copied(world, "late.db")
    another_goes_on(world)
    resolve(world, late)
    assert "commit" in world.home.requests
    assert world.home.states() == dict.fromkeys([*absent, committed], "prepared"), "it waits for its turn"
    for txid in absent:
        world.home.call("rollback", txid)
    assert world.home.states()[committed] == "committed"


def test_a_rolled_back_marker_proves_nothing_in_a_copy(world: LastResourceFixture) -> None:
    path = copied_and_gone_on(world)
    txid = abandon(world, b"left")
    with closing(sqlite3.connect(path)) as copy, copy:
        copy.execute("INSERT INTO txmq_marker VALUES (?, 'rolled-back', 0, 0, 0)", (txid,))
    resolve(world, path)
    assert world.home.states() == {txid: "prepared"}


def test_whichever_resolves_first_goes_on(world: LastResourceFixture) -> None:
    resolve(world)
    path = copied(world)
    assert resolve(world, path) is None
    assert isinstance(resolve(world), StrangeServerError), "the original is refused, and says so"
    assert resolve(world, path) is None


def test_an_adopted_database_goes_on_and_no_other_one(world: LastResourceFixture) -> None:
    path = copied_and_gone_on(world)
    txid = abandon(world, b"left")
    resource_at(path).install(world.home)
    resolve(world, path)
    assert world.home.states() == {txid: "prepared"}, "to install is not to adopt"
    resource_at(path).install(world.home, adopt=True)
    resolve(world, path)
    assert world.home.states() == {txid: "rolled-back"}
    assert isinstance(resolve(world), StrangeServerError)


def test_to_adopt_needs_the_broker(world: LastResourceFixture) -> None:
    with pytest.raises(ConfigError, match="the broker has to be told"):
        world.new_resource().install(adopt=True)
    world.home.is_away = True
    with pytest.raises(BrokerAwayError):
        world.new_resource().install(world.home, adopt=True)


def test_moved_database_goes_on_without_a_word(world: LastResourceFixture) -> None:
    resolve(world)
    txid = abandon(world, b"left")
    moved = world.path.rename(world.path.parent / "moved.db")
    assert resolve(world, moved) is None
    assert world.home.states() == {txid: "rolled-back"}


@pytest.mark.parametrize("how", ["renamed", "vacuumed"])
def test_resolver_asks_the_file_that_stands_there_now(world: LastResourceFixture, how: str) -> None:
    """Its connection led to the file that had been in that place, and stayed open for ever."""
    txid = abandon(world, b"left")
    resolver = world.resolver()
    resolver._resource_resolvers[0]._open()  # type: ignore[union-attr]
    other = copied(world)
    if how == "vacuumed":
        other.unlink()
        with world.outside() as connection:
            connection.execute(f"VACUUM INTO '{other}'")
    other.rename(world.path)
    assert resolver.run_once() == 1
    assert world.markers() == {txid: "rolled-back"}


def test_older_broker_rolls_nothing_back_until_adopted(world: LastResourceFixture) -> None:
    """What it lists was committed long ago, and its marker has gone."""
    resolve(world)
    txid, older = abandon(world, b"left"), deepcopy(world.home.node.disk)
    resolve(world)
    resolve(world)
    world.home.put_back(older.kill())
    world.home.clock.advance(5.0)
    with world.outside() as connection:
        connection.execute("DELETE FROM txmq_marker")
    assert isinstance(resolve(world), StrangeServerError)
    assert world.home.states() == {txid: "prepared"}
    world.new_resource().install(world.home, adopt=True)
    assert resolve(world) is None
    assert world.home.states() == {txid: "rolled-back"}


@pytest.mark.parametrize("point", ["resolver.marker_inserted", "resolver.token_drawn"])
def test_resolver_that_dies_leaves_it_to_the_next_one(world: LastResourceFixture, point: str) -> None:
    txid = abandon(world, b"left")
    with crash_at(point), pytest.raises(SimulatedCrash):
        resolve(world)
    assert world.home.states() == {txid: "prepared"}
    assert resolve(world) is None
    assert world.home.states() == {txid: "rolled-back"}


@pytest.mark.parametrize("is_executed", [False, True])
def test_token_without_an_answer_is_told_again(world: LastResourceFixture, *, is_executed: bool) -> None:
    txid = abandon(world, b"left")
    world.home.faults["token"].append(lost(is_executed=is_executed))
    resolve(world)
    assert world.home.states() == {txid: "prepared"}
    assert resolve(world) is None
    assert world.home.states() == {txid: "rolled-back"}


def test_two_resolvers_that_draw_at_once_both_prove(world: LastResourceFixture) -> None:
    resolve(world)
    txid = abandon(world, b"left")
    with at_moment("resolver.token_drawn", lambda: resolve(world)):
        assert resolve(world) is None
    assert world.home.states() == {txid: "rolled-back"}


def test_resolver_draws_every_minute_without_a_reason(world: LastResourceFixture) -> None:
    resolver, drawn = world.resolver(), []
    for seconds in (0.0, DRAW_EVERY_S / 2, DRAW_EVERY_S / 2, DRAW_EVERY_S):
        world.home.clock.advance(seconds)
        resolver._resource_resolvers[0]._clock = world.home.clock
        resolver.run_once()
        drawn.append(world.home.tokens[world.resource.uuid or ""])
    assert drawn[0] == drawn[1]
    assert len(set(drawn[1:])) == 3


# --- the owner asks ---------------------------------------------------------------------------------------------------


def lost_before_commit(world: LastResourceFixture) -> None:
    """A block whose COMMIT undid itself, and did not say so; and whose session has ended."""
    with world.block(timeout=2.0) as tx:
        world.insert(tx, b"1")
        connection = world.opened[-1]

        class _UndoneError(sqlite3.OperationalError):
            def __str__(self) -> str:
                connection.close()
                return "disk I/O error"

        connection.fail_before = _UndoneError()


def test_owner_that_finds_no_marker_draws_a_token(world: LastResourceFixture) -> None:
    with pytest.raises(RolledBackError):
        lost_before_commit(world)
    assert len(world.home.tokens) == 1


def test_owner_in_a_copy_learns_nothing_from_it(world: LastResourceFixture) -> None:
    resolve(world)
    another_goes_on(world)
    with pytest.raises(OutcomeUnknownError):
        lost_before_commit(world)
    assert "rolled-back" not in world.home.states().values()
