"""``decide ... done=``: earlier transactions of the session have committed in the decision's database, too."""

from __future__ import annotations

import pytest

from tools.images.node import Answer, Client, Node
from txmq.protocol.branches import encode_branch

from ..support import UUID, batch, node, part, restarted, values
from .test_decide import OTHER_UUID, complete, decide, listed

DETAILS = {"bqual": "b", "connection": 7, "wrote": True, "marker": True, "table": "t"}


def decide_with(client: Client, txid: str, done: str, uuids: tuple[str, ...] = (UUID,), partition: int = 0) -> Answer:
    """Decide, and report others."""
    body = b"".join(encode_branch(f"db{number}", uuid, DETAILS) for number, uuid in enumerate(uuids))
    body += part("a", partition, batch(txid.encode()))
    return client.ask("decide", txid, extensions={"branches": len(uuids), "done": done}, body=body)


def incomplete(of: Node) -> list[int]:
    """Counters of what is decided and not complete."""
    return sorted(counter for _, counter in of.state.decisions.incomplete)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_what_is_done_is_shown_with_the_decision(is_streamed: bool) -> None:
    made = node()
    client, txids = made.session(), [made.txid(1, counter) for counter in range(4)]
    for txid in txids[1:3]:
        assert decide(client, txid, ("a", 0, batch(txid.encode()))).code == 200
    if is_streamed:  # goes the table's way
        client.ask("put", "a", 0, extensions={"tx": txids[3]}, body=batch(b"ahead"))
        body = encode_branch("db", UUID, DETAILS)
        told: dict[str, str | int | None] = {
            "branches": 1,
            "done": "1,2",
            "parts": 1,
            "bytes": len(batch(b"ahead")),
            "crc": 0,
        }
        answer = client.ask("decide", txids[3], extensions=told, body=body)
        assert answer.code == 409  # another crc: refused, and both are complete all the same
    else:
        assert decide_with(client, txids[3], "1,2").code == 200
    assert values(made) == [txid.encode() for txid in txids[1:3]]
    assert incomplete(made) == ([] if is_streamed else [3])
    again = restarted(made)
    assert values(again) == [txid.encode() for txid in txids[1:3]]
    assert incomplete(again) == ([] if is_streamed else [3])


def test_what_is_complete_already_changes_nothing() -> None:
    made = node()
    client = made.session()
    decide(client, made.txid(1, 1), ("a", 0, batch(b"x")))
    complete(client, made.txid(1, 1))
    assert decide_with(client, made.txid(1, 2), "1,1").code == 200
    floor: dict[str, str | int | None] = {"branches": 1, "done": "1,2", "floor": 2}
    body = encode_branch("db", UUID, DETAILS) + part("a", 0, batch(b"z"))
    assert client.ask("decide", made.txid(1, 3), extensions=floor, body=body).code == 200
    assert decide_with(client, made.txid(1, 4), "1,2,3").code == 200  # forgotten, below the floor
    assert incomplete(made) == [4]
    assert complete(client, made.txid(1, 4)).code == 200
    assert listed(client) == []


def test_an_answered_decision_is_repeated_with_what_it_carried() -> None:
    made = node()
    client = made.session()
    decide(client, made.txid(1, 1), ("a", 0, batch(b"x")))
    first, second = (decide_with(client, made.txid(1, 2), "1") for _ in range(2))
    assert (first.code, first.text) == (second.code, second.text)
    assert incomplete(made) == [2]


def test_one_branch_of_two_is_complete() -> None:
    made = node()
    client = made.session()
    decide(client, made.txid(1, 1), ("a", 0, batch(b"x")), uuids=(UUID, OTHER_UUID))
    assert decide_with(client, made.txid(1, 2), "1").code == 200
    assert values(made) == []
    complete(client, made.txid(1, 1), OTHER_UUID)
    assert values(made) == [b"x"]


@pytest.mark.parametrize(
    ("done", "uuids", "code"),
    [
        ("9", (UUID,), 404), ("1,9", (UUID,), 404), ("1", (OTHER_UUID,), 400), ("1", (UUID, OTHER_UUID), 400),
        ("x", (UUID,), 400), ("1,", (UUID,), 400), ("2", (UUID,), 404), ("-1", (UUID,), 400),
        ("01", (UUID,), 400), ("A", (UUID,), 400), ("0", (UUID,), 400), ("1" * 17, (UUID,), 400),
    ],
)  # fmt: skip
def test_what_was_not_decided_there_refuses_the_decision(done: str, uuids: tuple[str, ...], code: int) -> None:
    made = node()
    client = made.session()
    decide(client, made.txid(1, 1), ("a", 0, batch(b"x")))
    assert decide_with(client, made.txid(1, 2), done, uuids).code == code
    assert 2 not in incomplete(made)
    assert client.ask("outcome", made.txid(1, 2)).text.startswith("unknown")


def test_another_session_reports_nothing_of_it() -> None:
    made = node()
    client = made.session()
    decide(client, made.txid(1, 1), ("a", 0, batch(b"x")))
    other = made.session("new")
    assert decide_with(other, made.txid(2, 1), "1").code == 404
    assert incomplete(made) == [1]
