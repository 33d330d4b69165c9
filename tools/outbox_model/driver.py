"""What acts on the modelled database: relays, which run the real core, writers, and operators.

Each ``yield`` is a place where anything else may happen. What a mutation breaks in the core is replaced by the tests;
what it breaks at the database or the broker is broken here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from txmq.outbox.page import OutboxRow, Run, Waiting
from txmq.outbox.relay_core import (
    OTHER_HOME,
    Answer,
    Away,
    Chain,
    Claim,
    ClaimOutcome,
    Connect,
    Lock,
    Locked,
    NewTxid,
    Outcome,
    Peek,
    Read,
    RelayCore,
    RelayRow,
    Send,
    Stop,
    Topics,
    Unlock,
)

from .parts import NOT_OWNER, TOPIC_HOME, Actor, Database, Home, Lost, Placed, Session, Steps, Tables

if TYPE_CHECKING:
    from .world import World

PAGE_ROWS = 3
_CLAIM_OUTCOMES = {
    "committed": ClaimOutcome.COMMITTED,
    "rolled-back": ClaimOutcome.ROLLED_BACK,
    "410": ClaimOutcome.OVER,
    NOT_OWNER: ClaimOutcome.OTHER_HOME,
}
_ANSWERS = {
    "200": Answer.TAKEN, "409": Answer.CONFLICT, "410": Answer.OVER, "404": Answer.REFUSED, "stale": Answer.STALE,
    NOT_OWNER: Answer.OTHER_HOME, None: Answer.SILENT,
}  # fmt: skip
Asked = Generator[Any, Any, Any]


def covered(ids: Iterable[Run]) -> set[int]:
    """The ids of runs."""
    return {one for first, last in ids for one in range(first, last + 1)}


def without(rows: dict[int, OutboxRow], ids: Iterable[int]) -> dict[int, OutboxRow]:
    """The rows but those."""
    gone = set(ids)
    return {row.id: row for row in rows.values() if row.id not in gone}


class RelayDriver:
    """One relay: carries out the steps of the real core."""

    def __init__(self, world: World, actor: Actor) -> None:
        self.world, self.actor, self.database = world, actor, actor.database
        self.core = RelayCore(actor.name, PAGE_ROWS)
        self._session = ""
        self._topics: dict[str, tuple[int, int]] = {}
        self._work: Session | None = None
        self._gone: set[int] = set()
        self._read_before: Tables | None = None
        self._unclaimed: Claim | None = None
        self._locked_row: RelayRow | None = None

    def steps(self) -> Steps:
        """Until the core stops."""
        turns, result = self.core.turns(), None
        while True:
            yield None
            try:
                step = turns.send(result)
            except StopIteration:
                return
            result = yield from self._carry_out(step)

    def _carry_out(self, step: Any) -> Asked:
        if isinstance(step, Connect):
            return (yield from self._connect())
        if isinstance(step, Lock):
            self._read_before = self.database.now
            if self.world.is_broken("read_elsewhere"):
                yield None
            return self._lock()
        if isinstance(step, Unlock):
            self._work_now().close()
        elif isinstance(step, Peek):
            return self._peek()
        elif isinstance(step, Read):
            return (yield from self._read(step))
        elif isinstance(step, Away):
            return self._away(step)
        elif isinstance(step, Claim):
            return (yield from self._claim(step))
        elif isinstance(step, NewTxid):
            return self.world.new_txid(self._session, self.database.now.relay)
        elif isinstance(step, Topics):
            return (yield from self._ask_topics())
        elif isinstance(step, Outcome):
            is_fence = not self.world.is_broken("no_fence")
            told = yield self.world.ask(self.actor, 0, lambda home: home.outcome(step.txid, fence=is_fence))
            return _CLAIM_OUTCOMES.get(told)
        elif isinstance(step, Chain):
            chain = yield self.world.ask(self.actor, 0, lambda home: (home.chain.get(step.uuid),))
            return None if chain == NOT_OWNER else chain
        elif isinstance(step, Send):
            return (yield from self._send(step))
        elif isinstance(step, Stop):
            self.world.stop(self.database)
        return None

    def _away(self, step: Away) -> dict[int, str]:
        """The other home is away now and then, so that units for it are parked."""
        if not self.world.is_home_away():
            return {}
        return {row.group: "away" for row in step.rows if TOPIC_HOME[row.topic] == 1}

    def _work_now(self) -> Session:
        assert self._work is not None
        return self._work

    def _peek(self) -> RelayRow:
        row = self.database.now.relay
        if self.world.is_broken("stop_not_compared") and self._locked_row is not None:
            row = self._locked_row  # as it was, not as it is
        self._locked_row = None
        return row

    # --- the database ------------------------------------------------------------------------------------------------

    def _lock(self) -> Locked | None:
        is_locking = not self.world.is_broken("no_relay_lock")
        self._gone = set()
        try:
            self._work = Session(self.world, self.database, self.actor, is_locking=is_locking)
            row = self._locked_row = self._work.read().relay
        except Lost:
            return None
        is_other = row.holder not in (None, self.actor.name)
        return Locked(row, is_other and self.world.is_lease_over(), self.world.is_idle_page_due())

    def _read(self, step: Read) -> Asked:
        world, work = self.world, self._work_now()
        self._gone |= covered(step.gone)
        try:
            tables = work.read()
            yield None  # each statement sees what is committed by then
            parked = work.read().parked
        except Lost:
            return None
        if world.is_broken("read_elsewhere") and self._read_before is not None:
            tables, parked = tables._replace(rows=self._read_before.rows), self._read_before.parked
        if step.gone and world.is_broken("delete_up_to"):
            self._gone |= set(range(max(last for _, last in step.gone) + 1))
        if step.gone and world.is_broken("rows_read_again"):
            self._gone = {row.id for row in sorted(tables.rows.values())[: self.core.page_rows]}
        world.floors[tables.relay.uuid] = max([world.floors[tables.relay.uuid], *self._gone])
        rows = sorted(without(tables.rows, self._gone).values())
        if world.is_broken("floor"):
            rows = [row for row in rows if row.id > world.floors[tables.relay.uuid]]
        first, later = rows[: step.rows_max], rows[step.rows_max :]
        cut = {row.group for row in later} & {row.group for row in first}
        if world.is_broken("unit_cut"):
            cut = set()
        elif world.is_broken("unit_completed"):
            first, cut = first + [row for row in later if row.group in cut], set()
        held: dict[tuple[str, bytes], int] = {}
        for row in sorted(parked.values(), reverse=True):
            held[row.topic, row.key or b""] = row.id
        return Waiting(first, cut, {} if world.is_broken("parked_key_passed") else held)

    def _claim(self, step: Claim) -> Asked:
        yield None
        if self.world.is_broken("no_claim") and step.row.claim is not None and self._unclaimed is None:
            self._unclaimed = step  # it is sent first
            return True
        return self._commit(step)

    def _commit(self, step: Claim) -> bool:
        gone = self._gone
        parked = {row.id: row for row, _ in step.parked}

        def change(now: Tables) -> Tables:
            rows = without(now.rows, gone | parked.keys())
            return now._replace(rows=rows, parked=now.parked | parked, relay=step.row)

        try:
            self._work_now().commit(change, forced=not self.world.is_broken("claim_not_forced"))
        except Lost:
            return False
        return True

    # --- the broker --------------------------------------------------------------------------------------------------

    def _connect(self) -> Asked:
        session = yield self.world.ask(self.actor, 0, lambda home: _new_session(self.world, home))
        if session in (None, NOT_OWNER):
            return OTHER_HOME if session == NOT_OWNER else None
        self._session = session
        return self.database.now.relay.home

    def _ask_topics(self) -> Asked:
        found: dict[str, tuple[int, int]] = {}
        for number in range(len(self.world.homes)):
            answer = yield self.world.ask(self.actor, number, lambda home: dict(home.topics))
            if answer in (None, NOT_OWNER):
                return None
            found |= answer
        self._topics = found
        return found

    def _send(self, step: Send) -> Asked:
        answer = yield from self._send_rows(step.row, step.rows)
        unclaimed, self._unclaimed = self._unclaimed, None
        if unclaimed is not None:
            self._commit(unclaimed)
        if answer is None and self.world.is_broken("answer_repeated"):
            rows = sorted(self.database.now.rows.values())[: self.core.page_rows]
            answer = yield from self._send_rows(step.row, rows)
        self.world.idle_pages -= not step.rows
        self.world.counts["pages"] += answer == "200"
        self.world.counts["refused pages"] += answer == "409"
        return _ANSWERS[answer]

    def _send_rows(self, row: RelayRow, rows: Iterable[OutboxRow]) -> Asked:
        """The page as one transaction of the anchor, with branches at the other homes."""
        parts: dict[int, list[Placed]] = {number: [] for number in range(len(self.world.homes))}
        for one in rows:
            if one.topic in self._topics:
                topic_id, partitions = self._topics[one.topic]
                parts[TOPIC_HOME[one.topic]].append(_placed(one, topic_id, partitions))
        txid, uuid, after = str(row.claim), row.uuid, row.last
        if parts[1]:
            answer = yield self.world.ask(self.actor, 1, lambda home: home.prepare(txid, parts[1]))
            if answer != "200":
                return answer
        return (yield self.world.ask(self.actor, 0, lambda home: home.commit(self.world, txid, uuid, after, parts[0])))


def relay(world: World, actor: Actor) -> Steps:
    """One relay, with the real core."""
    return RelayDriver(world, actor).steps()


def _new_session(world: World, home: Home) -> str:
    name = f"s{world.count('sessions')}"
    home.sessions.add(name)
    return name


def _placed(row: OutboxRow, topic_id: int, partitions: int) -> Placed:
    return Placed(int(row.value), row.group, topic_id, row.topic, (row.key or b"").decode(), partitions)


# --- operators and writers --------------------------------------------------------------------------------------------


def operator(world: World, actor: Actor) -> Steps:
    """``txmq outbox release``: whole units go back under their ids. What stands after a parked key is parked again."""
    while True:
        yield None
        if not actor.database.now.parked or not world.chance(0.3):
            continue
        try:
            work = Session(world, actor.database, actor, is_locking=not world.is_broken("operator_no_lock"))
            tables = work.read()
            while world.chance(0.6):
                yield None
            unit = world.random.choice(sorted({row.group for row in tables.parked.values()}))
            units = {unit} if world.chance(0.5) else {row.group for row in tables.parked.values()}
            back = {row.id: row for row in tables.parked.values() if row.group in units}
            yield None
            work.commit(partial(_released, back))
        except Lost:
            continue


def _released(back: dict[int, OutboxRow], now: Tables) -> Tables:
    return now._replace(rows=now.rows | back, parked=without(now.parked, back))


def adopt(world: World, database: Database, *, is_copy: bool) -> None:
    """``txmq outbox adopt``: what waits is parked, the chain goes on from the broker's last page; a copy begins one."""
    world.counts["adopted"] += 1
    home, tables = world.homes[0], database.now
    database.locks.pop("relay", None)
    gone: set[int] = set()
    if tables.relay.claim and not world.is_broken("adopt_no_settle"):
        outcome = home.outcome(tables.relay.claim, fence=True)
        if outcome == "committed" or home.chain.get(tables.relay.uuid) == tables.relay.claim:
            gone = covered(tables.relay.ids)
    uuid = f"{tables.relay.uuid}'" if is_copy else tables.relay.uuid
    row = RelayRow(uuid, world.identity(), home.chain.get(uuid))
    waiting = without(tables.rows, gone)
    world.excuse(database, [int(one.value) for one in (*waiting.values(), *tables.parked.values())])
    if world.is_broken("adopt_sends"):
        world.excused[database.name] -= {int(one.value) for one in waiting.values()}
        database.commit(tables._replace(rows=waiting, relay=row), forced=True)
    else:
        database.commit(tables._replace(rows={}, parked=tables.parked | waiting, relay=row), forced=True)
    world.stopped.discard(database.name)
    for number in (1, 2):
        world.start(f"relay{number}-{database.name}-{world.counts['adopted']}", database, relay)


def writer(world: World, actor: Actor, unit: int, messages: list[tuple[str, str]], *, is_locked: bool) -> Steps:
    """The application: locks the rows of its keys, writes the outbox rows, commits."""
    database, generation = actor.database, actor.database.generation
    rows: list[OutboxRow] = []
    of_home: dict[int, set[int]] = defaultdict(set)

    def write(topic: str, key: str, message: int) -> None:
        rows.append(OutboxRow(database.next_id, unit, topic, key.encode(), b"%d" % message))
        database.next_id += 1

    for topic, key in messages:
        message = world.count("messages")
        of_home[TOPIC_HOME[topic]].add(message)
        if world.is_broken("row_before_lock"):
            write(topic, key, message)
            yield None
        while is_locked and database.locks.get((topic, key)) not in (None, actor):
            yield None
            if database.generation != generation:
                return
        if is_locked:
            database.locks[topic, key] = actor
        yield None
        if database.generation != generation:
            return
        if not world.is_broken("row_before_lock"):
            write(topic, key, message)
            yield None
    if database.generation != generation:
        return
    if not world.chance(0.1):  # else it rolls back
        world.units[unit] = of_home
        now = database.now
        ledger = now.ledger + tuple((int(row.value), unit, is_locked) for row in rows)
        database.commit(
            now._replace(rows=now.rows | {row.id: row for row in rows}, ledger=ledger), forced=world.chance(0.3)
        )
    for held in [name for name, who in database.locks.items() if who is actor]:
        del database.locks[held]
