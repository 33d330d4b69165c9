"""Messages in the transactions of services on three databases, through kills, pauses, copies and restores.

Theory of operation. A service on each database writes rows and messages in one transaction, with no broker. Two
processes run ``txmq outbox run`` for all three outboxes, a reader follows the topics. One fault of the plan after the
other befalls them. After each the campaign waits until every outbox is *level*: nothing waits that waited then. Every
``check_every`` faults, and at the end, the services come to rest, everything is read, and the history is checked
(``tools.checkers.history``): rows and messages are the same transactions, each message once, each key in the
order in which its row's lock was had, a reader saw units whole. What was checked is not checked again: the services'
rows are deleted, and later checks begin where the topics end.

A line may stop after a restore or next to a copy, and then it must: relays say so in their logs, and ``txmq outbox
status`` ends with 1. Then an operator does what docs/how-to/outbox.md says, and everything goes on. What a restore has
taken, rows or messages, no rule asks for (``excuses``).

Invariants:
    * every wait has a deadline; one that passes ends the campaign with what did not happen;
    * a line that stops without a cause is a finding, and so is one that should stop and does not;
    * no process outlives ``OutboxCampaign.run``.
"""

from __future__ import annotations

import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final

import txmq
from tools.checkers.events import Drained, Log
from tools.checkers.history import Coverage, Verdict, check
from tools.crash import final_reads, offline
from tools.crash.directory import BROKER_SETTINGS, HistoryFile, read_history
from tools.crash.doors import OPEN, Doors, may
from tools.crash.faults import Fault
from tools.crash.outbox.databases import COPY, FILES, MADE, Database, Place
from tools.crash.outbox.directory import BLOCK, OutboxCampaignDirectory, make_tables, topics_of
from tools.crash.outbox.excuses import BrokerRestored, DatabaseRestored, excuse
from tools.crash.outbox.operators import Ends, OutboxOperator
from tools.crash.outbox.plan import faults
from tools.crash.outbox.processes import READER, RELAY_USER, Processes
from tools.crash.processes import CampaignError, pause
from txmq.client.relay.operator import forget
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.fork_server import ForkServer

DATABASES: Final = ("mariadb", "postgresql", "sqlite")
LEVEL_S: Final = 60.0
STOP_S: Final = 60.0
RUN_S_MAX: Final = 0.5
PILE_UP_S: Final = 0.3
# A page has several transactions of services: those of two threads may alternate in it.
UNPROMISED: Final = ("L13",)
_FORKED: Final = (
    "txmq.cli.main", "txmq.client.relay.operator", "txmq.client.relay.relay", "tools.crash.outbox.relay",
    "tools.crash.outbox.service", "tools.crash.outbox.reader", "MySQLdb", "psycopg",
)  # fmt: skip


@dataclass(slots=True)
class OutboxReport:
    """What a campaign proved.

    Attributes:
        points_hit: how often each crash point was the place of a death.
        verdict: of the last check.
        counts: of all checks.
        stops: how often a line stopped that had to.
        level_s: how long it took after each fault until nothing waited.
        lost: rows of restored databases, and messages of restored brokers.
        dropped: parked rows that an operator dropped, because the broker had them.
    """

    points_hit: Counter[str]
    verdict: Verdict = field(default_factory=lambda: Verdict("unknown", (), (), {}))
    counts: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    stops: Counter[str] = field(default_factory=Counter)
    level_s: list[float] = field(default_factory=list)
    lost: Counter[str] = field(default_factory=Counter)
    dropped: int = 0
    others: list[str] = field(default_factory=list)

    @property
    def complaints(self) -> list[str]:
        """What is wrong; none where every promise was kept."""
        return [*(str(finding) for finding in self.verdict.findings), *self.verdict.missing, *self.others]


class OutboxCampaign:
    """One campaign in an empty ``directory``; ``say`` gets a line a fault.

    Args:
        databases: of the services.
        doors: who may connect to the broker.
        rule: taken away from the relays, to see whether the campaign notices; see ``relay``.
    """

    def __init__(
        self, directory: Path, seed: int, say: Callable[[str], None] = print, *, databases: Sequence[str] = DATABASES,
        doors: Doors = OPEN, rule: str = "",
    ) -> None:  # fmt: skip
        self.world, self._say, self._names, self._doors = OutboxCampaignDirectory(directory), say, databases, doors
        self._random, self._seed, self._rule = random.Random(seed), seed, rule
        self._restores: list[DatabaseRestored | BrokerRestored] = []
        self._again = 0

    # --- the whole ---------------------------------------------------------------------------------------------------

    def run(self, count: int, check_every: int = 50) -> OutboxReport:
        """Play so many faults of the plan.

        Raises:
            CampaignError: something that is waited for did not happen.
        """
        servers = [name for name in self._names if name not in FILES]
        files = [name for name in self._names if name in FILES]
        return self.play(list(islice(faults(self._random, servers, files), count)), check_every)

    def play(self, chosen: Sequence[Fault], check_every: int = 50) -> OutboxReport:
        """Play these; see ``run``."""
        with ExitStack() as stack:
            stack.enter_context(ForkServer(_FORKED))
            self._databases: dict[str, Database] = {
                name: MADE[name](self.world.directory, stack) for name in self._names
            }
            self._processes = Processes(
                self.world, self._databases, random.Random(-self._seed - 1), self._doors, self._rule
            )
            stack.callback(self._processes.kill)
            self.report = OutboxReport(self._processes.points_hit)
            self._set_up()
            stack.callback(self._history.close)
            for number, fault in enumerate(chosen, 1):
                self._play(number, len(chosen), fault)
                if self.report.others:
                    break
                if (number == len(chosen) or number % check_every == 0) and not self._check(number, check_every):
                    break
            self._look_at_files()
        return self.report

    def _set_up(self) -> None:
        processes, world = self._processes, self.world
        self._doors.close([processes.broker.start()])
        places = {name: database.place for name, database in self._databases.items()}
        world.histories.mkdir()
        world.write_places(places)
        self._history = HistoryFile(world.histories, "campaign")
        uuids = [make_tables(name, place) for name, place in places.items()]
        with txmq.connect(processes.address()) as client:
            for topic, partitions in world.partitions.items():
                client.topics.create(topic, partitions=partitions)
        grants = {RELAY_USER: world.relay_grants(uuids), READER: may("read", "topic", world.partitions)}
        self._doors.admit([processes.broker], grants)
        world.write_config(RELAY_USER, processes.address(RELAY_USER), places)
        self._operators = {name: self._operator(RELAY_USER, name, place) for name, place in places.items()}
        self._start()

    def _operator(self, config: str, name: str, place: Place) -> OutboxOperator:
        return OutboxOperator(self.world, config, name, place, self.report.points_hit)

    def _start(self) -> None:
        for child in self._processes.clients:
            if not child.is_running:
                child.start()

    # --- a fault -----------------------------------------------------------------------------------------------------

    def _play(self, number: int, count: int, fault: Fault) -> None:
        pause(self._random.uniform(0, RUN_S_MAX))
        self._history.write("nemesis", "invoke", f"fault-{number}", [], death=str(fault))
        stops = {name: self._processes.stops(name) for name in self._names}
        special = {"restore": self._restore, "copy": self._copy, "overtake": self._overtake}.get(fault.kind)
        if special is None:
            self._processes.befall(fault)
        else:
            special(fault)
        self._start()
        level_s = self._await_level(fault, stops)
        self._history.write("nemesis", "ok", f"fault-{number}", [])
        self.report.kinds[fault.what.partition(" ")[0]] += 1
        self.report.level_s.append(level_s)
        self._say(f"{number}/{count}  {fault}: level again in {level_s:.2f} s")

    def _await_level(self, fault: Fault, stops: Mapping[str, int]) -> float:
        """Returns how long it took until everything was sent, everybody being up."""
        begun = time.monotonic()
        must_stop = self._must_stop(fault)
        for name, operator in self._operators.items():
            is_level = operator.is_level()

            def is_over(name: str = name, is_level: Callable[[], bool] = is_level) -> bool:
                pause(0.02)
                if name not in must_stop and self._processes.stops(name) > stops[name]:
                    return True
                return is_level()

            eventually(is_over, f"outbox {name} is level", LEVEL_S, CampaignError)
            if name not in must_stop and self._processes.stops(name) > stops[name]:
                self.report.others.append(f"outbox {name} has stopped without a cause, after: {fault}")
            elif parked := operator.parked():
                self.report.others.append(f"outbox {name} has parked messages, after: {fault}: {parked}")
        self._processes.refuse_dead()
        return time.monotonic() - begun

    def _must_stop(self, fault: Fault) -> Sequence[str]:
        if fault.kind in ("restore", "overtake"):
            kind, _, name = fault.victims[0].partition(" ")
            return [name] if kind == "database" else self._names
        return ()

    # --- restores ----------------------------------------------------------------------------------------------------

    def _restore(self, fault: Fault) -> None:
        kind, _, name = fault.victims[0].partition(" ")
        if kind == "database":
            self._restore_database(name, fault)
        else:
            self._restore_broker(fault)

    def _restore_database(self, name: str, fault: Fault) -> None:
        """To a dump that is older than what was sent since."""
        database, operator, dump = self._databases[name], self._operators[name], self.world.directory / f"{name}.dump"
        self._pile_up()
        database.dump(dump)
        ends = operator.ends()
        self._start()
        pause(fault.away_s)
        self._await_progress(operator, ends)
        processes = self._processes
        for child in (processes.services[name], *processes.relays.values(), processes.reader):
            child.kill()
        stops = self._processes.stops(name)
        before = self._rows(database.place)
        database.load(dump)
        kept = self._rows(database.place)
        self._restores.append(DatabaseRestored(time.monotonic_ns(), name, before - kept))
        self.report.lost["rows"] += len(before - kept)
        self._start()
        self._await_stop(operator, stops)
        operator.adopt("--original", fault.point)
        self.report.dropped += operator.sort_out(self._sent(name), fault.point)

    def _pile_up(self) -> None:
        """Nobody sends for a moment."""
        for child in self._processes.relays.values():
            child.kill()
        pause(PILE_UP_S)

    @staticmethod
    def _rows(place: Place) -> frozenset[str]:
        return frozenset(str(row) for (row,) in place.ask("SELECT rowid_text FROM orders"))

    def _restore_broker(self, fault: Fault) -> None:
        """To a directory that is older than what it took since; what is lost is sent again."""
        broker, kept = self._processes.broker, self.world.directory / "kept"
        broker.kill()
        shutil.copytree(broker.data_dir, kept)
        copied_ns = time.monotonic_ns()
        ends = {name: operator.ends() for name, operator in self._operators.items()}
        broker.start()
        pause(fault.away_s)
        for name, operator in self._operators.items():
            self._await_progress(operator, ends[name])
        self._processes.reader.kill()
        broker.kill()
        stops = {name: self._processes.stops(name) for name in self._names}
        had = self._put_back(kept)
        at_ns = time.monotonic_ns()
        broker.start()
        found = final_reads.drain(self._processes.address(), self.world.partitions)
        lost = _messages(had)
        for value in _messages(found):
            lost.pop(value, None)
        for name, operator in self._operators.items():
            self._await_stop(operator, stops[name])
            operator.adopt("--original", fault.point if name == self._names[0] else "")
            for value in operator.waiting():
                lost.pop(value, None)
            operator.sort_out(self._sent(name), fault.point if name == self._names[0] else "")
        ends_of_logs = {(topic, partition): start + len(lines) for _, topic, partition, start, lines in found}
        self._restores.append(BrokerRestored(copied_ns, at_ns, frozenset(lost), ends_of_logs))
        self.report.lost["messages"] += len(lost)
        self._send_again(lost)

    def _put_back(self, kept: Path) -> list[list[Any]]:
        """The broker's older directory; what the newer one had."""
        broker, newer = self._processes.broker, self.world.directory / "newer"
        broker.data_dir.rename(newer)
        kept.rename(broker.data_dir)
        with BrokerProcess(newer, settings=BROKER_SETTINGS, tls=self._doors.tls) as other:
            had = final_reads.drain(self._doors.address([other]), self.world.partitions)
        shutil.rmtree(newer)
        return had

    def _send_again(self, lost: Mapping[str, tuple[str, str]]) -> None:
        """What the restored broker has lost, as other messages, through the outbox."""
        for name, operator in self._operators.items():
            if messages := [(topic, key) for topic, key in lost.values() if topic in topics_of(name)]:
                self._send(operator, messages)

    def _send(self, operator: OutboxOperator, messages: Sequence[tuple[str, str]]) -> None:
        """Messages of the campaign's own, in one transaction."""
        self._again += 1
        operation = f"campaign-{self._again}{BLOCK}{len(messages)}"
        planned = [["send", topic, key, f"{operation}.{number}"] for number, (topic, key) in enumerate(messages)]
        self._history.write("txn", "invoke", operation, planned)
        outbox = txmq.Outbox(operator.outbox)
        with closing(operator.place.connect()) as connection, outbox.transaction(connection) as tx:
            for _, topic, key, value in planned:
                tx.send(topic, value.encode(), key.encode())
        self._history.write("txn", "ok", operation, planned)

    def _sent(self, name: str) -> set[str]:
        return set(_messages(final_reads.drain(self._processes.address(), topics_of(name))))

    @staticmethod
    def _await_progress(operator: OutboxOperator, ends: Ends) -> None:
        eventually(lambda: operator.is_beyond(ends), f"outbox {operator.outbox} goes on", LEVEL_S, CampaignError)

    def _await_stop(self, operator: OutboxOperator, before: int, *, of_copy: bool = False) -> None:
        """The line stops, and says so."""
        name = operator.outbox

        def is_told() -> bool:
            pause(0.02)
            return self._processes.stops(name, of_copy=of_copy) > before

        eventually(is_told, f"outbox {name} stops", STOP_S, CampaignError)
        if not operator.is_stopped():
            raise CampaignError(f"outbox {name} has stopped, and txmq outbox status does not say so")
        self.report.stops[f"copy of {name}" if of_copy else name] += 1

    # --- copies ------------------------------------------------------------------------------------------------------

    def _copied(self, name: str) -> OutboxOperator:
        """A copy of a database, and the operator of its outbox."""
        database, dump = self._databases[name], self.world.directory / f"{name}.dump"
        database.dump(dump)
        database.load_copy(dump)
        self.world.write_config(COPY, self._processes.address(RELAY_USER), {name: database.copy})
        return self._operator(COPY, name, database.copy)

    def _copy(self, fault: Fault) -> None:
        """The original goes on, and the copy stops; adopted, it is an outbox of its own."""
        name, relay = fault.victims[0].partition(" ")[2], self._processes.relay_of_copy
        self._pile_up()
        original, copy = self._operators[name], self._copied(name)
        self._start()
        pause(fault.away_s)
        self._await_progress(original, copy.ends())
        stops = self._processes.stops(name, of_copy=True)
        relay.start()
        self._await_stop(copy, stops, of_copy=True)
        relay.stop()
        uuid = str(copy.adopt("--copy")["uuid"])
        copy.drop_all()
        self._send(copy, [(topic, COPY) for topic in topics_of(name)])  # a key of its own: there is no order
        user = f"copy-{uuid[:8]}"
        self._doors.admit([self._processes.broker], {user: self.world.relay_grants([uuid])})
        self.world.write_config(COPY, self._processes.address(user), {name: copy.place})
        relay.start()
        eventually(copy.is_level(), f"the copy of {name} is level", LEVEL_S, CampaignError)
        relay.stop()
        with txmq.connect(self._processes.address()) as client:
            forget(client, uuid)

    def _overtake(self, fault: Fault) -> None:
        """The copy goes on while the original has no relay: then the original stops."""
        name, processes = fault.victims[0].partition(" ")[2], self._processes
        self._pile_up()
        original, copy = self._operators[name], self._copied(name)
        ends = copy.ends()
        processes.relay_of_copy.start()
        self._await_progress(copy, ends)
        stops = processes.stops(name)
        self._start()
        self._await_stop(original, stops)
        processes.relay_of_copy.stop()
        original.adopt("--original")
        self.report.dropped += original.sort_out(self._sent(name))

    # --- a check -----------------------------------------------------------------------------------------------------

    def _check(self, number: int, check_every: int) -> bool:
        """Whether the campaign may go on: the services come to rest, everything is read and held to the history."""
        processes = self._processes
        for service in processes.services.values():
            service.stop()
        for name, operator in self._operators.items():
            eventually(operator.is_level(), f"outbox {name} is level", LEVEL_S, CampaignError)
        processes.reader.stop()
        begun = time.monotonic()
        final_reads.write(self.world, processes.address(), self._history, final_reads.in_doubt(processes.address()))
        history = read_history(self.world)
        excuse(history, self._restores)
        least = Coverage(ok=(number - 1) % check_every + 1, faults=number)
        self.report.verdict = verdict = check(history, least, is_cluster=True, unpromised=UNPROMISED)
        self.report.counts += Counter(verdict.counts)
        counts = ", ".join(f"{count} {name}" for name, count in verdict.counts.items())
        took_s = time.monotonic() - begun
        self._say(f"check after {number} faults: {verdict.result} ({counts}; {took_s:.1f} s)")
        if verdict.result != "valid":
            return False
        self._begin_anew(history.drain or {})
        self._start()
        return True

    def _begin_anew(self, drained: Mapping[Log, Drained]) -> None:
        """What was checked is checked: a later check need not know of it."""
        self.world.since = {log: found.start + len(found.messages) for log, found in drained.items()}
        self.world.since_ns = time.monotonic_ns()
        self._restores.clear()
        for database in self._databases.values():
            with closing(database.place.connect()) as connection:
                database.place.run(connection, "DELETE FROM orders")
                connection.commit()

    def _look_at_files(self) -> None:
        """Hold the files of the stopped broker to what a client reads."""
        processes, broker = self._processes, self._processes.broker
        for child in processes.clients:
            child.kill()
        if not broker.is_running:
            broker.start()
        drained = final_reads.drain(processes.address(), self.world.partitions)
        if status := broker.stop():
            self.report.others.append(f"the broker stopped with status {status}")
        self.report.others += offline.complaints(broker.data_dir, drained)
        self.report.others += self._doors.refused([broker])


def _messages(drained: Iterable[Sequence[Any]]) -> dict[str, tuple[str, str]]:
    """Topic and key of each value."""
    return {value: (topic, key) for _, topic, _, _, lines in drained for _, value, key in lines}
