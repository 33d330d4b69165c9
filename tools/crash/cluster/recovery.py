"""How long until everything works again after a fault, and how long the partitions of living homes paused.

Theory of operation. From the moment when the victims are up, several things are looked at again and again, until each
has come true: the partitions of the *victims* take messages (the pulse's), and so do all *others*; killed *clients*, or
rather their successors, have been acknowledged something; each partition of the *group* is a living member's; what was
in doubt is *settled*; the Spark *stream* has committed another batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import txmq
from tools.crash.cluster.directory import PULSE, ClusterCampaignDirectory
from tools.crash.cluster.processes import Processes
from tools.crash.cluster.pulse import acknowledged_since, file_of, longest_gap, machine_file_of
from tools.crash.faults import Fault
from tools.crash.groups.directory import GROUP
from tools.crash.groups.directory import PARTITIONS as GROUP_PARTITIONS
from tools.crash.processes import CampaignError
from tools.crash.spark.stream import newest_batch
from txmq.model import TransactionKind
from txmq.testing.eventually import eventually

GIVEN_UP_S = 300.0  # a Spark stream on a loaded machine
# The names of what is waited for; columns of the report's table.
VICTIMS, OTHERS, CLIENTS, GROUP_OWNED, SETTLED, STREAM = "victims", "others", "clients", "group", "settled", "stream"
Holds = Callable[[], bool]


class Recovery:
    """Looks at one cluster; see the module's docstring.

    Args:
        client: of the campaign itself.
        broker_of: a partition's, of each topic.
    """

    def __init__(
        self, world: ClusterCampaignDirectory, processes: Processes, client: txmq.Client,
        broker_of: dict[tuple[str, int], int],
    ) -> None:  # fmt: skip
        self._world, self._processes, self._client = world, processes, client
        self._pulses = {number: broker for (topic, number), broker in broker_of.items() if topic == PULSE}

    def living(self, fault: Fault) -> list[int]:
        """The pulse's partitions whose home is not a victim."""
        return [number for number, broker in self._pulses.items() if f"broker {broker}" not in fault.victims]

    def await_all(self, fault: Fault, since: float) -> dict[str, float]:
        """Wait until all works again.

        Returns:
            By what has come true: how long after ``since``.

        Raises:
            CampaignError: one thing did not come true.
        """
        return await_all(str(fault), dict(self._conditions(fault, since)), since)

    def await_begin(self) -> None:
        """Until the pulse beats and the stream has committed its first batch."""
        begins = {"the pulse begins": lambda: self._take(self._pulses, 0.0)}
        if self._processes.driver is not None:
            begins["the stream begins"] = lambda: newest_batch(self._client) >= 0
        await_all("the campaign", begins, time.monotonic())

    def await_rest(self) -> None:
        """Until the group has dealt with everything and nothing is in doubt."""
        rest = {"the group catches up": lambda: self._lag() == 0, SETTLED: lambda: not self.in_doubt()}
        await_all("the end", rest, time.monotonic())

    def _lag(self) -> int:
        return sum(row["lag"] for row in self._client.groups.describe(GROUP)["partitions"])

    def _conditions(self, fault: Fault, since: float) -> Iterator[tuple[str, Holds]]:
        living = self.living(fault)
        if broken := self._pulses.keys() - set(living):
            yield VICTIMS, lambda: self._take(broken, since)
        yield OTHERS, lambda: self._take(living, since)
        if files := list(self._files_of(fault)):
            yield CLIENTS, lambda: all(acknowledged_since(file, since) for file in files)
        yield GROUP_OWNED, self._is_owned
        yield SETTLED, self._settling()
        if self._processes.driver is not None:
            yield STREAM, self._streaming()

    def _take(self, partitions: Collection[int], since: float) -> bool:
        name = self._processes.pulse.run_name
        return all(acknowledged_since(file_of(self._world, name, number), since) for number in partitions)

    def _files_of(self, fault: Fault) -> Iterator[Path]:
        for name in fault.victims:
            if name.startswith(("worker", "banker", "ordered")):
                thread = ".t0" if name == "ordered" else ""
                yield self._world.histories / f"{self._processes.child(name).run_name}{thread}.jsonl"

    def _is_owned(self) -> bool:
        members = {member.run_name for member in self._processes.members}
        rows = self._client.groups.describe(GROUP)["partitions"]
        return len(rows) == GROUP_PARTITIONS and all(row["owner"] in members for row in rows)

    def _settling(self) -> Holds:
        """What is in doubt when it is first asked is no longer."""
        before: list[set[str]] = []

        def is_settled() -> bool:
            now = self.in_doubt()
            if not before:
                before.append(now)
            return not now & before[0]

        return is_settled

    def in_doubt(self) -> set[str]:
        """In the brokers and in the databases; not what a running batch of the stream has prepared."""
        rows = self._client.transactions.list(state="in-doubt")
        stream = {row["txid"] for row in rows if row["kind"] == TransactionKind.SPARK.value}
        found = {str(row["txid"]) for row in rows if row["txid"] not in stream and row.get("of") not in stream}
        return found | self._world.prepared()

    def _streaming(self) -> Holds:
        before: list[int] = []

        def has_moved() -> bool:
            now = newest_batch(self._client)
            if not before:
                before.append(now)
            return now > before[0]

        return has_moved

    def longest_pause(self, fault: Fault, since: float) -> float:
        """The longest time between two acknowledgements of one of the living homes' partitions."""
        name = self._processes.pulse.run_name
        return max(longest_gap(file_of(self._world, name, number), since) for number in self.living(fault))

    def machine_pause(self, since: float) -> float:
        """The longest time in which the machine itself let a thread of the pulse wait; no broker is part of it."""
        return longest_gap(machine_file_of(self._world, self._processes.pulse.run_name), since)


def await_all(title: str, conditions: dict[str, Holds], since: float) -> dict[str, float]:
    """Wait until each of the conditions has come true; how long after ``since``, by its name.

    Raises:
        CampaignError: one did not.
    """
    waiting, found = dict(conditions), dict[str, float]()
    errors: dict[str, txmq.TxmqError] = {}

    def all_hold() -> bool:
        for what, holds in list(waiting.items()):
            try:
                if not holds():
                    continue
            except txmq.TxmqError as error:  # a broker has just begun to serve: later
                errors[what] = error
                continue
            found[what] = time.monotonic() - since
            del waiting[what]
        return not waiting

    eventually(all_hold, lambda: f"{title}: {', '.join(waiting)}; {errors}", GIVEN_UP_S, CampaignError)
    return found
