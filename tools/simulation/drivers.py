"""Drivers of a query that writes in batches, as Spark does: each batch by several tasks, some of them twice.

A driver asks which batch was committed last, lets tasks prepare the next one and commits it, again where no answer
came. It is killed, and replaced while it may still be alive. What must hold: the batches up to the newest are there,
each from one attempt of each task; nothing else is; a former driver commits nothing.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from dataclasses import dataclass, field

from txmq.model import TopicPartition

from .client import Client, Reply, Steps, encoded_batch
from .history import Shared, Transaction
from .world import Violation

SINK = "sink"  # a topic that only drivers write to
QUERY = "q"
Asked = Generator[float | bytes, Reply, bool]


@dataclass(slots=True)
class Written:
    """What all drivers were told.

    Attributes:
        epoch: the latest that somebody was told has opened the query.
        newest: the newest batch that somebody was told is committed.
        winners: the txids of each batch whose own request was answered as committed.
    """

    epoch: int = 0
    newest: int = -1
    winners: dict[int, list[str]] = field(default_factory=dict)


class Driver(Client):
    """One life of the driver, and its tasks."""

    def __init__(self, shared: Shared, written: Written, name: str, batches_max: int = 1 << 30) -> None:
        self.written, self._batches_max = written, batches_max
        self.epoch_of_query = 0
        super().__init__(shared, name)

    def main(self) -> Steps:
        """Until the world stops, a later driver opens the query, or nothing is left to do."""
        begun = yield from self._insist("epoch", query="*")
        if begun is None:
            return
        self.epoch_of_query = json.loads(begun)["epoch"]
        opened = yield from self._insist("open")
        if opened is None:
            return
        self.written.epoch = max(self.written.epoch, self.epoch_of_query)
        newest = json.loads(opened)["batch"]
        batch = 0 if newest is None else newest + 1
        if batch <= self.written.newest and not self.shared.may_forget:
            raise Violation(f"P1: batch {self.written.newest} was told to be committed, the newest is {newest}")
        for number in range(batch, batch + self._batches_max):
            is_done = False
            while not is_done:
                if self.shared.stopping:
                    return
                is_done = yield from self._write(number)
                if self.is_fenced:
                    return

    is_fenced = False

    def _insist(
        self, action: str, body: bytes = b"", query: str = QUERY, **given: int
    ) -> Generator[float | bytes, Reply, bytes | None]:
        """Ask until there is an answer; None where it is a refusal."""
        words: dict[str, str | int | None] = {**given}
        if query == QUERY:
            words["epoch"] = self.epoch_of_query
        while True:
            yield from self.connected()
            reply = yield from self.ask("query", action, query, extensions=words, body=body)
            if reply is not None and reply[0] == 410:
                self.is_fenced = True
                self.world.meet("a former driver was fenced")
                return None
            if reply is not None and reply[0] < 500:
                return reply[1] if reply[0] == 200 else None
            yield 0.02

    def _write(self, batch: int) -> Asked:
        """Whether the batch is committed; if not, it is written anew."""
        winners: list[Transaction] = []
        for task in range(self.world.rng.randint(1, 3)):
            for attempt in range(self.world.rng.choice((1, 1, 2))):
                prepared = yield from self._prepare(batch, task, attempt)
                if prepared is not None and len(winners) == task:
                    winners.append(prepared)
            if len(winners) != task + 1:
                return False
        yield self.world.rng.uniform(0.0, 0.05)
        body = b"".join(b"%b\n" % one.txid.encode() for one in winners)
        was_former = self._is_former()
        found = yield from self._insist("commit", body, batch=batch)
        if found is None:
            return False
        if was_former:
            raise Violation(f"P6: a former driver committed batch {batch}")
        if not json.loads(found)["already_committed"]:
            self.written.winners[batch] = [one.txid for one in winners]
        else:
            self.world.meet("a batch was committed already")
        self.written.newest = max(self.written.newest, batch)
        self.world.meet("a batch was committed")
        return True

    def _prepare(self, batch: int, task: int, attempt: int) -> Generator[float | bytes, Reply, Transaction | None]:
        yield from self.connected()
        txid = self.next_txid()
        values = tuple(b"%b|%d %d %d" % (txid.encode(), batch, task, n) for n in range(self.world.rng.randint(1, 3)))
        place = (SINK, self.world.rng.randrange(2))
        transaction = self.shared.history.transactions[txid] = Transaction(txid, [(place, values)])
        content = encoded_batch(values)
        was_former = self._is_former()
        reply = yield from self.ask(
            "prepare", txid, "spark", body=f"{place[0]} {place[1]} {len(content)}\r\n".encode() + content,
            extensions={
                "query": QUERY, "epoch": self.epoch_of_query, "batch": batch, "task": task, "attempt": attempt,
            },
        )  # fmt: skip
        if reply is None or reply[0] != 200:
            return None
        if was_former:
            raise Violation(f"P6: a former driver prepared {transaction.txid}")
        return transaction

    def _is_former(self) -> bool:
        return self.epoch_of_query < self.written.epoch and not self.shared.may_forget


def check_batches(shared: Shared, written: Written, visible: dict[bytes, tuple[TopicPartition, int]]) -> None:
    """What must hold at the end."""
    known = [node.state.queries.named.get(QUERY) for node in shared.nodes()]
    newest = max((query.newest for query in known if query is not None and query.newest is not None), default=-1)
    if newest < written.newest and not shared.may_forget:
        raise Violation(f"P1: batch {written.newest} was told to be committed, the newest is {newest}")
    attempts: dict[tuple[int, int], set[bytes]] = {}
    for value, ((topic, _), _) in visible.items():
        if topic == SINK:
            txid, _, words = value.partition(b"|")
            batch, task, _ = map(int, words.split())
            attempts.setdefault((batch, task), set()).add(txid)
    if twice := [key for key, txids in attempts.items() if len(txids) > 1]:
        raise Violation(f"P6: (batch, task) written twice: {twice}")
    if (there := {batch for batch, _ in attempts}) != set(range(newest + 1)):
        raise Violation(f"P2: batches up to {newest} are committed, there are {sorted(there)}")
    for batch, winners in written.winners.items():
        found = {txid.decode() for (number, _), txids in attempts.items() if number == batch for txid in txids}
        if found != set(winners) and not shared.may_forget:
            raise Violation(f"P1: batch {batch} was committed as {winners}, there is {sorted(found)}")
