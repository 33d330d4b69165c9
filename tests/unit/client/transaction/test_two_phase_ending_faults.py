"""XA over simulated MariaDB: every call of a database fails in every way, with every trouble at the broker besides.

Whatever happens, when all are back: both databases and the log hold the same, and the caller was told the truth.
"""

from __future__ import annotations

import itertools
from contextlib import suppress
from typing import Final

import pytest

from tests.crash_points import at_moment
from tests.unit.xa.xa_support import Notes
from tools.simulated.broker import SimulatedBroker
from tools.simulated.faults import Fault as HomeFault
from tools.simulated.faults import lost
from tools.simulated.xa_answers import Fault, SimulatedError
from tools.simulated.xa_database import SimulatedSession, SimulatedXADatabase
from tools.simulated.xa_resource import SimulatedXAResource
from txmq.client.transaction import block as module
from txmq.client.transaction.block import Transaction
from txmq.errors import BrokerAwayError, OutcomeUnknownError, OverloadedError, RolledBackError, TxmqError
from txmq.model import Outcome
from txmq.xa.resolver import Resolver

CALLS: Final = ("xa_start", "insert", "xa_end", "xa_prepare", "xa_commit", "xa_rollback", "touch")
REFUSED, NEVER, UNHEARD = HomeFault(OverloadedError("")), lost(is_executed=False), lost(is_executed=True)
HOME: Final[dict[str, dict[str, list[HomeFault]]]] = {
    "well": {},
    "decide refused": {"decide": [REFUSED]},
    "decide lost once": {"decide": [NEVER]},
    "decide unheard once": {"decide": [UNHEARD]},
    "decide never arrives": {"decide": [NEVER] * 5000},
    "decide never answered": {"decide": [UNHEARD] * 5000},
    "decide refused, no fence": {"decide": [REFUSED], "rollback": [NEVER]},
    "decide unheard, then refused": {"decide": [UNHEARD, REFUSED]},
    "decide unheard, refused, no fence": {"decide": [UNHEARD, REFUSED], "rollback": [NEVER]},
    "complete lost": {"complete": [NEVER] * 2},
    "no fence": {"rollback": [NEVER]},
}
# The first branch runs in the caller's thread, the second in one of its own.
CELLS = [
    *itertools.product(["well"], [0], CALLS, [None, *Fault]),
    *itertools.product(HOME, [1], CALLS, [None, *Fault]),
]


class Pair:
    """Two databases, a broker, one client process."""

    def __init__(self) -> None:
        self.home = SimulatedBroker()
        self.databases = [SimulatedXADatabase(), SimulatedXADatabase()]
        self.resources = self.new_resources()
        for resource in self.resources:
            resource.install()
        self.notes = Notes(self.home)

    def new_resources(self) -> list[SimulatedXAResource]:
        """The databases as another process sees them."""
        return [
            SimulatedXAResource(name, database, f"{number:032x}", self.home.clock.now_ms)
            for number, (name, database) in enumerate(zip("ab", self.databases, strict=True), 1)
        ]

    def fail(self, number: int, call: str, fault: Fault | None) -> None:
        """The next such call fails."""
        planned = [fault] if fault is not None else []

        def ask(_session: SimulatedSession, name: str) -> Fault | None:
            return planned.pop() if planned and name == call else None

        self.databases[number].fault = ask

    def transfer(self, value: bytes) -> Transaction:
        """A row in each, and a message."""
        with Transaction(self.home, self.home, self.resources, 5.0) as tx:
            for resource in self.resources:
                tx.connection(resource).insert("rows", value)
            tx.send("orders", value)
        return tx

    def restart(self) -> None:
        """What died is back."""
        for database in self.databases:
            if not database.is_up:
                database.start()

    def rows(self, number: int) -> list[object]:
        """Of one database."""
        return sorted(key for table, key in self.databases[number].committed if table == "rows")  # type: ignore[type-var]

    def resolve(self, resolver: Resolver) -> None:
        """A few rounds, with everybody there."""
        self.home.faults.clear()
        for number in (0, 1):
            self.fail(number, "", None)
        for _ in range(4):
            self.restart()
            self.home.clock.advance(1.0)
            resolver.run_once()

    def check(self) -> None:
        """The same everywhere, and nothing in doubt."""
        assert self.rows(0) == self.rows(1) == sorted(filter(None, self.home.values("orders")))
        assert [database.prepared_xids() for database in self.databases] == [[], []]
        assert not {"decided", "prepared"} & set(self.home.states().values())


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Pair:
    pair = Pair()
    monkeypatch.setattr(module, "resolver_of", lambda _client: pair.notes)
    return pair


@pytest.mark.parametrize(("home", "number", "call", "fault"), CELLS)
def test_any_failure_leaves_rows_equal_messages_and_a_true_outcome(
    pair: Pair, home: str, number: int, call: str, fault: Fault | None
) -> None:
    pair.transfer(b"before")
    for verb, faults in HOME[home].items():
        pair.home.faults[verb].extend(faults)
    pair.fail(number, call, fault)
    told = Outcome.ROLLED_BACK
    try:
        told = pair.transfer(b"x").outcome
    except OutcomeUnknownError:
        told = Outcome.UNKNOWN
    except (RolledBackError, SimulatedError):
        pass
    assert call == "xa_start" or fault is not None or home != "well" or told is Outcome.COMMITTED
    pair.restart()
    for database in pair.databases:
        database.crash()  # what was not durable comes back
    pair.resolve(pair.notes.resolver)
    pair.check()
    is_there = b"x" in pair.rows(0)
    assert told is Outcome.UNKNOWN or is_there is (told is Outcome.COMMITTED)
    with suppress(TxmqError):
        assert pair.transfer(b"after").outcome is Outcome.COMMITTED
    pair.check()


@pytest.mark.parametrize("is_alive", [False, True])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("fault", list(Fault))
def test_a_resolver_whose_database_fails_under_it_goes_on(
    pair: Pair, call: str, fault: Fault, *, is_alive: bool
) -> None:
    """The owner could not finish; the resolver of another process meets the same troubles, and ends well."""
    pair.home.faults["decide"].extend([UNHEARD] * 5000)
    with pytest.raises(OutcomeUnknownError):
        pair.transfer(b"x")
    if not is_alive:
        pair.home.owner_dies()
    resolver = Resolver(pair.home, pair.new_resources(), pair.home.clock)
    pair.home.faults.clear()
    for number in (0, 1):
        pair.fail(number, call, fault)
    resolver.run_once()
    pair.resolve(resolver)
    pair.check()
    assert pair.rows(0) == [b"x"]


def test_broker_silent_during_prepare_is_not_sent_decide(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(_deadline: float) -> None:
        raise BrokerAwayError("does not answer")

    def fall_silent() -> None:
        monkeypatch.setattr(pair.home.control, "reach", silent)

    with at_moment("client.xa.all_prepared", fall_silent), pytest.raises(RolledBackError) as caught:
        pair.transfer(b"x")
    assert isinstance(caught.value, BrokerAwayError)
    assert pair.home.requests == ["rollback"]
    pair.check()
    assert pair.rows(0) == []
