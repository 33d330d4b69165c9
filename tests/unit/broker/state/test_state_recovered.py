"""State is a fold over the journal: what a restart finds equals what the broker had, after any history.

Histories are drawn: every verb that changes state, sensible and refused, several of them in one group, with checkpoints
and restarts, with other limits, between. The live state is compared with the one recovered after a kill, with the one
recovered after a power loss, and with the one that followed; so are the messages.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.images.check import comparable
from tools.images.node import Client, Node, small_settings
from tools.images.requests import UUID, batch, part
from tools.simulated.clock import SimClock
from tools.simulated.disk import SimDisk
from txmq.broker.commit.redo import Redo, RedoEffects
from txmq.broker.state.state import State
from txmq.errors import StorageError
from txmq.redo import entries

from ..support import stated

TOPICS = ("a", "b", "c")
COUNTERS = st.integers(1, 6)


class History:
    """A broker, one client, and what the client knows."""

    def __init__(self, seed: int) -> None:
        self.disk = SimDisk(random.Random(seed))
        self.clock, self.number, self.lives = SimClock(), 0, 0
        self.sequences: dict[tuple[str, int], int] = {}
        self.streamed: dict[int, list[bytes]] = {}
        self.node: Node
        self.client: Client
        self.start(self.disk)
        for topic in TOPICS[:2]:
            words = {"partitions": 2, "segment_size_bytes": 4096, "retention_size_bytes": 4096}
            self.client.ask("topic", "create", topic, extensions=words)

    def start(self, disk: SimDisk) -> None:
        """A life of the broker."""
        outcomes_kept, in_flight_max = ((3, 2), (1, 4), (5, 1))[self.lives % 3]
        self.lives += 1
        self.settings = small_settings(outcomes_kept=outcomes_kept, in_flight_max=in_flight_max, sessions_max=3)
        # Below what users may set: a group of drawn commands has to fit one record of the small journal file.
        object.__setattr__(self.settings, "group_size_bytes_max", 4 << 10)
        self.node = Node(disk, self.settings, clock=self.clock)
        self.client = self.node.session("1.0" if 1 in self.node.state.sessions else "new")
        self.streamed.clear()

    def batch(self, size: int, **fields: int) -> bytes:
        """A batch that no other equals."""
        self.number += 1
        return batch((b"%d." % self.number).ljust(size, b"-"), **fields)  # type: ignore[arg-type]

    def txid(self, counter: int) -> str:
        """One of the client's transactions."""
        return self.node.txid(1, counter)


Step = Callable[[History], object]


def _put(topic: str, partition: int, size: int, shift: int) -> Step:
    def step(history: History) -> None:
        place = topic, partition
        sequence = history.sequences.get(place, 0) + shift
        opaque = history.client.send(
            "put", topic, partition, body=history.batch(size, producer=1, sequence=max(0, sequence))
        )
        if shift == 0 and opaque not in history.client.received:
            history.sequences[place] = sequence + 1

    return step


def _plain(topic: str, partition: int, size: int) -> Step:
    return lambda history: history.client.send("put", topic, partition, body=history.batch(size))


def _local(counter: int, places: list[tuple[str, int]], floor: int) -> Step:
    return lambda history: history.client.send(
        "commit", history.txid(counter), extensions={"floor": floor},
        body=b"".join(part(topic, number, history.batch(200)) for topic, number in places),
    )  # fmt: skip


def _stream(counter: int, topic: str, partition: int) -> Step:
    def step(history: History) -> None:
        content = history.batch(300)
        if counter in history.streamed or (1, counter) not in history.node.state.transactions:
            history.client.send("put", topic, partition, extensions={"tx": history.txid(counter)}, body=content)
            if (1, counter) in history.node.state.streams:
                history.streamed.setdefault(counter, []).append(content)

    return step


def _commit(counter: int, places: list[tuple[str, int]]) -> Step:
    return lambda history: history.client.send(
        "commit", history.txid(counter), extensions=stated(history.streamed.get(counter, [])),
        body=b"".join(part(topic, number, history.batch(200)) for topic, number in places),
    )  # fmt: skip


def _prepare(counter: int, places: list[tuple[str, int]], keys: str) -> Step:
    return lambda history: history.client.send(
        "prepare", history.txid(counter), "last-resource",
        extensions={"resource": "db", "uuid": UUID, "table": "t", **stated(history.streamed.get(counter, []))},
        body=b"".join(part(topic, number, history.batch(200), keys) for topic, number in places),
    )  # fmt: skip


def _rollback(counter: int) -> Step:
    return lambda history: history.client.send("rollback", history.txid(counter))


def _fence(counter: int) -> Step:
    return lambda history: history.client.send("outcome", history.txid(counter), extensions={"fence": None})


def _topic(action: str, name: str) -> Step:
    words = {} if action == "delete" else {"partitions": 2, "segment_size_bytes": 4096}
    return lambda history: history.client.send("topic", action, name, extensions=words)


def _pump(history: History) -> None:
    history.node.pump()


def _checkpoint(history: History) -> None:
    history.node.pump()
    history.node.checkpoint()


def _retire(history: History) -> None:
    history.node.pump()
    history.node.retire()


def _restart(history: History) -> None:
    history.node.pump()
    history.start(history.node.kill())


def _sessions(history: History) -> None:
    """Others come, are forgotten, and make room."""
    history.node.pump()
    history.node.clock.advance(61)
    history.node.session().disconnect()


def _ends(counter: int) -> Step:
    """Another client sends, and is done with its session."""

    def step(history: History) -> None:
        history.node.pump()
        history.node.clock.advance(61)
        client = history.node.session()
        client.send("put", "a", 0, body=history.batch(50, producer=history.node.newest_session))
        client.send("end", counter)

    return step


_topics, _partitions = st.sampled_from(TOPICS), st.integers(0, 1)
_places = st.lists(st.tuples(_topics, _partitions), max_size=3)
_steps = st.one_of(
    st.builds(_put, _topics, _partitions, st.sampled_from([50, 1500]), st.sampled_from([0, 0, 0, -1, 1])),
    st.builds(_plain, _topics, _partitions, st.sampled_from([50, 1500])),
    st.builds(_local, COUNTERS, _places, st.integers(0, 3)),
    st.builds(_stream, COUNTERS, _topics, _partitions),
    st.builds(_commit, COUNTERS, _places),
    st.builds(_prepare, COUNTERS, _places, st.sampled_from(["7", "7,8", "*"])),
    st.builds(_rollback, COUNTERS),
    st.builds(_fence, COUNTERS),
    st.builds(_topic, st.sampled_from(["create", "alter", "delete"]), _topics),
    st.builds(_ends, st.integers(0, 1)),
    st.sampled_from([_pump, _pump, _checkpoint, _retire, _restart, _sessions]),
)


def _everything(node: Node) -> dict[tuple[str, int], list[tuple[int, bytes | None]]]:
    return {
        (partition.topic, partition.number): [(m.offset, m.value) for m in node.messages(partition)]
        for partition in node.state.all_partitions()
    }


@settings(deadline=None, max_examples=150)
@given(st.lists(_steps, min_size=12, max_size=60), st.booleans())
def test_what_a_restart_finds_is_what_the_broker_had(steps: list[Step], power_lost: bool) -> None:
    history = History(len(steps))
    for step in steps:
        step(history)
    history.node.pump()
    history.node.compare_follower()
    live, messages = history.node.state, _everything(history.node)
    again = Node(history.node.disk.crash() if power_lost else history.node.kill(), history.settings)
    live.led(again.state.epoch, 0, 0, live.limits, is_member=False)  # what a new life does to streams
    assert comparable(again.state) == comparable(live)
    assert again.state.payload_bytes == live.payload_bytes
    assert _everything(again) == messages
    third = Node(again.kill(), history.settings)
    assert comparable(third.state) == comparable(live)
    assert _everything(third) == messages


def test_epoch_of_a_newer_format_is_refused() -> None:
    entry = entries.json_entry(entries.LED, {"epoch": 1, "format": entries.FORMAT + 1})
    with pytest.raises(StorageError, match=r"epoch 1 .* format 2, this txmq reads 1: upgrade"):
        Redo(state := State(), RedoEffects(state)).record(entry)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_snapshot_holds_everything_there_is(checkpointed: bool) -> None:
    history = History(1)
    steps: list[Step] = [
        _put("a", 0, 1500, 0), _put("a", 1, 50, 0), _local(1, [("a", 0), ("b", 1)], 0), _pump, _stream(2, "a", 0),
        _pump, _checkpoint if checkpointed else _pump, _stream(2, "b", 0), _prepare(2, [("b", 1)], "7"),
        _prepare(3, [], "7"), _rollback(4), _topic("create", "c"), _plain("c", 0, 50), _put("a", 0, 1500, 0),
        _put("a", 0, 1500, 0), _retire,
    ]  # fmt: skip
    for step in steps:
        step(history)
    snapshot = history.node.state.snapshot()
    assert {len(snapshot[name]) for name in ("topics", "transactions", "sessions")} == {3, 2, 1}
    assert comparable(Node(history.node.kill(), history.settings).state) == comparable(history.node.state)


@pytest.mark.parametrize("number", [0, 1])
def test_commit_of_a_part_held_nowhere_is_damage(number: int) -> None:
    history = History(1)
    if number:
        _stream(1, "a", 0)(history)
    place = entries.Placement(1, 0, 0, 0, 0, 1, number)
    with pytest.raises(StorageError, match=f"commits part {number} of transaction 1-1, which neither"):
        Redo(history.node.state, RedoEffects(history.node.state)).record(entries.encode_committed(1, 1, 0, [place]))
