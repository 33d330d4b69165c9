"""Readers and members that say which log they have read, to a broker that goes on from another one."""

from __future__ import annotations

from tools.images.node import Node
from txmq.log.history import LogHistory, parsed

from ..group_support import A0, Consumer, after, pass_time
from ..support import node, put, restarted


def history_of(made: Node) -> LogHistory:
    """Of partition 0 of topic a, as ``offset`` says."""
    *_, text = made.connect().ask("offset", "a", 0, "latest", extensions={"log": None}).text.split()
    return parsed(text)


def filled(count: int) -> Node:
    """A broker with so many messages in that partition."""
    made = node()
    client = made.connect()
    for number in range(count):
        put(client, b"%d" % number)
    return made


def test_log_is_another_one_after_each_start() -> None:
    made = filled(3)
    before = history_of(made)
    again = restarted(made)
    after_start = history_of(again)
    assert after_start.lives[0] == before.lives[0] == (before.lives[0][0], 0)
    assert after_start.lives[1][1] == 3
    reader = again.connect()
    assert reader.ask("get", "a", 0, 0, 4096, extensions={"log": before.log}).error == "stale-log"
    assert reader.ask("get", "a", 0, 0, 4096, extensions={"log": after_start.log}).code == 200
    assert reader.ask("get", "a", 0, 3, 4096, extensions={"log": after_start.log}).body == b""
    assert history_of(restarted(again)).lives[:-1] == before.lives  # nothing was appended in the second life


def test_history_is_the_same_redone_and_from_a_checkpoint() -> None:
    made = filled(3)
    made = restarted(made)
    put(made.connect(), b"3")
    expected = history_of(made).lives
    assert [offset for _, offset in expected] == [0, 3]
    redone = restarted(made)
    assert history_of(redone).lives[:2] == expected
    redone.checkpoint()
    assert history_of(restarted(redone)).lives[:2] == expected


def test_claim_of_what_this_log_never_had_is_passed_over() -> None:
    made = filled(3)
    Consumer(made, "one").join()
    log, again = history_of(made).log, restarted(made)
    assert Consumer(again, "one").join([*A0, 1, 4, log]).held == []
    assert Consumer(again, "one").join([*A0, 1, 3, "1." + "9" * 16]).held == []
    assert Consumer(again, "one").join([*A0, 1, 3, log]).held == [A0]
    pass_time(again, 1.0)
    late = Consumer(restarted(again), "one").join([*A0, 1, 4, log])
    assert late.held == []


def test_older_copy_hands_out_no_generation_twice() -> None:
    made = filled(1)
    Consumer(made, "one").join()
    again = restarted(made)
    pass_time(again, 1.0)
    two = Consumer(again, "two").join()
    assert two.generation("a", 0) == after(again, 1) > 1 << 40


def test_offset_beyond_what_memory_kept_counts_no_longer() -> None:
    """Found: the group skipped what came at the offsets of messages that were gone with the process."""
    made = node()
    client = made.connect()
    client.ask("topic", "create", "m", extensions={"storage": "memory"})
    for _ in range(5):
        put(client, b"gone", topic="m")
    one = Consumer(made, "one", topics="m").join()
    one.save(["m", 0], 1, 5)
    again = restarted(made)
    put(again.connect(), b"new", topic="m")
    pass_time(again, 1.0)
    assert Consumer(again, "one", topics="m").join().view["assigned"][0][3] == again.partition("m").log_start
