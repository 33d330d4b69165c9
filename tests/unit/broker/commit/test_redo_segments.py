"""Redo with more segments than may be open: each is written, and so synced to be closed, once."""

from __future__ import annotations

import pytest

from tools.images.check import comparable
from tools.images.node import Node
from tools.images.requests import batch, part
from txmq.broker.commit import redo
from txmq.log.verify import verify_log

from ..support import node, put, restarted, values

OPEN_MAX, PARTITIONS, ROUNDS = 12, 40, 5


def _written_in_turn() -> Node:
    """Each record of the journal is about another partition than the one before."""
    made = node(open_files_max=OPEN_MAX)
    client = made.session()
    assert client.ask("topic", "create", "wide", extensions={"partitions": PARTITIONS}).code == 200
    for value in range(ROUNDS):
        for number in range(PARTITIONS):
            assert put(client, b"%d" % value, topic="wide", partition=number).code == 200
    parts = [part("wide", number, batch(b"last")) for number in range(PARTITIONS)]
    assert client.ask("commit", made.txid(1, 1), body=b"".join(parts)).code == 200
    return made


@pytest.mark.parametrize("gathered_max", [redo.GATHERED_BYTES_MAX, 500])
def test_redo_syncs_no_segment_twice(gathered_max: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redo, "GATHERED_BYTES_MAX", gathered_max)
    made = _written_in_turn()
    image = made.kill()
    before = image.counts["sync"]
    again = Node(image, made.settings, clock=made.clock)
    if gathered_max > 500:
        assert image.counts["sync"] - before < PARTITIONS
    expected = [b"%d" % value for value in range(ROUNDS)] + [b"last"]
    assert all(values(again, "wide", number) == expected for number in range(PARTITIONS))
    assert comparable(again.state) == comparable(made.state)
    assert verify_log(again.disk).is_sound
    assert values(restarted(again), "wide", 7) == expected


def test_redo_that_lacks_descriptors_may_be_repeated() -> None:
    made = _written_in_turn()
    image = made.kill()
    image.fail_at(1, 24, "open", path_prefix="log", forever=True)
    with pytest.raises(OSError, match="24"):
        Node(image, made.settings, clock=made.clock)
    again = Node(image.kill(), made.settings, clock=made.clock)
    assert len(values(again, "wide", PARTITIONS - 1)) == ROUNDS + 1
