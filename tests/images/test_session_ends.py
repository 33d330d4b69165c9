"""A client that ends its session, cut at every write: what it repeats is known, or refused, and stored once."""

from __future__ import annotations

import pytest

from tests.unit.broker.support import node, values
from tools.images.node import Client, Node
from tools.images.requests import batch, part
from tools.simulated.crash_images import enumerate_images
from tools.simulated.disk import SimDisk

BATCHES = [batch(b"%d" % sequence, producer=1, sequence=sequence) for sequence in range(3)]


def _put_all(client: Client) -> list[str | None]:
    answers = [client.ask("put", "a", 0, body=bytearray(content)) for content in BATCHES]
    return [None if answer.code == 200 else answer.error for answer in answers]


def _ended(disk: SimDisk, opaque: bytes) -> bool:
    return any(isinstance(note, tuple) and note[:3] == ("told", opaque, 200) for note in disk.notes)


@pytest.mark.parametrize("counter", [0, 1])
def test_session_that_ends_at_every_crash_stores_nothing_twice(counter: int) -> None:
    broker = node()
    client = broker.session()
    wish = f"1.0.{broker.state.sessions[1].secret}"
    trace = broker.disk.start_trace()
    assert _put_all(client) == [None] * 3
    if counter:
        assert client.ask("commit", broker.txid(1, 1), body=part("b", 0, batch(b"t"))).code == 200
    opaque = client.send("end", counter)
    broker.pump()
    broker.checkpoint()
    broker.checkpoint()
    fates = set[bool]()
    for label, disk in enumerate_images(trace):
        is_told = _ended(disk, opaque)
        again = Node(disk, broker.settings, clock=broker.clock)
        late = again.connect()
        is_fenced = late.ask("hello", 1, "late", extensions={"session": wish}).error == "fenced"
        assert is_fenced or not is_told, f"P1: {label}: the end of the session is lost"
        assert _put_all(late) == (["other-session"] * 3 if is_fenced else [None] * 3), label
        stored = values(again)
        assert stored == [b"0", b"1", b"2"][: len(stored)], f"P6: {label}: {stored}"
        assert is_fenced <= (again.state.sequences.count == 0 and len(stored) == 3), label
        fates.add(is_fenced)
    assert fates == {False, True}
