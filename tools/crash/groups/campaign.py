"""A group under fire: members join, leave, are paused and killed every second, and the broker dies now and then.

Theory of operation. A producer sends to every partition without end; about six members share them. Each second
something of ``ACTIONS`` happens. Every ``ROUND_S`` seconds it is measured how long after the last change every
partition is the property of a member that works; then what is paused goes on, what is missing is started, and it is
measured again. The same after each death of the broker.
At the end producer and members come to rest, everything is read, and two checkers look at the whole history: the one
for messages (``tools.checkers.history``) and the one for groups (``tools.checkers.groups``).

"Never stopped" is G6 there: a message waits in a partition that stays with its owner for ``stopped_s_max`` at most.
The session timeout is shorter than the default (``directory``).

Invariants:
    * every wait has a deadline; one that passes ends the campaign with what did not happen;
    * an outage of a member lasts, in the history, from the signal that stops it to the one that lets it go on; the
      broker's from its death until every partition is owned again.
"""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import txmq
from tools.checkers.groups import GroupRules, check_group
from tools.checkers.history import Verdict, check
from tools.crash import final_reads, offline
from tools.crash.directory import BROKER_SETTINGS, HistoryFile
from tools.crash.doors import OPEN, OPERATOR, Doors, Grant, may, user_of
from tools.crash.groups.directory import GROUP, MEMBERS, PARTITIONS, TOPIC, GroupCampaignDirectory
from tools.crash.processes import CampaignError, Child, pause
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess

PRODUCER = "w"
MEMBER_GRANTS = (Grant("read", "topic", TOPIC), Grant("read", "group", GROUP))
PAUSE_S = 1.0  # between two changes
ROUND_S = 12.0
MEMBERS_MIN, MEMBERS_MAX = 3, 8
PAUSED_S_MAX = 4.0  # half of the paused are given up meanwhile
GIVEN_UP_S = 60.0
ACTIONS = ("join", "leave", "stop", "stop", "kill", "kill", "broker")
WEIGHTS = (4, 2, 2, 2, 2, 2, 1)


@dataclass(slots=True)
class GroupReport:
    """What a campaign proved."""

    messages: Verdict = field(default_factory=lambda: Verdict("unknown", (), (), {}))
    group: Verdict = field(default_factory=lambda: Verdict("unknown", (), (), {}))
    changes: Counter[str] = field(default_factory=Counter)
    owned_s: list[float] = field(default_factory=list)
    offline: list[str] = field(default_factory=list)

    @property
    def complaints(self) -> list[str]:
        """What is wrong; none where every promise was kept."""
        found = [str(finding) for finding in (*self.messages.findings, *self.group.findings)]
        return [*found, *self.messages.missing, *self.group.missing, *self.offline]


class GroupCampaign:
    """One campaign in an empty ``directory``; ``say`` gets a line a change.

    Args:
        owned_s_max: after the last change every partition must be owned within so many seconds.
        stopped_s_max: a message may wait so long in a partition that does not move.
        doors: who may connect.
        coverage: so many changes must have been lived through by partitions that did not move.
    """

    def __init__(
        self, directory: Path, seed: int, say: Callable[[str], None] = print, *, owned_s_max: float = 3.0,
        stopped_s_max: float = 3.0, coverage: int = 0, doors: Doors = OPEN,
    ) -> None:  # fmt: skip
        self.world, self._rng, self._say = GroupCampaignDirectory(directory), random.Random(seed), say
        self._doors = doors
        self._owned_s_max = owned_s_max
        self._rules = GroupRules(stopped_s_max=stopped_s_max, stays=coverage, refused=min(coverage, 1))
        self.broker = BrokerProcess(self.world.broker, settings=BROKER_SETTINGS, tls=doors.tls)
        self._producer = Child(PRODUCER, directory, lambda name: self._command("producer", name))
        self._members: list[Child] = []
        self._leaving: list[Child] = []
        self._paused: dict[Child, tuple[float, str]] = {}  # until when, and the outage's name
        self._numbers = self._outages = 0
        self._changed_at = 0.0
        self.report = GroupReport()

    def _command(self, role: str, name: str) -> list[str]:
        return [f"tools.crash.groups.{role}", str(self.world.directory), self._address(user_of(name)), name]

    def _address(self, user: str = OPERATOR) -> str:
        return self._doors.address([self.broker], user)

    # --- the whole ---------------------------------------------------------------------------------------------------

    def run(self, seconds: float, changes: int = 0) -> GroupReport:
        """Play for so long, and until there were so many changes.

        Raises:
            CampaignError: something that is waited for did not happen.
        """
        with ExitStack() as stack:
            stack.callback(self._kill_all)
            stack.callback(self.broker.kill)
            self._changed_at = time.monotonic()  # members may have joined before anybody looks
            self._set_up()
            stack.callback(self._history.close)
            self._changed_at = time.monotonic()
            ends_at, heals_at = time.monotonic() + seconds, time.monotonic() + ROUND_S
            while time.monotonic() < ends_at or self.report.changes.total() < changes:
                self._change()
                pause(PAUSE_S)
                self._continue_due()
                if time.monotonic() >= heals_at:
                    self._heal()
                    heals_at = time.monotonic() + ROUND_S
            self._heal()
            self._come_to_rest()
            self._check()
        return self.report

    def _set_up(self) -> None:
        self.world.histories.mkdir()
        self._history = HistoryFile(self.world.histories, "campaign")
        self.broker.start()
        self._doors.close([self.broker])
        with txmq.connect(self._address()) as client:
            client.topics.create(TOPIC, partitions=PARTITIONS)
        self._doors.admit([self.broker], {PRODUCER: may("write", "topic", [TOPIC])})
        self._producer.start()
        self._heal()

    def _kill_all(self) -> None:
        for child in (self._producer, *self._members, *self._leaving):
            child.kill()

    # --- changes -----------------------------------------------------------------------------------------------------

    def _change(self) -> None:
        action = self._rng.choices(ACTIONS, WEIGHTS)[0]
        are_few, is_full = len(self._members) - len(self._paused) <= MEMBERS_MIN, len(self._members) >= MEMBERS_MAX
        member = self._rng.choice([*self._paused] if are_few and is_full else self._members)
        if are_few and action != "broker":
            action = "kill" if is_full else "join"  # one of those that stand still
        if action == "join" and not is_full:
            member = self._join()
        elif action in ("join", "leave") and member not in self._paused:
            action = "leave"
            member.signal(signal.SIGTERM)
            self._members.remove(member)
            self._leaving.append(member)
        elif action == "stop" and member not in self._paused:
            self._pause(member)
        elif action == "broker":
            self._kill_broker()
        else:
            action = "kill"
            self._kill(member)
        self.report.changes[action] += 1
        self._changed_at = time.monotonic()
        self._say(f"{action} {'' if action == 'broker' else member.name}, {len(self._members)} members")

    def _join(self) -> Child:
        self._numbers += 1
        member = Child(f"m{self._numbers}", self.world.directory, lambda name: self._command("member", name))
        self._doors.admit([self.broker], {member.name: MEMBER_GRANTS})
        member.start()
        self._members.append(member)
        return member

    def _pause(self, member: Child) -> None:
        self._outages += 1
        self._history.write("nemesis", "invoke", f"outage-{self._outages}", [], who=member.run_name)
        member.signal(signal.SIGSTOP)
        until = time.monotonic() + self._rng.uniform(0, PAUSED_S_MAX)
        self._paused[member] = until, f"outage-{self._outages}"

    def _continue_due(self, *, all_of_them: bool = False) -> None:
        for member, (until, outage) in list(self._paused.items()):
            if all_of_them or time.monotonic() >= until:
                del self._paused[member]
                member.signal(signal.SIGCONT)
                self._history.write("nemesis", "ok", outage, [])
                self._changed_at = time.monotonic()

    def _kill(self, member: Child) -> None:
        self._outages += 1
        self._history.write("nemesis", "invoke", f"outage-{self._outages}", [], who=member.run_name)
        member.kill()
        self._members.remove(member)
        if member in self._paused:
            self._history.write("nemesis", "ok", self._paused.pop(member)[1], [])
        self._history.write("nemesis", "ok", f"outage-{self._outages}", [])

    def _kill_broker(self) -> None:
        self._outages += 1
        name = f"outage-{self._outages}"
        self._history.write("nemesis", "invoke", name, [])
        self.broker.kill()
        self.broker.start()
        self._changed_at = time.monotonic()
        self._heal()
        self._history.write("nemesis", "ok", name, [])

    # --- owners ------------------------------------------------------------------------------------------------------

    def _heal(self) -> None:
        """Measure how long after the last change every partition has an owner; again when everybody works."""
        if self._paused:
            self._measure()
        self._continue_due(all_of_them=True)
        while len(self._members) < MEMBERS:
            self._join()
        self._measure()

    def _measure(self) -> None:
        self._refuse_dead()
        with txmq.connect(self._address()) as client:
            eventually(lambda: self._are_joined(client), "every member joins", GIVEN_UP_S, CampaignError)
            eventually(lambda: self._are_owned(client), "every partition has an owner", GIVEN_UP_S, CampaignError)
        seconds = max(0.0, time.monotonic() - self._changed_at)
        self.report.owned_s.append(seconds)
        name = f"owned-{len(self.report.owned_s)}"
        self._history.write("owned", "ok", name, [seconds, self._owned_s_max])
        self._say(f"{len(self._working)} members work, every partition owned {seconds:.2f} s after the last change")

    def _refuse_dead(self) -> None:
        for member in (*self._members, self._producer):
            if not member.is_running:
                raise CampaignError(f"{member.name} ended by itself, with {member.status}; see {member.name}.log")
        for member in [member for member in self._leaving if not member.is_running]:
            member.wait_stopped()
            self._leaving.remove(member)

    def _are_joined(self, client: txmq.Client) -> bool:
        """A member that joins is a change: what is measured begins after the last of them."""
        missing = self._working - {item["member"] for item in _group(client)["members"]}
        if missing:
            self._changed_at = time.monotonic()
        return not missing

    def _are_owned(self, client: txmq.Client) -> bool:
        rows, working = _group(client)["partitions"], self._working
        return len(rows) == PARTITIONS and all(row["owner"] in working for row in rows)

    @property
    def _working(self) -> set[str]:
        return {member.run_name for member in self._members if member not in self._paused}

    # --- the end -----------------------------------------------------------------------------------------------------

    def _come_to_rest(self) -> None:
        """The producer ends, then the members, when nothing is left to consume and all of it is saved."""
        self._producer.signal(signal.SIGTERM)
        self._producer.wait_stopped()
        with txmq.connect(self._address()) as client:
            eventually(lambda: _lag(client) == 0, "the group catches up", GIVEN_UP_S, CampaignError)
        for member in self._members:
            member.signal(signal.SIGTERM)
        for member in (*self._members, *self._leaving):
            member.wait_stopped()

    def _check(self) -> None:
        drained = final_reads.drain(self._address(), {TOPIC: PARTITIONS})
        with txmq.connect(self._address()) as client:
            rows = _group(client)["partitions"]
        lag = [[row["topic"], row["partition"], row["start"], row["offset"], row["end"]] for row in rows]
        for name, found in (("drain", drained), ("rows", []), ("in-doubt", []), ("lag", lag)):
            self._history.write(name, "ok", name, found)
        messages, group = self.world.read()
        self.report.messages, self.report.group = check(messages), check_group(group, self._rules)
        status = self.broker.stop()
        self.report.offline = offline.complaints(self.world.broker, drained)
        if status != 0:
            self.report.offline.append(f"the broker stopped with status {status}")
        self.report.offline += self._doors.refused([self.broker])


def _group(client: txmq.Client) -> dict[str, Any]:
    try:
        return client.groups.describe(GROUP)
    except txmq.errors.UnknownGroupError:  # nobody has joined yet
        return {"members": [], "partitions": []}


def _lag(client: txmq.Client) -> int:
    return sum(row["lag"] for row in _group(client)["partitions"])
