"""What is derived from the journal is derived alike, live and by a restart: what holds, what waits, what may be read.

The histories of ``test_state_recovered``, with decisions, completions, holds that last too long, offsets of consumer
groups, deleted topics and queries. Compared is what no snapshot holds.
"""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tools.images.check import comparable
from tools.images.node import Node
from tools.images.requests import UUID, part
from txmq.broker.state.state import State
from txmq.protocol.group_rows import GroupOffsets, OffsetRow, encode_offsets
from txmq.protocol.transaction_bodies import encode_branch

from ..support import stated
from .test_state_recovered import (
    History,
    Step,
    _checkpoint,
    _commit,
    _local,
    _plain,
    _prepare,
    _pump,
    _restart,
    _rollback,
    _stream,
    _topic,
)

GROUPS, UUIDS = ("g", "h"), (UUID, "f" * 32)
BRANCH = {"bqual": "b", "connection": 1, "wrote": True, "marker": True, "table": "t"}
Places = list[tuple[str, int]]


def _offsets(history: History, groups: list[str], offset: int) -> bytes:
    """Offsets of partition 0 of topic a, under the newest generations."""
    state = history.node.state
    partition = state.partitions.get((b"a", b"0"))
    place = (partition.topic_id, 0) if partition is not None else (0, 0)
    newest = [(group, state.saved.generation(group, place)) for group in groups]
    rows = [GroupOffsets(group, 0, (OffsetRow("a", 0, number, offset, None),)) for group, number in newest if number]
    return encode_offsets(rows)


def _parts(history: History, places: Places) -> bytes:
    return b"".join(part(topic, number, history.batch(100), "7") for topic, number in places)


def _decide(counter: int, places: Places, branches: int, groups: list[str], offset: int) -> Step:
    def step(history: History) -> None:
        saved = _offsets(history, groups, offset)
        begun = b"".join(encode_branch("db", uuid, BRANCH) for uuid in UUIDS[:branches])
        words = {"branches": branches, "offsets": len(saved), **stated(history.streamed.get(counter, []))}
        body = begun + saved + _parts(history, places)
        history.client.send("decide", history.txid(counter), extensions=words, body=body)

    return step


def _prepare_with_offsets(counter: int, places: Places, groups: list[str], offset: int) -> Step:
    def step(history: History) -> None:
        saved = _offsets(history, groups, offset)
        stated_words = stated(history.streamed.get(counter, []))
        words: dict[str, str | int | None] = {"group": "producers", "offsets": len(saved), **stated_words}
        history.client.send(
            "prepare", history.txid(counter), "half", extensions=words, body=saved + _parts(history, places)
        )

    return step


def _complete(counter: int, uuid: str) -> Step:
    return lambda history: history.client.send("complete", history.txid(counter), extensions={"uuid": uuid})


def _settle(counter: int) -> Step:
    return lambda history: history.client.send("commit", history.txid(counter), body=b"")


def _lone(counter: int) -> Step:
    return lambda history: history.client.send(
        "commit", history.txid(counter), extensions={"heuristic": "me"}, body=b""
    )


def _member(action: str, group: str) -> Step:
    def step(history: History) -> None:
        membership = history.node.context.groups.get(group)
        owned = sorted(membership.owned.items()) if membership is not None else []
        rows: list[list[Any]] = []
        if action == "save":
            rows = [[*slot, owner.generation, 5, None] for slot, owner in owned]
        words = {"member": "m", "topics": "a,b"}
        history.client.send("group", action, group, extensions=words, body=json.dumps(rows).encode())

    return step


def _wait(seconds: float) -> Step:
    def step(history: History) -> None:
        history.clock.advance(seconds)
        history.node.core.tick(history.clock.now_ms())

    return step


_counters, _topics = st.integers(1, 5), st.sampled_from(["a", "b", "c"])
_places = st.lists(st.tuples(_topics, st.integers(0, 1)), max_size=3)
_saving = st.lists(st.sampled_from(GROUPS), max_size=2, unique=True)
_steps = st.one_of(
    st.builds(_decide, _counters, _places, st.integers(1, 2), _saving, st.integers(0, 9)),
    st.builds(_complete, _counters, st.sampled_from(UUIDS)),
    st.builds(_prepare_with_offsets, _counters, _places, _saving, st.integers(0, 9)),
    st.builds(_prepare, _counters, _places, st.sampled_from(["7", "*"])),
    st.builds(_settle, _counters),
    st.builds(_lone, _counters),
    st.builds(_rollback, _counters),
    st.builds(_stream, _counters, _topics, st.integers(0, 1)),
    st.builds(_commit, _counters, _places),
    st.builds(_local, _counters, _places, st.just(0)),
    st.builds(_plain, _topics, st.integers(0, 1), st.just(50)),
    st.builds(_topic, st.sampled_from(["create", "delete"]), _topics),
    st.builds(_member, st.sampled_from(["join", "join", "save", "leave", "delete"]), st.sampled_from(GROUPS)),
    st.builds(_wait, st.sampled_from([0.1, 31.0])),
    st.sampled_from([_pump, _pump, _checkpoint, _restart]),
)


def _derived(state: State) -> dict[str, Any]:
    decisions = state.decisions
    return {
        "held": state.saved.held,
        "visible": {(p.topic_id, p.number): p.high_watermark for p in state.all_partitions()},
        "holds": {
            (p.topic_id, p.number): [hold.name for hold in queue] for p, queue in decisions.barriers._queues.items()
        },
        "order": {key: [t.counter for t in queue] for key, queue in state.order._by_key.items()},
        "undone": {name: [branch["complete"] for branch in d.branches] for name, d in decisions.incomplete.items()},
        "foreign": state.foreign,
        "streams": sorted(state.streams),
        "bytes": state.payload_bytes,
    }


@settings(deadline=None, max_examples=60)
@given(st.lists(_steps, min_size=12, max_size=50))
def test_derived_state_equals_a_restart_from_journal_and_from_checkpoint(steps: list[Step]) -> None:
    history = History(len(steps))
    for group in GROUPS:
        _member("join", group)(history)
    for step in steps:
        step(history)
    history.node.pump()
    live = history.node.state
    live.led(0, 0, 0, live.limits, is_member=False)
    redone = Node(history.node.kill(), history.settings, clock=history.clock)
    assert (_derived(redone.state), comparable(redone.state)) == (_derived(live), comparable(live))
    redone.checkpoint()
    restored = Node(redone.kill(), history.settings, clock=history.clock)
    assert (_derived(restored.state), comparable(restored.state)) == (_derived(live), comparable(live))
