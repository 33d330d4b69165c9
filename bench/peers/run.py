"""A run: all peers are started once, and each work is measured in turns, a round of all peers after the other.

Theory of operation. What a shared machine does then befalls all peers alike, and figures of one round may be set
against each other (``shares.py``). All servers stay up, idle, while one is measured: compilers of Java stay warm.
What a peer does not have, or what is not installed, is a line with its reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.model import Measure, NotMeasuredError, Result, Row, Surroundings
from bench.peers import backlog, orders, queue
from bench.peers.catalogue import OWN
from bench.peers.model import Peer, Running
from bench.peers.own_outbox import own_outbox, woken_outbox
from bench.peers.queues import OWN_QUEUE, QUEUES, Queue
from bench.peers.syncs import syncs_of
from bench.peers.works import WORKS, Pace, Work
from bench.rows.databases import Database, mariadb, postgresql_server
from txmq.testing.bench.limits import cpu_seconds

ROUNDS = 5
SECONDS, QUICK_SECONDS = 1.0, 0.3
ORDERS, BACKLOG, QUEUE, SYNCS = "orders", "backlog", "queue", "syncs"
LAST_RESOURCE, OUTBOX_ALONE = "orders-last-resource", "peer-orders-outbox-alone"
OUTBOX, OUTBOX_WOKEN, OUTBOX_BACKLOG = "orders-outbox", "orders-outbox-woken", "backlog-outbox"
SYNC_UNITS = {"syncs": "per message", "syncs, tx": "per transaction"}
WORK_NAMES = (*(work.name for work in WORKS), ORDERS, BACKLOG, QUEUE, SYNCS)

Say = Callable[[str], None]


class Peers:
    """Servers of a run that could be started, and the reasons why others were not."""

    def __init__(self, peers: Sequence[Peer], directory: Path, stack: ExitStack, say: Say) -> None:
        self.running: dict[str, Running] = {}
        self.missing: dict[str, str] = {}
        self.peers = tuple(peers)
        for peer in peers:
            say(f"starting {peer.title}")
            own = directory / peer.name
            own.mkdir()
            try:
                self.running[peer.name] = stack.enter_context(peer.start(own))
            except NotMeasuredError as error:
                self.missing[peer.name] = str(error)
            except Exception as error:  # noqa: BLE001  one that does not start must not take the others' figures along
                self.missing[peer.name] = f"did not start: {type(error).__name__}: {error}"[:200]

    def at_rest(self, seconds: float) -> float:
        """The share of one processor that all servers use while nothing is asked of them."""
        pids = [pid for running in self.running.values() for pid in running.pids()]
        before = sum(map(cpu_seconds, pids))
        time.sleep(seconds)
        return (sum(map(cpu_seconds, pids)) - before) / seconds

    def of(self, peer: Peer) -> Running:
        """The servers of a peer.

        Raises:
            NotMeasuredError: there are none.
        """
        if peer.name in self.missing:
            raise NotMeasuredError(self.missing[peer.name])
        return self.running[peer.name]


def row_name(peer: Peer, work: str) -> str:
    """The name of a peer's row of a work."""
    return f"{peer.name}-{work}"


def relay_name(peer: Peer) -> str:
    """The name of the row with outbox and relay into a peer."""
    return f"peer-orders-into-{peer.name}"


def backlog_name(peer: Peer) -> str:
    """The name of the row with a backlog that goes into a peer."""
    return f"peer-backlog-into-{peer.name}"


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a run.

    Attributes:
        rounds: how often each work is measured.
        seconds: about how long one measure takes.
        directory: empty, on the disk that is measured.
    """

    peers: Sequence[Peer]
    works: Sequence[str]
    rounds: int
    seconds: float
    directory: Path


def run(plan: Plan, results: list[Result], say: Say) -> float:
    """Measure into ``results``, in the order of works, then of peers; what there is stays when this is interrupted.

    Returns:
        The share of one processor that all servers together used at the end, when nothing was asked of them.
    """
    with ExitStack() as stack:
        started = Peers(plan.peers, plan.directory, stack, say)
        for rows in groups(started, plan, stack):
            group = [Result(row) for row in rows]
            results += group
            alternate(group, plan, say)
        return started.at_rest(plan.seconds)


def groups(started: Peers, plan: Plan, stack: ExitStack) -> Iterator[Sequence[Row]]:
    """Rows that take turns, one group a work; the database is started when its work begins."""
    pace = Pace(plan.seconds)
    for work in WORKS:
        if work.name in plan.works:
            yield [work_row(peer, work, partial(started.of, peer), pace) for peer in started.peers]
    if ORDERS in plan.works or BACKLOG in plan.works:
        database = _database(plan.directory, stack)
        if ORDERS in plan.works:
            yield list(_order_rows(started, database, pace))
        if BACKLOG in plan.works:
            rows = int(backlog.ROWS * min(1.0, plan.seconds / SECONDS))
            yield list(_backlog_rows(started, database, rows))
    if QUEUE in plan.works:
        yield list(_queue_rows(started, _postgresql(plan.directory, stack), pace))
    if SYNCS in plan.works:
        yield [_syncs_row(started, peer) for peer in started.peers]


def work_row(peer: Peer, work: Work, running: Callable[[], Running], pace: Pace) -> Row:
    """The row of a peer and a work; ``running`` gives its servers when the row is opened."""

    @contextmanager
    def opened(_: Surroundings) -> Iterator[Measure]:
        with work.open(peer, running(), pace) as measure:
            yield measure

    return Row(row_name(peer, work.name), f"{peer.title}: {work.title}", opened, work.units)


def _syncs_row(started: Peers, peer: Peer) -> Row:
    opened = partial(_syncs, started, peer)
    return Row(row_name(peer, SYNCS), f"{peer.title}: forced writes", opened, SYNC_UNITS, repeats=1)


@contextmanager
def _syncs(started: Peers, peer: Peer, surroundings: Surroundings) -> Iterator[Measure]:
    running = started.of(peer)
    yield lambda: syncs_of(peer, running, surroundings.directory)


def _database(directory: Path, stack: ExitStack) -> Database | str:
    """MariaDB, or why there is none."""
    own = directory / "database"
    own.mkdir()
    try:
        return stack.enter_context(mariadb(own))
    except NotMeasuredError as error:
        return str(error)


def _order_rows(started: Peers, database: Database | str, pace: Pace) -> Iterator[Row]:
    def row(name: str, title: str, make: orders.Make) -> Row:
        opened = partial(_orders, make, database, pace)
        return Row(name, f"row and message (MariaDB): {title}", opened, orders.UNITS)

    yield row(OUTBOX_ALONE, "row + outbox row in one commit, no message moved", orders.outbox_alone)
    if OWN in started.peers:
        yield row(LAST_RESOURCE, "txmq last resource", partial(_with_own, started, orders.last_resource))
        yield row(OUTBOX, "txmq outbox, its relay in a process of its own", partial(_with_own, started, own_outbox))
        yield row(OUTBOX_WOKEN, "txmq outbox, its relay in the service", partial(_with_own, started, woken_outbox))
    for peer in started.peers:
        yield row(relay_name(peer), f"outbox and relay into {peer.title}", partial(_with_relay, started, peer))


_OwnMake = Callable[[Peer, Running, Database, ExitStack], orders.Service]


def _with_own(started: Peers, make: _OwnMake, database: Database, stack: ExitStack) -> orders.Service:
    return make(OWN, started.of(OWN), database, stack)


def _with_relay(started: Peers, peer: Peer, database: Database, stack: ExitStack) -> orders.Service:
    return orders.outbox(peer, started.of(peer), database, stack)


@contextmanager
def _orders(make: orders.Make, database: Database | str, pace: Pace, _: Surroundings) -> Iterator[Measure]:
    if isinstance(database, str):
        raise NotMeasuredError(database)
    with ExitStack() as stack:
        yield orders.measured(make(database, stack), pace)


def _backlog_rows(started: Peers, database: Database | str, rows: int) -> Iterator[Row]:
    def row(name: str, title: str, make: backlog.Make) -> Row:
        @contextmanager
        def opened(_: Surroundings) -> Iterator[Measure]:
            if isinstance(database, str):
                raise NotMeasuredError(database)
            with make(database, rows) as measure:
                yield measure

        return Row(name, f"backlog of {rows:,} rows (MariaDB): {title}", opened, backlog.UNITS, repeats=1)

    if OWN in started.peers:
        yield row(OUTBOX_BACKLOG, "txmq outbox", lambda *given: backlog.into_own(started.of(OWN), *given))
    for peer in started.peers:
        make = partial(_backlog_into, started, peer)
        yield row(backlog_name(peer), f"an unordered relay into {peer.title}", make)


def _backlog_into(started: Peers, peer: Peer, database: Database, rows: int) -> AbstractContextManager[Measure]:
    return backlog.into_peer(peer, started.of(peer), database, rows)


def _postgresql(directory: Path, stack: ExitStack) -> Callable[[], str]:
    """What gives PostgreSQL's address, or raises why there is none."""
    own = directory / "postgresql"
    own.mkdir()
    try:
        server = stack.enter_context(postgresql_server(own))
    except NotMeasuredError as error:
        missing = str(error)

        def refuse() -> str:
            raise NotMeasuredError(missing)

        return refuse
    return lambda: f"postgresql://postgres@127.0.0.1:{server.port}/{server.database}"


def _queue_rows(started: Peers, dsn: Callable[[], str], pace: Pace) -> Iterator[Row]:
    def row(one: Queue) -> Row:
        @contextmanager
        def opened(_: Surroundings) -> Iterator[Measure]:
            address = started.of(OWN).address if one == OWN_QUEUE else ""
            with queue.measured(one, dsn(), address, pace) as measure:
                yield measure

        return Row(one.name, f"row and message (PostgreSQL, asyncpg), until handled: {one.title}", opened, queue.UNITS)

    yield from (row(one) for one in QUEUES if one != OWN_QUEUE or OWN in started.peers)


def alternate(results: Sequence[Result], plan: Plan, say: Say) -> None:
    """Open all rows, then measure one after the other, round by round."""
    with ExitStack() as stack:
        measures: list[tuple[Result, Measure]] = []
        for result in results:
            say(f"{result.row.name}: warming up")
            own = plan.directory / result.row.name
            own.mkdir()
            with _told(result):
                opened = result.row.open(Surroundings(own, plan.rounds < ROUNDS))
                measures.append((result, stack.enter_context(opened)))
        for done in range(plan.rounds):
            for result, measure in measures:
                if done < result.row.repeats and result.failure is None and result.missing is None:
                    say(f"{result.row.name} {done + 1}/{plan.rounds}")
                    with _told(result):
                        result.add(measure())


@contextmanager
def _told(result: Result) -> Iterator[None]:
    """What goes wrong in one row is its result."""
    try:
        yield
    except NotMeasuredError as error:
        result.missing = str(error)
    except Exception as error:  # noqa: BLE001  one row that fails must not take the others' figures with it
        result.failure = f"{type(error).__name__}: {error}"[:300]
