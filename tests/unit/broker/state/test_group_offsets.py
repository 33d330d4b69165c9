"""What is kept of consumer groups is bounded in bytes: entries, texts about what is deferred, and held ones."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tools.images.node import Answer, Client, Node, small_settings
from tools.images.requests import UUID, batch, part
from txmq.broker.state.group_offsets import PLACE_BYTES, SavedGroups, rows
from txmq.protocol.group_rows import GroupOffsets, OffsetRow, encode_offsets
from txmq.protocol.transaction_bodies import encode_branch

from ..group_support import A0, A1, B0, GROUP, Consumer, pass_time
from ..support import node, restarted

BRANCH = {"bqual": "b", "connection": 1, "wrote": True, "marker": True, "table": "t"}
PLACES = 3  # of topics a and b
FULL = PLACES * PLACE_BYTES


def offsets(
    offset: int, generation: int = 1, *, order: int = 0, deferred: str | None = None, group: str = GROUP
) -> bytes:
    """What a transaction saves of partition 0 of topic a."""
    return encode_offsets([GroupOffsets(group, order, (OffsetRow("a", 0, generation, offset, deferred),))])


def commit(client: Client, txid: str, stated: bytes, content: bytes = b"x") -> Answer:
    """A local transaction of one message in topic b."""
    body = stated + part("b", 0, batch(content))
    return client.ask("commit", txid, extensions={"offsets": len(stated)}, body=body)


def prepare(client: Client, txid: str, stated: bytes, content: bytes = b"x") -> Answer:
    """The same, prepared."""
    body = stated + part("b", 0, batch(content), "*")
    words: dict[str, str | int | None] = {
        "resource": "db",
        "uuid": UUID,
        "table": "t",
        "offsets": len(stated),
    }
    return client.ask("prepare", txid, "last-resource", extensions=words, body=body)


def decide(client: Client, txid: str, stated: bytes, *contents: bytes) -> Answer:
    """The same, decided with one branch."""
    body = encode_branch("db", UUID, BRANCH) + stated + b"".join(part("b", 0, batch(value)) for value in contents)
    return client.ask("decide", txid, extensions={"branches": 1, "offsets": len(stated)}, body=body)


def lives(of: Node, *, checkpoint: bool) -> Node:
    """The next life, from the journal or from a checkpoint."""
    if checkpoint:
        of.checkpoint()
    return restarted(of)


def kept(made: Node) -> int:
    """What the broker counts; the same, counted anew, and in its next lives."""
    saved = made.state.saved
    assert saved.size_bytes == counted(saved)
    return saved.size_bytes


def counted(saved: SavedGroups) -> int:
    while not saved.is_swept:
        saved.sweep(1)
    sizes = (size for group in saved.named.values() for _, size in group.sizes())
    return sum(sizes) + sum(saved._held_bytes.values())


def refused(answer: Any) -> bool:
    if answer.code == 200:
        return False
    assert (answer.code, answer.error) == (429, "overloaded")
    assert "groups_bytes_max" in answer.text
    assert "txmq group delete" in answer.text
    return True


def test_group_without_room_may_not_join_and_present_one_may() -> None:
    made = node(groups_bytes_max=FULL + PLACE_BYTES)
    one = Consumer(made, "one").join()
    assert kept(made) == FULL
    other = made.connect()

    def join(topic: str) -> Any:
        return other.ask("group", "join", "other", extensions={"member": "m", "topics": topic}, body=b"")

    assert refused(join("a"))
    assert kept(made) == FULL
    assert "other" not in made.state.saved.named
    assert not refused(join("b"))
    assert refused(made.connect().ask("group", "reset", "third", extensions={"create": None}, body=b'[["a", 0, 1]]'))
    assert one.save(A0, 1, 7) == one.save(A1, 1, 7) == one.save(B0, 1, 7) == []  # their room was taken when they joined
    lowered = small_settings(groups_bytes_max=FULL)
    made = Node(made.kill(), lowered, clock=made.clock)  # what adds nothing goes on
    one = Consumer(made, "one").join(*[[*slot, 1] for slot in (A0, A1, B0)])
    assert kept(made) == FULL + PLACE_BYTES
    assert one.save(A0, 1, 8) == []


def test_text_without_room_is_refused_whole_a_shrinking_one_not() -> None:
    made = node(groups_bytes_max=FULL + 100)
    one = Consumer(made, "one").join()
    assert one.save(A0, 1, 5, "x" * 60) == []
    rows = [[*A0, 1, 6, "x" * 60], [*A1, 1, 6, "y" * 60]]
    assert refused(one.ask("save", rows, member="one", order=9))
    assert [one.heartbeat().view["assigned"][n][3] for n in (0, 1)] == [5, None]
    rows[1][4] = None
    answer = one.ask("save", rows, member="one", order=9)  # the same look: it was not taken for saved
    assert json.loads(answer.body) == {"refused": []}
    assert [one.heartbeat().view["assigned"][n][3] for n in (0, 1)] == [6, 6]
    assert one.save(A0, 1, 7, "x") == one.save(A1, 1, 7, "\N{SNOWMAN}" * 24) == []
    assert kept(made) == FULL + 1 + 4 * 24


def test_refused_text_of_an_operator_takes_nothing_from_the_member() -> None:
    made = node(groups_bytes_max=FULL + 100)
    one = Consumer(made, "one").join()
    one.save(A0, 1, 5)
    client = made.connect()
    rows = json.dumps([["a", 0, None, "x" * 101]]).encode()
    assert refused(client.ask("group", "deferred", GROUP, body=rows))
    assert one.heartbeat().generation("a", 0) == 1
    assert not refused(client.ask("group", "deferred", GROUP, body=rows.replace(b"x" * 101, b"x" * 100)))


@pytest.mark.parametrize("way", [commit, prepare, decide])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_what_a_transaction_saves_or_holds_counts(way: Any, checkpoint: bool) -> None:
    made = node(groups_bytes_max=FULL + 1000)
    client, _ = made.session(), Consumer(made, "one").join()
    assert refused(way(client, made.txid(1, 1), offsets(5, deferred="x" * 1001)))
    assert kept(made) == FULL
    assert not refused(way(client, made.txid(1, 2), offsets(5, deferred="x" * 500)))
    held = kept(made)
    assert held == FULL + (1000 if way is decide else 500)
    made = lives(made, checkpoint=checkpoint)
    assert kept(made) == held
    settles = {commit: ("outcome", {}), prepare: ("commit", {}), decide: ("complete", {"uuid": UUID})}
    verb, words = settles[way]
    body = b"" if way is prepare else None
    assert made.connect().ask(verb, made.txid(1, 2), extensions=words, body=body).code == 200
    assert kept(made) == FULL + 500


def test_later_partitions_are_handed_over_once_there_is_room() -> None:
    made = node(groups_bytes_max=FULL + PLACE_BYTES)
    one, client = Consumer(made, "one").join(), made.connect()
    assert client.ask("group", "reset", "old", extensions={"create": None}, body=b'[["a", 0, 1]]').code == 200
    assert client.ask("topic", "alter", "a", extensions={"partitions": 3}).code == 200
    pass_time(made, 0.1)
    assert one.heartbeat().held == [A0, A1, B0]
    assert kept(made) == FULL + PLACE_BYTES
    assert client.ask("group", "delete", "old", body=b"").code == 200
    pass_time(made, 0.1)
    assert one.heartbeat().held == [A0, A1, ["a", 2], B0]


@pytest.mark.parametrize("seed", range(20))
def test_the_count_is_a_function_of_what_is_kept(seed: int) -> None:
    chance, saved, txn = random.Random(seed), SavedGroups(), 0
    for _ in range(300):
        group, place = chance.choice("gh"), [chance.randint(1, 3), chance.randint(0, 2)]
        row = [*place, 7, chance.choice([None, "", "abc", "\N{SNOWMAN}" * 3])]
        match chance.randint(0, 6):
            case 0:
                saved.hand_over(group, [[*place, 3]], {})
            case 1 | 2:
                growth, before = saved.growth_bytes(group, [row]), saved.size_bytes
                saved.save(group, [row], 1)
                assert saved.size_bytes == before + growth
            case 3:
                txn += 1
                saved.hold((1, txn), [[group, [row]]], lambda *_: True)
            case 4:
                saved.let_go((1, chance.randint(1, txn + 1)), [[group, [row]]])
            case 5 if chance.random() < 0.2:
                saved.forget_topic(place[0])
            case 6 if chance.random() < 0.2:
                saved.delete(group)
        assert saved.size_bytes == counted(saved)
        assert saved.held.keys() == saved._held_bytes.keys()
    again = SavedGroups()
    again.restore(json.loads(json.dumps(saved.snapshot())))
    assert again.size_bytes == saved.size_bytes - sum(saved._held_bytes.values())


def _many_groups(count: int) -> SavedGroups:
    saved = SavedGroups()
    for number in range(count):
        for topic_id in (1, 2):
            saved.hand_over(f"g{number}", [[topic_id, 0, 3 + number]], {})
            saved.save(f"g{number}", [[topic_id, 0, 7, "text"]], 1)
    return saved


def test_deleted_topic_is_swept_out_of_groups_in_slices() -> None:
    saved = _many_groups(100)
    before = dict(saved.named)
    saved.forget_topic(1)
    assert all(saved.named[name] is group for name, group in before.items())  # no group is touched
    expected = SavedGroups()
    for name in before:
        expected.hand_over(name, [[2, 0, before[name].generations[2, 0]]], {})
        expected.save(name, [[2, 0, 7, "text"]], 1)
    for swept in (0, 30, 60, 90, 100):
        assert sum(saved.named[name] is not group for name, group in before.items()) == swept
        assert (saved.snapshot(), saved.size_bytes) == (expected.snapshot(), expected.size_bytes)
        assert saved.generation_floor == 102
        assert saved.is_swept is (swept == 100)
        saved.sweep(30)


def test_topics_that_come_and_go_without_groups_leave_nothing() -> None:
    """Each left its id, also in the copy for each checkpoint."""
    saved = SavedGroups()
    for topic_id in range(1, 100):
        saved.forget_topic(topic_id)
    assert (saved.freeze().deleted, saved.is_swept) == (frozenset(), True)


def test_group_deleted_before_it_is_swept_counts_once() -> None:
    saved = _many_groups(3)
    saved.forget_topic(1)
    saved.delete("g2")
    assert saved.size_bytes == counted(saved) == 2 * (PLACE_BYTES + len("text"))


def test_copy_for_a_checkpoint_shares_groups_until_they_change() -> None:
    saved = _many_groups(100)
    expected, frozen = saved.snapshot(), saved.freeze()
    shared = list(frozen.groups)
    assert all(group is mine for group, mine in zip(shared, saved.named.values(), strict=True))
    saved.save("g1", [[1, 0, 8, None]], 2)
    saved.hand_over("g2", [[1, 0, 999]], {})
    saved.delete("g3")
    saved.forget_topic(2)
    saved.sweep(50)
    assert list(rows(frozen)) == expected
    assert saved.named["g1"].offsets[1, 0].offset == 8
    changed = saved.named["g1"]
    saved.save("g1", [[1, 0, 9, None]], 3)
    assert saved.named["g1"] is changed  # it is copied once for each checkpoint
