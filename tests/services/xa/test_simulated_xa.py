"""The simulated XA database answers as the real MariaDB does: the same calls on both, kills and crashes included."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import MySQLdb
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from tools.simulated.xa_answers import DEADLOCK, LOST, SimulatedError
from tools.simulated.xa_database import SimulatedSession, SimulatedXADatabase
from txmq.testing.eventually import eventually
from txmq.testing.processes.database_programs import Ability
from txmq.testing.processes.mariadb import MariaDB
from txmq.xa.database.mysql_server import listed_xids, xa
from txmq.xid import Xid

pytestmark = pytest.mark.needs(Ability.ATTACHED_XA)  # what is simulated is MariaDB
EXAMPLES, STEPS = 30, 40  # about 8 s; 250 examples have been run without a difference
SESSIONS_MAX, CRASHES_MAX = 4, 2
KEYS = 4
VERBS = ("START", "END", "PREPARE", "COMMIT", "ROLLBACK", "COMMIT ONE PHASE")
LOST_CODES = frozenset({2006, 2013, 1927})
_numbers = itertools.count(1)


class Pair:
    """One session, real and simulated."""

    def __init__(self, real: Any, simulated: SimulatedSession) -> None:
        self.real, self.simulated, self.number = real, simulated, real.thread_id()


def answer_of(call: Callable[[], object]) -> int:
    """0, or the number of the error."""
    try:
        call()
    except SimulatedError as error:
        return error.code
    except MySQLdb.Error as error:
        code: int = error.args[0]
        return LOST if code in LOST_CODES else code
    return 0


class Comparison(RuleBasedStateMachine):
    """Calls on sessions of both servers; every answer, XA RECOVER and the committed rows must be the same."""

    server: ClassVar[MariaDB]
    said: ClassVar[set[tuple[str, int]]] = set()  # which answers have been compared

    def __init__(self) -> None:
        super().__init__()
        self.model = SimulatedXADatabase()
        self.model.survives = self._came_back
        self.pairs: list[Pair] = []
        self.crashes = 0
        self.came_back: set[Xid] = set()
        number = next(_numbers)
        self.xids = [Xid(1, b"g%d" % number, b"%d" % branch) for branch in range(3)]
        self.first_key = number * KEYS
        self.observer = self.server.connect(autocommit=True)

    def _came_back(self, xid: Xid) -> bool:
        return xid in self.came_back

    # --- the calls -----------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.pairs) < SESSIONS_MAX)
    @rule(autocommit=st.booleans())
    def connect(self, autocommit: bool) -> None:
        self.pairs.append(self.connect_pair(autocommit))

    @precondition(lambda self: self.pairs)
    @rule(which=st.integers(0, SESSIONS_MAX - 1))
    def disconnect(self, which: int) -> None:
        self.close_pair(self.pairs.pop(which % len(self.pairs)))

    @precondition(lambda self: self.pairs)
    @rule(which=st.integers(0, SESSIONS_MAX - 1))
    def kill_session(self, which: int) -> None:
        pair = self.pairs[which % len(self.pairs)]
        if not pair.simulated.is_over:
            self._observe(f"KILL {pair.number}")
            assert self.model.kill(pair.simulated.number)
            self._wait_for_the_end_of(pair)

    @precondition(lambda self: self.pairs)
    @rule(
        which=st.integers(0, SESSIONS_MAX - 1),
        verb=st.sampled_from(VERBS),
        branch=st.integers(0, 2),
    )
    def xa_call(self, which: int, verb: str, branch: int) -> None:
        self.xa(self.pairs[which % len(self.pairs)], verb, self.xids[branch])

    @precondition(lambda self: self.pairs)
    @rule(which=st.integers(0, SESSIONS_MAX - 1), branch=st.integers(0, 2), keys=st.lists(st.integers(0, KEYS - 1)))
    def whole_branch(self, which: int, branch: int, keys: list[int]) -> None:
        """What a single call at a time seldom reaches: a prepared branch."""
        pair, xid = self.pairs[which % len(self.pairs)], self.xids[branch]
        self.xa(pair, "START", xid)
        for key in keys[:3]:
            self.insert_row(pair, key)
        self.xa(pair, "END", xid)
        self.xa(pair, "PREPARE", xid)

    @precondition(lambda self: any(pair.simulated.branch for pair in self.pairs))
    @rule(which=st.integers(0, SESSIONS_MAX - 1), verb=st.sampled_from(VERBS))
    def own_branch(self, which: int, verb: str) -> None:
        """A call on the branch that a session has."""
        pairs = [pair for pair in self.pairs if pair.simulated.branch]
        pair = pairs[which % len(pairs)]
        assert pair.simulated.branch is not None
        self.xa(pair, verb, pair.simulated.branch.xid)

    @precondition(lambda self: self.model.prepared_xids())
    @rule(which=st.integers(0, 2), verb=st.sampled_from(["COMMIT", "ROLLBACK", "COMMIT ONE PHASE"]))
    def resolve(self, which: int, verb: str) -> None:
        """What a resolver does: somebody else's prepared branch, on a new connection in autocommit."""
        xids = sorted(self.model.prepared_xids())
        pair = self.connect_pair(autocommit=True)
        self.xa(pair, verb, xids[which % len(xids)])
        self.close_pair(pair)

    @precondition(lambda self: self.pairs)
    @rule(which=st.integers(0, SESSIONS_MAX - 1), key=st.integers(0, KEYS - 1))
    def insert(self, which: int, key: int) -> None:
        self.insert_row(self.pairs[which % len(self.pairs)], key)

    @precondition(lambda self: self.pairs)
    @rule(which=st.integers(0, SESSIONS_MAX - 1), verb=st.sampled_from(["begin", "commit", "rollback"]))
    def local_call(self, which: int, verb: str) -> None:
        pair = self.pairs[which % len(self.pairs)]
        self._compare(verb, lambda: pair.real.query(verb.upper()), getattr(pair.simulated, verb))

    @precondition(lambda self: self.may_crash)
    @rule()
    def crash(self) -> None:
        self.crashes += 1
        may_come_back = self._branches_rolled_back()
        self.observer.close()
        self.server.restart()
        self.observer = self.server.connect(autocommit=True)
        self.came_back = self._listed() & may_come_back
        self.model.crash()
        self.model.start()
        self._agree()
        # What came back is the disk's choice; the next calls must not hang on it.
        session = self.model.connect(autocommit=True)
        for xid in self.came_back:
            self._roll_back_again(session, xid)
        self._force()
        session.close()

    def _roll_back_again(self, session: SimulatedSession, xid: Xid) -> None:
        self._compare("ROLLBACK", lambda: self._observe(xa("ROLLBACK", xid)), lambda: session.xa_rollback(xid))

    def _force(self) -> None:
        self._observe("INSERT INTO force_log VALUES ()")
        self.model.force()

    # --- the comparison ------------------------------------------------------------------------------------------

    def connect_pair(self, autocommit: bool) -> Pair:
        real = self.server.connect(autocommit=autocommit, init_command="SET innodb_lock_wait_timeout = 0")
        return Pair(real, self.model.connect(autocommit=autocommit))

    @property
    def may_crash(self) -> bool:
        """Whether a crash, which takes long, would show anything."""
        return self.crashes < CRASHES_MAX and bool(self.model.prepared_xids() or self._branches_rolled_back())

    def _branches_rolled_back(self) -> set[Xid]:
        return self.model.undurable_rollbacks()

    def xa(self, pair: Pair, verb: str, xid: Xid) -> None:
        word, _, rest = verb.partition(" ")
        calls: dict[str, Callable[[], None]] = {
            "START": lambda: pair.simulated.xa_start(xid),
            "END": lambda: pair.simulated.xa_end(xid),
            "PREPARE": lambda: pair.simulated.xa_prepare(xid),
            "COMMIT": lambda: pair.simulated.xa_commit(xid),
            "COMMIT ONE PHASE": lambda: pair.simulated.xa_commit(xid, one_phase=True),
            "ROLLBACK": lambda: pair.simulated.xa_rollback(xid),
        }
        self._compare(verb, lambda: pair.real.query(f"{xa(word, xid)} {rest}"), calls[verb])

    def insert_row(self, pair: Pair, key: int) -> None:
        number = self.first_key + key
        self._compare(
            "insert",
            lambda: pair.real.query(f"INSERT INTO t VALUES ({number})"),
            lambda: pair.simulated.insert("t", number),
        )

    def _compare(self, name: str, real: Callable[[], object], simulated: Callable[[], object]) -> None:
        expected, found = answer_of(real), answer_of(simulated)
        assert (name, found) == (name, expected), f"{name}: simulated {found}, real {expected}"
        self.said.add((name, expected))
        self._agree()

    def _agree(self) -> None:
        assert set(self.model.prepared_xids()) == self._listed()
        rows = self._observe(f"SELECT id FROM t WHERE id BETWEEN {self.first_key} AND {self.first_key + KEYS - 1}")
        assert {number for _, number in self.model.committed} == {number for (number,) in rows}

    def _listed(self) -> set[Xid]:
        return set(listed_xids(self.observer, is_mariadb=True))

    def _observe(self, statement: str) -> list[tuple[Any, ...]]:
        cursor = self.observer.cursor()
        cursor.execute(statement)
        return list(cursor.fetchall()) if cursor.description is not None else []

    def close_pair(self, pair: Pair) -> None:
        was_over = pair.simulated.is_over  # and its number may be somebody else's by now
        pair.real.close()
        pair.simulated.close()
        if not was_over:
            self._wait_for_the_end_of(pair)

    def _wait_for_the_end_of(self, pair: Pair) -> None:
        gone = f"SELECT 1 FROM information_schema.processlist WHERE id = {pair.number}"
        eventually(lambda: not self._observe(gone), "the server has ended the session")
        self._agree()

    def teardown(self) -> None:
        """Leave nothing prepared for the next example."""
        for pair in self.pairs:
            self.close_pair(pair)
        for xid in self._listed():
            answer_of(lambda xid=xid: self.observer.query(xa("ROLLBACK", xid)))  # type: ignore[misc]
        assert self._listed() == set()
        self.observer.query("INSERT INTO force_log VALUES ()")
        self.observer.close()


@pytest.fixture
def server(mariadb: MariaDB) -> MariaDB:
    mariadb.execute("CREATE TABLE IF NOT EXISTS t (id INT PRIMARY KEY) ENGINE=InnoDB")
    mariadb.execute("CREATE TABLE IF NOT EXISTS force_log (id INT AUTO_INCREMENT PRIMARY KEY) ENGINE=InnoDB")
    Comparison.server = mariadb
    Comparison.said.clear()
    return mariadb


def test_the_simulated_database_answers_as_the_real_one(server: MariaDB) -> None:
    run_state_machine_as_test(
        Comparison,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate,),  # shrinking restarts the server hundreds of times
        ),
    )
    assert {("COMMIT", 0), ("ROLLBACK", 0), ("PREPARE", 0)} <= Comparison.said


def test_the_quirks_are_compared_one_by_one(server: MariaDB) -> None:
    comparison = Comparison()
    first, second, third = comparison.xids
    plain, other = comparison.connect_pair(autocommit=False), comparison.connect_pair(autocommit=False)
    comparison.xa(plain, "START", first)
    comparison.xa(plain, "END", second)  # not known by that name
    comparison.insert_row(plain, 0)
    comparison.xa(other, "START", first)  # known
    comparison.xa(other, "START", second)
    comparison.insert_row(other, 0)  # locked
    comparison.xa(plain, "END", first)
    comparison.insert_row(plain, 1)  # not any more
    comparison.xa(plain, "PREPARE", second)
    comparison.xa(plain, "COMMIT", first)  # not yet
    comparison.xa(plain, "PREPARE", first)
    comparison.xa(plain, "COMMIT ONE PHASE", first)
    comparison.insert_row(plain, 1)
    comparison.xa(plain, "COMMIT", second)  # has its own in hand
    settler = comparison.connect_pair(autocommit=True)
    comparison.xa(settler, "COMMIT", first)  # its owner lives
    comparison.close_pair(plain)
    comparison.xa(settler, "COMMIT ONE PHASE", first)
    comparison.xa(settler, "COMMIT", first)
    comparison.xa(settler, "COMMIT", first)
    comparison.insert_row(other, 0)  # there already
    comparison.xa(other, "END", second)
    comparison.xa(other, "PREPARE", second)  # although two statements failed
    comparison.close_pair(other)
    comparison.xa(settler, "ROLLBACK", second)  # read-only: ended, with an error
    comparison.xa(settler, "START", third)
    comparison.xa(settler, "END", third)
    comparison.xa(settler, "PREPARE", third)
    comparison.xa(settler, "ROLLBACK", third)
    undurable = comparison.connect_pair(autocommit=False)
    comparison.xa(undurable, "START", third)
    comparison.insert_row(undurable, 3)
    comparison.xa(undurable, "END", third)
    comparison.xa(undurable, "PREPARE", third)
    comparison.close_pair(undurable)
    comparison.xa(settler, "ROLLBACK", third)
    comparison.crash()  # takes the rollback back
    comparison.teardown()
    assert {
        ("END", 1397), ("START", 1440), ("insert", 1205), ("insert", 1399), ("PREPARE", 1397), ("COMMIT", 1399),
        ("COMMIT ONE PHASE", 1398), ("COMMIT", 1400), ("COMMIT", 1397), ("COMMIT", 0), ("insert", 1062), ("PREPARE", 0),
        ("ROLLBACK", 1402), ("ROLLBACK", 0),
    } <= Comparison.said  # fmt: skip


def test_deadlock_victim_answers_alike(server: MariaDB) -> None:
    """Two sessions that lock each other's row: which one dies is the server's choice, what it answers then is not."""
    comparison = Comparison()
    server.execute(f"INSERT INTO t VALUES ({comparison.first_key}), ({comparison.first_key + 1})")
    sessions = [server.connect() for _ in range(2)]
    for number, session in enumerate(sessions):
        session.query(xa("START", comparison.xids[number]))
        _lock(session, comparison.first_key + number)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(answer_of, lambda: _lock(sessions[0], comparison.first_key + 1))
        here = answer_of(lambda: _lock(sessions[1], comparison.first_key))
        answers = [waiting.result(), here]
    assert sorted(answers) == [0, DEADLOCK]
    victim = answers.index(DEADLOCK)
    xid, real, model = comparison.xids[victim], sessions[victim], SimulatedXADatabase().connect()
    model.xa_start(xid)
    assert answer_of(model.become_deadlock_victim) == DEADLOCK
    calls: list[tuple[str, Callable[[], object]]] = [
        ("END", lambda: model.xa_end(xid)),
        ("PREPARE", lambda: model.xa_prepare(xid)),
        ("ROLLBACK", lambda: model.xa_rollback(xid)),
        ("END", lambda: model.xa_end(xid)),
    ]
    for verb, simulated in calls:
        assert (verb, answer_of(simulated)) == (verb, answer_of(lambda verb=verb: real.query(xa(verb, xid))))  # type: ignore[misc]
    for session in sessions:
        session.close()
    comparison.teardown()


def _lock(session: Any, number: int) -> None:
    session.query(f"SELECT id FROM t WHERE id = {number} FOR UPDATE")
    session.store_result()
