"""One drainer at a broker that takes numbers, answers late or refuses; the tables are SQLite's."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import count
from typing import Any

import pytest

from txmq.errors import (
    ConnectionLostError,
    ForbiddenError,
    OutOfTurnError,
    RequestTimeoutError,
    TooLargeError,
    TxmqError,
    UnknownTopicError,
)
from txmq.protocol.commands import TransactionRequest
from txmq.testing.simulated.clock import SimClock
from txmq.xa.database.dialects import SQLITE
from txmq.xa.database.fingerprint import StrangeServerError
from txmq.xa.database.marker_table import MarkerTable
from txmq.xa.database.outbox_keys import OutboxKey
from txmq.xa.database.outbox_series import NUMBERED_MAX, SeriesChangedError
from txmq.xa.database.outbox_tables import OutboxSize, OutboxTables
from txmq.xa.last_resource import drainer
from txmq.xa.last_resource.drainer import (
    ALARM_EVERY_S,
    FORBIDDEN_PARKED_S,
    FORBIDDEN_RETRY_S,
    IN_FLIGHT_BYTES_MAX,
    PAGE_SIZE_MAX,
    PAGE_SIZE_MIN,
    WAIT_S,
    Drainer,
    DrainError,
)
from txmq.xa.last_resource.outbox import TRIPPED_S_MIN, OutboxOptions, OutboxState
from txmq.xa.last_resource.resolving import ResolvingConnection
from txmq.xa.last_resource.turns import TurnDrainer

SERIES, UUID = "5" * 32, "e" * 32
ANSWERS_AFTER_S = 0.001


class FakeAnswer:
    """To one row, a moment later or ``late``."""

    def __init__(self, clock: SimClock, error: TxmqError | None, *, late: bool) -> None:
        self._clock, self._error, self.late = clock, error, late
        self._at = clock.monotonic() + ANSWERS_AFTER_S

    @property
    def done(self) -> bool:
        return not self.late and self._clock.monotonic() >= self._at

    def look(self) -> None:
        """It comes by itself."""

    def result(self, timeout: float | None = None) -> bytes:
        if not self.done:
            self._clock.advance(ANSWERS_AFTER_S if timeout is None or not self.late else timeout)
        if not self.done:
            raise RequestTimeoutError("later")
        if self._error is not None:
            raise self._error
        return b""


class FakeBroker:
    """A broker, its session and the connection to it; rows wait there (``late``), or are refused for good."""

    def __init__(self) -> None:
        self.clock = SimClock()
        self.pages: list[list[str]] = []
        self.sent_bytes: list[int] = []
        self.sent_at: list[float] = []
        self.taken: list[str] = []
        self.late: set[str] = set()
        self.gone: set[str] = set()
        self.forbidden: set[str] = set()  # to whoever sends now
        self.is_lost = False
        self.answers: dict[str, FakeAnswer] = {}
        self.finished_through, self._numbers = 0, count(1)
        self.open = Counter[int]()
        self.live: object = object()
        self.request_size_bytes_max, self.large = 16 << 20, set[str]()
        self.cluster = 0

    @property
    def control(self) -> Any:
        return self

    @property
    def session(self) -> Any:
        return self

    def next_txid(self) -> tuple[int, str]:
        counter = next(self._numbers)
        self.open[counter] += 1
        return counter, f"tx-{counter}"

    def finished(self, counter: int) -> None:
        self.open[counter] -= 1

    def call(self, verb: str, *arguments: str | int, **_: Any) -> bytes:
        assert (verb, *arguments) == ("drained", SERIES)
        last = len(self.taken)
        rows = {number: row for number, row in enumerate(self.taken, 1) if number > last - NUMBERED_MAX}
        return json.dumps({"last": last, "rows": rows}).encode()

    def submit(self, verb: str, *arguments: str | int, **_: Any) -> Any:
        raise AssertionError((verb, arguments))

    def submit_transactions(
        self, requests: Sequence[TransactionRequest], timeout: float, over: object
    ) -> list[FakeAnswer]:
        if over is not self.live:
            raise ConnectionLostError("made anew")
        self.pages.append([str(fields["row"]) for _, fields, _ in requests])
        self.sent_at.append(self.clock.monotonic())
        self.sent_bytes.append(sum(len(buffer) for _, _, body in requests for buffer in body or ()))
        if self.is_lost:
            raise ConnectionLostError("planned")
        for _, fields, body in requests:
            is_known = fields["row"] == "void" or fields["row"] in self.taken
            assert is_known or body, "a row is taken without its messages"
        self.large |= {
            str(f["row"]) for _, f, body in requests if sum(map(len, body or ())) > self.request_size_bytes_max
        }
        self.answers |= {
            row: FakeAnswer(self.clock, self._taken(row, int(fields["number"])), late=row in self.late)
            for row, (_, fields, _) in zip(self.pages[-1], requests, strict=True)
        }
        return [self.answers[row] for row in self.pages[-1]]

    def _taken(self, row: str, number: int) -> TxmqError | None:
        if row in self.large:
            return TooLargeError(row)
        if row in self.forbidden:
            return ForbiddenError("shop may not write topic orders")
        if number != len(self.taken) + 1:
            return None if self.taken[number - 1 : number] == [row] else OutOfTurnError(f"{number}")
        if row in self.gone:
            return UnknownTopicError("gone")
        self.taken.append(row)
        return None


class World:
    """An outbox and its drainer."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection, self.broker = connection, FakeBroker()
        table = MarkerTable("txmq_marker", SQLITE, "?")
        table.require_known = lambda *_: None  # type: ignore[method-assign]  # a server's, not this file's
        self.outbox = OutboxTables.beside(table)
        self.outbox.create(connection, SERIES)
        self.database = ResolvingConnection(connection, table, UUID, self.outbox)
        self.state = OutboxState(OutboxOptions(), self.broker.clock, "me")
        self.drainer = TurnDrainer(self.broker, self.state, UUID, "shop", self.broker.clock)

    def waiting(self, *rows: str, size: int = 1, topic: str = "orders", key: str = "") -> None:
        """Rows that are committed, each of its own key, or all of one."""
        for row in rows:
            self.connection.execute("BEGIN")
            self.outbox.add(self.connection, row, b"x" * size, [OutboxKey(f"{topic}-0", key or row)])
            self.connection.commit()

    def left(self) -> list[str]:
        return [row_id for row_id, *_ in self.outbox.listed(self.connection, 10_000)]


@pytest.fixture
def world() -> Iterator[World]:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        yield World(connection)


def test_rows_go_out_in_pages_and_in_order(world: World) -> None:
    rows = [f"row-{number}" for number in range(3 * NUMBERED_MAX)]
    world.waiting(*rows)
    assert not world.drainer.round(world.database)
    assert (world.broker.taken, world.left()) == (rows, [])
    assert {len(page) for page in world.broker.pages} == {PAGE_SIZE_MAX}
    assert not +world.broker.open  # the broker may forget all of them


@pytest.fixture
def smaller_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the ``world`` that is asked for after it."""
    monkeypatch.setattr(drainer, "PAGE_SIZE_MAX", PAGE_SIZE_MIN)


def test_row_that_waits_at_broker_delays_others_once(smaller_pages: None, world: World) -> None:
    rows = [f"row-{number}" for number in range(NUMBERED_MAX)]
    world.waiting(*rows)
    world.broker.late = {"row-0"}
    assert world.drainer.round(world.database)
    assert (world.broker.taken, world.left()) == (rows, ["row-0"])
    assert len(world.broker.sent_at) == NUMBERED_MAX // PAGE_SIZE_MIN
    assert world.broker.sent_at[-1] < 2 * WAIT_S
    world.broker.answers["row-0"].late = False
    assert not world.drainer.round(world.database)
    assert world.left() == []


def test_restored_broker_is_found_behind_row_that_waits(world: World) -> None:
    world.waiting("row-0", "row-1", "row-2")
    world.broker.late = {"row-0"}
    world.drainer.round(world.database)
    assert world.left() == ["row-0"]
    world.broker.taken.clear()
    another = Drainer(world.broker, world.state, UUID, "shop", world.broker.clock)
    with pytest.raises(DrainError, match="took 0 rows, and number 3 has left"):
        another.round(world.database)
    assert world.broker.taken == []


def test_rows_that_a_restored_broker_took_leave_first(world: World) -> None:
    world.waiting("row-0", "row-1", "row-2", "row-3")
    world.broker.late = {"row-0", "row-2"}
    world.drainer.round(world.database)
    assert world.left() == ["row-0", "row-2"]
    del world.broker.taken[1:]  # the copy has the first one
    world.broker.late.clear()
    another = Drainer(world.broker, world.state, UUID, "shop", world.broker.clock)
    another.compare(world.database)  # not to be numbered anew yet
    assert "number 4 has left" in (world.state.problem or "")
    another.round(world.database)
    assert (world.left(), world.broker.taken) == (["row-2"], ["row-0"])
    with pytest.raises(DrainError, match="took 1 rows, and number 4 has left"):
        another.compare(world.database)


def test_rows_are_sent_over_the_connection_that_compared_them(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process stands still behind its numbering: it goes on with a broker that may have been restored."""
    world.waiting("row-0")
    points: list[str] = []

    def connected_anew(point: str) -> None:
        if not points:
            world.broker.live = object()
        points.append(point)

    monkeypatch.setattr(drainer, "crash_point", connected_anew)
    with pytest.raises(ConnectionLostError, match="made anew"):
        world.drainer.round(world.database)
    assert points == ["client.outbox.numbered"]
    assert world.broker.taken == []
    world.drainer.round(world.database)
    assert (world.broker.taken, world.left()) == (["row-0"], [])


@pytest.mark.parametrize("is_compared", [False, True])
def test_rows_numbered_anew_are_not_sent_under_former_series(
    world: World, monkeypatch: pytest.MonkeyPatch, is_compared: bool
) -> None:
    world.waiting("row-0")
    call = world.broker.call

    def then_renumber(*words: Any, **named: Any) -> bytes:
        answer = call(*words, **named)
        world.outbox.begin_series(world.connection, "6" * 32, world.outbox.series(world.connection).name)
        return answer

    if is_compared:
        world.drainer.compare(world.database)
        world.outbox.begin_series(world.connection, "6" * 32, world.outbox.series(world.connection).name)
    else:
        monkeypatch.setattr(world.broker, "call", then_renumber)
    with pytest.raises(SeriesChangedError):
        world.drainer.round(world.database)
    assert world.broker.taken == []


def test_large_rows_do_not_pile_up_in_flight(world: World) -> None:
    size = IN_FLIGHT_BYTES_MAX // 3
    rows = [f"row-{number}" for number in range(12)]
    world.waiting(*rows, size=size)
    world.broker.late = set(rows)
    assert world.drainer.round(world.database)
    assert IN_FLIGHT_BYTES_MAX < sum(world.broker.sent_bytes) <= IN_FLIGHT_BYTES_MAX + size


def test_few_rows_are_sent_behind_refused_one(world: World) -> None:
    rows = [f"row-{number}" for number in range(2 * PAGE_SIZE_MAX)]
    world.waiting(*rows)
    world.broker.gone = {"row-1", "row-3"}
    while world.drainer.round(world.database):
        pass
    assert sorted(set(rows) - set(world.broker.taken)) == world.left() == ["row-1", "row-3"]
    assert [row for row in world.broker.taken if row != "void"] == [row for row in rows if row not in world.left()]
    assert [len(page) for page in world.broker.pages[:3]] == [PAGE_SIZE_MAX, PAGE_SIZE_MIN, PAGE_SIZE_MIN]
    assert not +world.broker.open


@pytest.mark.parametrize("asked", [1, 2])
def test_drainer_that_compares_while_another_drains_finds_nothing_wrong(world: World, asked: int) -> None:
    """Its answers, and what it reads between them, are of different moments."""
    other = Drainer(world.broker, world.state, UUID, "shop", world.broker.clock)
    asks, tell = count(1), world.broker.call

    def call(verb: str, *arguments: str | int, **named: Any) -> bytes:
        answer = tell(verb, *arguments, **named)
        number = next(asks)
        if number == 1 or asked == 2:
            world.broker.call = tell  # type: ignore[method-assign]
            world.waiting(f"row-{number}")
            world.broker.clock.advance(1.0)
            assert not other.round(world.database)
            world.broker.call = call  # type: ignore[method-assign]
        return answer if number == 1 else tell(verb, *arguments, **named)

    world.broker.call = call  # type: ignore[method-assign]
    world.waiting("row-0")
    assert not world.drainer.round(world.database)
    assert world.left() == []
    assert (world.state.problem, len(world.broker.taken)) == (None, 1 + asked)


def test_row_committed_while_others_are_counted_goes_out(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its block adds it before the drainer has its count, which is of a moment before."""
    size = OutboxTables.size

    def then_commit(outbox: OutboxTables, connection: sqlite3.Connection) -> OutboxSize:
        monkeypatch.setattr(OutboxTables, "size", size)
        found = size(outbox, connection)
        world.waiting("row-0")
        world.state.added(1)
        return found

    monkeypatch.setattr(OutboxTables, "size", then_commit)
    world.drainer.round(world.database)
    assert world.broker.taken == ["row-0"]
    assert world.left() == []
    assert not world.drainer.is_due


def test_broker_that_was_away_is_compared_again(world: World) -> None:
    """The database was restored meanwhile, under the same connection: its numbers begin anew."""
    world.waiting("row-0")
    drain_all(world, world.drainer)
    world.connection.execute("UPDATE txmq_marker_outbox_series SET number = 0")
    world.waiting("row-1")
    world.state.added(1)
    world.state.trip()
    with pytest.raises(DrainError, match="was the database restored"):
        world.drainer.round(world.database)
    assert world.broker.taken == ["row-0"]


def test_blocks_try_the_broker_again_though_nothing_is_drained(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """The database is perhaps a copy, which stays so until an operator comes."""

    def strange(_: object) -> None:
        raise StrangeServerError("a copy")

    monkeypatch.setattr(world.database.table, "require_known", strange)
    world.waiting("row-0")
    world.state.trip()
    world.broker.clock.advance(TRIPPED_S_MIN)
    with pytest.raises(StrangeServerError):
        world.drainer.round(world.database)
    assert not world.state.is_tripped
    assert world.broker.taken == []


def test_row_that_the_broker_takes_no_more_is_parked_unsent(world: World) -> None:
    world.waiting("row-0")
    world.waiting("large", size=101)
    world.waiting("row-1")
    world.broker.request_size_bytes_max = 100
    drain_all(world, world.drainer)
    assert states(world) == {"large": "parked"}
    assert world.broker.taken == ["row-0", "void", "row-1"]
    assert max(world.broker.sent_bytes) <= 2


def test_row_that_the_broker_has_goes_without_messages(world: World) -> None:
    """It was sent while the broker took more, and its answer was lost."""
    world.waiting("large", size=101)
    world.outbox.number(world.connection)
    world.broker.taken.append("large")
    world.broker.request_size_bytes_max = 100
    drain_all(world, world.drainer)
    assert (world.left(), world.broker.sent_bytes) == ([], [0])


def test_rows_that_wait_for_long_are_logged_once_a_minute(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """Also while nothing can be sent."""
    world.broker.late = {"row-0"}
    world.waiting("row-0")
    waits_s = OutboxOptions().alarm_after_s

    def alarms(seconds: float, age_s: float) -> int:
        caplog.clear()
        world.connection.execute(f"UPDATE txmq_marker_outbox SET written_ms = {SQLITE.now_ms} - {int(age_s * 1000)}")
        until = world.broker.clock.monotonic() + seconds
        while world.broker.clock.monotonic() < until:
            world.drainer.round(world.database)
            world.broker.clock.advance(1.0)
        found = [record for record in caplog.records if record.getMessage().startswith("outbox: messages wait")]
        assert all(record.levelname == "ERROR" for record in found)
        return len(found)

    assert alarms(5, waits_s - 60.0) == 0
    assert alarms(ALARM_EVERY_S / 2, waits_s + 60.0) == 1
    assert alarms(ALARM_EVERY_S, waits_s + 60.0) == 1


def states(world: World) -> dict[str, str]:
    return {row_id: state for row_id, state, *_ in world.outbox.listed(world.connection, 100)}


def drain_all(world: World, one: Drainer) -> None:
    while one.round(world.database):
        pass


def test_row_that_another_user_may_send_is_left_to_him(world: World) -> None:
    """Two services, users of their own, share a database; both drain."""
    world.waiting("pay-0", topic="payments")
    world.waiting("order-0", "order-1", topic="orders", key="k")
    world.waiting("pay-1", topic="payments", key="k")
    world.waiting("order-2", topic="orders")
    world.broker.forbidden = {"order-0", "order-1", "order-2"}
    drain_all(world, world.drainer)
    assert [row for row in world.broker.taken if row != "void"] == ["pay-0", "pay-1"]
    assert states(world) == dict.fromkeys(["order-0", "order-1", "order-2"], "waiting")
    world.broker.forbidden.clear()
    other = OutboxState(OutboxOptions(), world.broker.clock, "the other service")
    drain_all(world, Drainer(world.broker, other, UUID, "shop", world.broker.clock))
    assert world.left() == [], "he has the turn at once"
    assert world.broker.taken[-3:] == ["order-0", "order-1", "order-2"]


def test_row_that_nobody_may_send_is_parked_late(world: World) -> None:
    world.waiting("order-0", topic="orders")
    world.waiting("pay-0", topic="payments")
    world.broker.forbidden = {"order-0"}
    drain_all(world, world.drainer)
    assert "pay-0" in world.broker.taken
    pages = len(world.broker.pages)
    for _ in range(10):
        drain_all(world, world.drainer)
        world.broker.clock.advance(FORBIDDEN_RETRY_S / 10)
    assert len(world.broker.pages) <= pages + 2, "it is tried again now and then"
    while states(world) != {"order-0": "parked"}:
        drain_all(world, world.drainer)
        world.broker.clock.advance(600.0)
        assert world.broker.clock.monotonic() < 2 * FORBIDDEN_PARKED_S
    assert world.broker.clock.monotonic() > FORBIDDEN_PARKED_S


def test_row_that_the_broker_has_is_not_parked(world: World) -> None:
    """Another drainer has sent it, and died; this one may not even ask about it."""
    world.waiting("row-0")
    world.outbox.number(world.connection)
    world.broker.taken.append("row-0")
    world.broker.forbidden = {"row-0"}
    with pytest.raises(ForbiddenError):
        world.drainer.round(world.database)
    assert states(world) == {"row-0": "waiting"}
    world.broker.forbidden.clear()
    drain_all(world, world.drainer)
    assert (world.left(), world.broker.taken) == ([], ["row-0"])


def test_row_without_proper_id_is_not_sent(world: World) -> None:
    world.waiting("row-0", "row 1\r\n")
    with pytest.raises(DrainError, match="row 2 has an id that is none"):
        world.drainer.round(world.database)
    assert not world.broker.pages


def test_ids_of_rows_that_were_not_sent_are_finished(world: World) -> None:
    world.waiting("row-0", "row-1")
    world.broker.is_lost = True
    with pytest.raises(ConnectionLostError):
        world.drainer.round(world.database)
    assert not +world.broker.open
    world.broker.is_lost = False
    assert not world.drainer.round(world.database)
    assert (world.broker.taken, world.left()) == (["row-0", "row-1"], [])
