"""A model of the outbox: databases, homes, relays, writers, operators and faults, driven by random histories.

    python -m tools.outbox_model --histories 20000             # every rule kept: prints how often what happened
    python -m tools.outbox_model --mutation chain_ignored      # one rule broken: ends at the first that shows it
    python -m tools.outbox_model --all-mutations               # all of them
    python -m tools.outbox_model --only 4711 --trace           # one history, step by step

The relays run the core that ships (``txmq/outbox/relay_core``); ``parts`` and ``driver`` are what it stands on. A
request is delivered at any time, also long after its sender has given up or died, at most once, or never. A database
shows what is committed before it is durable.
What is checked is in ``check_placed`` (at every placement) and ``check_end`` (when everything has come to rest).
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

from txmq.outbox.relay_core import RelayRow

from .driver import adopt, operator, relay, writer
from .mutations import broken
from .parts import (
    NOT_OWNER,
    TOPIC_HOME,
    Actor,
    Database,
    Home,
    Request,
    Session,
    Steps,
    Tables,
    Violation,
    session_of,
)

MUTATIONS = {
    "no_claim": "a page is sent before its claim is committed",
    "claim_not_forced": "the claim's commit is not forced to disk",
    "chain_ignored": "the broker does not ask whether a page follows the last one",
    "counted_ids": "a page's id is a counter, not a transaction's id",
    "no_fence": "what another relay claimed is asked for without a fence",
    "claim_overwritten": "a claim found is overwritten, its outcome not asked for",
    "outcome_alone": "410 is taken for rolled back: the chain is not asked",
    "no_relay_lock": "a step of the relay does not lock the relay row",
    "claim_not_compared": "a relay deletes the rows that it sent, without looking whether the claim is still that page",
    "rows_read_again": "the rows to delete are read anew, instead of the ids of the claim",
    "delete_up_to": "all rows up to the page's highest id are deleted",
    "read_elsewhere": "rows are read before the transaction that claims them, on another connection",
    "floor": "reading starts behind the highest id that has left",
    "unit_cut": "a page ends after so many rows, whatever the units",
    "unit_completed": "a page that cuts a unit takes the unit's later rows, too",
    "row_parked_alone": "only the refused row of a unit is parked",
    "parked_key_passed": "later rows of a parked key are sent",
    "operator_no_lock": "release does not lock the relay row",
    "topics_not_asked": "a relay that takes over trusts the topics it knew",
    "no_idle_page": "an idle relay sends nothing: a copy that has nothing to send is not noticed",
    "stop_not_compared": "a relay stops without looking again whether the relay row is still as it was when it asked",
    "home_not_compared": "a relay does not look whether the anchor is still the same home",
    "adopt_sends": "adopt leaves the rows where they are, instead of parking them",
    "adopt_no_settle": "adopt does not settle the open claim",
    "row_before_lock": "writers write the outbox row before they take the lock",
    "refusal_not_fenced": "a refused page is not fenced (one sending a page: expected to be harmless)",
    "answer_repeated": "a page without an answer is sent again under its id, with the rows as read now",
}


class World:
    """All actors of one history, its faults, and the checks."""

    def __init__(self, seed: str, mutation: str, *, is_traced: bool = False) -> None:
        self.random = random.Random(seed)
        self.mutation, self.is_traced = mutation, is_traced
        self.counts: Counter[str] = Counter()
        self.units: dict[int, dict[int, set[int]]] = {}
        self.floors: dict[str, int] = defaultdict(int)
        self.homes = [Home(0, topics={"a": (0, 1)}), Home(1, topics={"b": (1, 1)})]
        self.kept = [copy.deepcopy(self.homes[0])]
        self.databases = [Database("db", Tables({}, {}, RelayRow("uuid", self.identity())))]
        self.actors: list[Actor] = []
        self.network: list[Request] = []
        self.stopped: set[str] = set()
        self.excused: dict[str, set[int]] = defaultdict(set)
        self.is_calm, self.idle_pages = False, 0
        self.big_faults = self.random.choice(
            ["none", "none", "fail_over", "restore_home", "clone", "adopt_for_nothing"]
        )
        self.had_big_fault = False
        self.topics = self.random.choice(["a", "ab", "ab"])  # one home or two
        self.away = random.Random(f"{seed} away")  # its own chance: the history is otherwise the same
        self.has_away = self.away.random() < 0.3

    # Small services

    def identity(self) -> str:
        """Which home the anchor is now, as a relay row names it."""
        return f"home-{self.homes[0].identity}"

    def is_broken(self, name: str) -> bool:
        return self.mutation == name

    def chance(self, probability: float) -> bool:
        return not self.is_calm and self.random.random() < probability

    def count(self, what: str) -> int:
        self.counts[what] += 1
        return self.counts[what]

    def trace(self, *what: Any) -> None:
        if self.is_traced:
            print(*what)

    def is_lease_over(self) -> bool:
        return self.is_calm or self.random.random() < 0.15

    def is_home_away(self) -> bool:
        is_away = not self.is_calm and self.has_away and self.away.random() < 0.1
        self.counts["units parked for a home"] += is_away
        return is_away

    def is_idle_page_due(self) -> bool:
        if self.is_broken("no_idle_page"):
            return False
        if self.is_calm:
            return self.idle_pages > 0
        return self.chance(0.05)

    def new_txid(self, session: str, row: RelayRow) -> str:
        if self.is_broken("counted_ids"):
            return (
                f"{session_of(row.last) if row.last else session}/{int(row.last.split('/')[1]) + 1 if row.last else 1}"
            )
        return f"{session}/{self.count('txids')}"

    def stop(self, database: Database) -> None:
        self.trace("  STOPPED", database.name)
        self.counts["stopped"] += 1
        self.stopped.add(database.name)
        if not self.had_big_fault:
            raise Violation("the line stopped, and nothing was restored or copied")

    def start(self, name: str, database: Database, steps: Callable[[World, Actor], Steps]) -> Actor:
        actor = Actor(name, iter(()), database)  # type: ignore[arg-type]
        actor.steps = steps(self, actor)
        self.actors.append(actor)
        return actor

    def ask(self, actor: Actor, number: int, run: Callable[[Home], Any]) -> Request:
        meant = actor.database.now.relay.home  # every connection says which home it means

        def execute() -> Any:
            home = self.homes[number]
            is_other = number == 0 and self.identity() != meant and not self.is_broken("home_not_compared")
            return NOT_OWNER if is_other else run(home)

        request = Request(number, execute, actor)
        self.network.append(request)
        return request

    # Steps

    def step_actor(self, actor: Actor) -> None:
        waits_for = actor.waits_for
        if waits_for is not None and not waits_for.is_done:
            return
        actor.waits_for = None
        try:
            actor.waits_for = actor.steps.send(waits_for.answer if waits_for else None)
        except StopIteration:
            self.actors.remove(actor)
        if self.is_traced:
            now = actor.database.now
            self.trace(actor.name, "|", now.relay, sorted(now.rows), "parked", sorted(now.parked))

    def deliver(self, request: Request) -> None:
        self.network.remove(request)
        answer = request.run()
        self.trace("  delivered", request.sender.name, answer)
        if not request.is_done:
            request.answer, request.is_done = answer, True

    def finish_branch(self) -> None:
        """The home of a branch asks the anchor, with a fence; its owner may be there all the same."""
        home = self.homes[1]
        if home.prepared:
            txid = self.random.choice(list(home.prepared))
            is_owner_there = txid in {one.now.relay.claim for one in self.databases if one.name not in self.stopped}
            if txid not in self.homes[0].outcomes and is_owner_there and (self.is_calm or self.chance(0.8)):
                return
            if not home.finish(self, txid, committed=self.homes[0].outcome(txid, fence=True) == "committed"):
                self.counts["branches that waited"] += 1

    def new_writer(self) -> None:
        database = self.random.choice(self.databases)
        unit = self.count("units")
        size = self.random.choice([1, 1, 2, 3])
        choices = [(topic, key) for topic in self.topics for key in ("xyz" if len(self.topics) == 1 else "xy")]
        messages = sorted(self.random.sample(choices, size))  # in order: no deadlocks
        is_locked = self.random.random() < 0.8
        self.start(
            f"writer{unit}", database, lambda world, actor: writer(world, actor, unit, messages, is_locked=is_locked)
        )

    def fault(self) -> None:
        """Something that is not the design's to choose."""
        database = self.random.choice(self.databases)
        kind = self.random.choice(
            [
                "flush",
                "flush",
                "database",
                "relay",
                "link",
                "link",
                "drop",
                "killed",
                "grow",
                "delete",
                "create",
                "create",
                "session",
                "keep",
                "big",
            ]
        )
        if kind == "flush":
            database.durable = max(database.durable, self.random.randint(database.durable, len(database.states) - 1))
        elif kind == "database":
            database.back_to(database.durable)
        elif kind == "relay":
            relays = [one for one in self.actors if one.name.startswith("relay")]
            if relays:
                one = self.random.choice(relays)
                self.actors.remove(one)
                held = database.locks.get("relay")
                if isinstance(held, Session) and held.who is one:
                    held.close()
                self.start(f"relay{2 + self.count('relays')}-{one.database.name}", one.database, relay)
        elif kind in ("link", "drop") and self.network:
            request = self.random.choice(self.network)
            request.is_done = True
            if kind == "drop":
                self.network.remove(request)
        elif kind == "killed":
            database.locks.pop("relay", None)
        elif kind in ("grow", "delete", "create"):
            self.change_topic(kind)
        elif kind == "session":
            self.end_session()
        elif kind == "keep":
            self.kept.append(copy.deepcopy(self.homes[0]))
        elif kind == "big" and not self.had_big_fault:
            self.big_fault(database)

    def change_topic(self, kind: str) -> None:
        name = self.random.choice("ab")
        topics = self.homes[TOPIC_HOME[name]].topics
        if kind == "grow" and name in topics:
            topics[name] = (topics[name][0], topics[name][1] + 1)
        elif (
            kind == "delete"
            and self.chance(0.5)
            and not any(part.topic == name for parts in self.homes[1].prepared.values() for part in parts)
        ):
            topics.pop(name, None)
        elif kind == "create" and name not in topics:
            topics[name] = (self.count("topics") + 1, 1)

    def end_session(self) -> None:
        """Idle for too long: its outcomes are forgotten, but for those with branches to be told."""
        home = self.homes[0]
        busy = {session_of(txid) for txid in self.homes[1].prepared}
        idle = sorted(home.sessions - busy)
        if idle:
            name = self.random.choice(idle)
            home.sessions.discard(name)
            home.outcomes = {txid: was for txid, was in home.outcomes.items() if session_of(txid) != name}

    def big_fault(self, database: Database) -> None:
        self.trace("  BIG", self.big_faults)
        if self.big_faults == "fail_over":
            self.had_big_fault = True
            database.back_to(self.random.randint(max(0, database.durable - 12), database.durable))
        elif self.big_faults == "restore_home" and not self.homes[1].prepared:
            self.had_big_fault = True
            is_cluster = bool(self.homes[1].placed or self.homes[1].outcomes)
            self.homes[0] = copy.deepcopy(self.random.choice(self.kept))
            self.homes[0].identity = int(is_cluster)
        elif self.big_faults == "clone":
            self.had_big_fault = True
            other = database.clone("copy")
            self.databases.append(other)
            self.start("relay1-copy", other, relay)
            self.start("relay2-copy", other, relay)
        elif self.big_faults == "adopt_for_nothing":
            adopt(self, database, is_copy=False)

    # Checks

    def check_placed(self, home: Home) -> None:
        """Whoever reads now sees all or none of a unit, at each home."""
        seen: dict[int, set[int]] = defaultdict(set)
        for part in home.placed:
            seen[part.unit].add(part.message)
        for unit, messages in seen.items():
            missing = self.units[unit][home.number] - messages
            if missing:
                raise Violation(f"of unit {unit} a reader sees {messages} and not {missing}")

    def excuse(self, database: Database, decided: list[int]) -> None:
        """What an operator gives up by adopting: exactly these messages; all others still have to be right."""
        there = {part.message for home in self.homes for part in home.placed}
        there |= {part.message for parts in self.homes[1].prepared.values() for part in parts}
        ledger = {message for message, _, _ in database.now.ledger}
        self.excused[database.name] |= (there - ledger) | set(decided) | (ledger - there)

    def check_end(self) -> None:
        """Everything has come to rest: committed rows are messages, each once, in order."""
        there = Counter(part.message for home in self.homes for part in home.placed)
        for database in self.databases:
            if database.name in self.stopped:
                continue
            now, excused = database.now, self.excused[database.name]
            if now.rows or now.parked or now.relay.claim:
                raise Violation(f"{database.name} did not come to rest: {now}")
            ledger = [message for message, _, _ in now.ledger]
            others = {
                one
                for other in self.databases
                if other.now.relay.uuid != now.relay.uuid
                for one, _, _ in other.now.ledger
            }
            decided = set().union(*self.excused.values())
            for message in sorted({*ledger, *(set(there) - others)} - excused):
                wanted = int(message in ledger)
                if there[message] != wanted and not (message in decided and wanted and there[message]):
                    raise Violation(f"message {message}: {there[message]} times, {wanted} wanted")
            self.check_order(now, decided)

    def check_order(self, now: Tables, decided: set[int]) -> None:
        locked = [message for message, _, is_locked in now.ledger if is_locked and message not in decided]
        own = {message for message, _, _ in now.ledger} - decided
        place = {message: at for at, message in enumerate(locked)}
        for home in self.homes:
            newest: dict[tuple[str, str], int] = {}
            sizes: dict[tuple[int, str], int] = {}
            for part in home.placed:
                if part.message in place:
                    name = part.topic, part.key
                    if place[part.message] < newest.get(name, -1):
                        raise Violation(f"message {part.message} of {name} stands behind a later one")
                    newest[name] = place[part.message]
                size = part.topic_id, part.key
                if part.message in own and part.partitions < sizes.get(size, 0):
                    raise Violation(f"key {size} moved back")
                if part.message in own:
                    sizes[size] = part.partitions

    # One history

    def run(self, steps: int) -> None:
        first = self.databases[0]
        for name, what in (("relay1-db", relay), ("relay2-db", relay), ("operator", operator), ("operator2", operator)):
            self.start(name, first, what)
        for _ in range(steps):
            draw = self.random.random()
            if draw < 0.06:
                self.new_writer()
            elif draw < 0.11:
                self.fault()
            elif draw < 0.15:
                self.finish_branch()
            elif draw < 0.35 and self.network:
                self.deliver(self.random.choice(self.network))
            elif self.actors:
                self.step_actor(self.random.choice(self.actors))
            stopped = [one for one in self.databases if one.name in self.stopped]
            if stopped and self.random.random() < 0.03:
                one = self.random.choice(stopped)
                self.actors = [
                    actor for actor in self.actors if not (actor.name.startswith("relay") and actor.database is one)
                ]
                adopt(self, one, is_copy=one.name == "copy")
        if not self.had_big_fault and self.chance(0.5):  # with nothing more to send, perhaps
            self.big_fault(first)
        self.come_to_rest()
        self.check_end()

    def come_to_rest(self) -> None:
        """No more faults: late requests arrive, topics are there, parked units go back, a database has one relay."""
        self.is_calm = True
        for home, topic in ((0, "a"), (1, "b")):
            self.homes[home].topics.setdefault(topic, (self.count("topics") + 1, 1))
        relays = [one for one in self.actors if one.name.startswith("relay")]
        for one in relays:
            if self.random.random() < 0.5:
                self.actors.remove(one)
        self.drain(60)
        for database in self.databases:
            database.locks.pop("relay", None)
        self.actors = [one for one in self.actors if not one.name.startswith("relay")]
        for database in self.random.sample(self.databases, len(self.databases)):
            if database.name in self.stopped:
                continue
            self.idle_pages = 2
            last = self.start("relay-last", database, relay)
            released = 0
            for turn in range(1500):
                now = database.now
                if now.parked and turn >= released + 30 and "relay" not in database.locks:
                    released = turn
                    database.commit(now._replace(rows=now.rows | now.parked, parked={}), forced=True)
                self.drain(1)
                is_at_rest = not (now.rows or now.parked or now.relay.claim) and self.idle_pages <= 0
                if last not in self.actors or (is_at_rest and turn > 30):
                    break
            if last in self.actors:
                self.actors.remove(last)
            database.locks.pop("relay", None)
        for _ in range(1000):
            self.finish_branch()

    def drain(self, turns: int) -> None:
        for _ in range(turns):
            for actor in list(self.actors):
                if not actor.name.startswith("operator") and actor in self.actors:
                    self.step_actor(actor)
            while self.network:
                self.deliver(self.random.choice(self.network))
            self.finish_branch()


def campaign(histories: int, seed: int, steps: int, mutation: str) -> tuple[Counter[str], str]:
    """Run histories; returns what happened in all of them, and the first violation."""
    total: Counter[str] = Counter()
    for number in range(histories):
        world = World(f"{seed}/{number}", mutation)
        try:
            with broken(mutation):
                world.run(steps)
        except Violation as found:
            return total, f"history {number}: {found}"
        total += world.counts
        total["histories"] += 1
        total[f"with {world.big_faults}"] += world.had_big_fault
    return total, ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--histories", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=350)
    parser.add_argument("--mutation", choices=sorted(MUTATIONS), default="")
    parser.add_argument("--all-mutations", action="store_true")
    parser.add_argument("--only", type=int, help="one history, by its number")
    parser.add_argument("--trace", action="store_true")
    given = parser.parse_args()
    if given.only is not None:
        with broken(given.mutation):
            World(f"{given.seed}/{given.only}", given.mutation, is_traced=given.trace).run(given.steps)
        return 0
    for mutation in sorted(MUTATIONS) if given.all_mutations else [given.mutation]:
        total, violation = campaign(given.histories, given.seed, given.steps, mutation)
        print(f"{mutation or 'the design'}: {violation or 'nothing found'}", flush=True)
        if not mutation:
            print(dict(total))
    return 0 if not violation or mutation else 1


if __name__ == "__main__":
    sys.exit(main())
