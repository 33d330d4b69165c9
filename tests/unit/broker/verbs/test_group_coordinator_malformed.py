"""Bodies of ``group`` and offsets of transactions: what JSON can carry and nothing downstream can is refused."""

from __future__ import annotations

import json

import pytest

from tests.unit.broker.group_support import A0, Consumer
from tests.unit.broker.support import node
from tools.images.node import Answer, Client

HALF = b'"\\ud800"'  # half of a character: nothing can write it
DEEP = b"[" * 60_000
BODIES = {
    "deep": DEEP,
    "deep objects": b'{"a":' * 10_000,
    "save": b"[[%b,0,1,0,null]]" % HALF,
    "deferred text that waits": b'[["a",0,1,0,%b]]' % HALF,
    "claim": b"[[%b,0,1]]" % HALF,
    "release": b"[[%b,0]]" % HALF,
    "deferred": b"[[%b,0,null,null]]" % HALF,
    "deferred, wanted": b'[["a",0,null,%b]]' % HALF,
    "a long number": b'[["a",0,%b]]' % (b"9" * 400),
}


def ask(client: Client, action: str, group: str, body: bytes) -> Answer:
    """One request of the verb, by a member."""
    words = {"member": "one", "topics": "a,b"}
    return client.ask("group", action, group, extensions=words, body=body)


@pytest.mark.parametrize("action", ["join", "save", "heartbeat", "reset", "deferred"])
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_malformed_body_is_refused_and_the_broker_goes_on(action: str, body: bytes) -> None:
    one = Consumer(node(), "one").join()
    answer = ask(one.client, action, "other" if action == "reset" else "billing", body)
    assert (answer.code, answer.error) == (400, "bad-request")


@pytest.mark.parametrize("body", [DEEP, b'[["g",0,[[%b,0,1,1,null]]]]' % HALF, b'[["g",0,[["a",0,1,1,%b]]]]' % HALF])
def test_offsets_of_transaction_that_nothing_can_work_with_are_refused(body: bytes) -> None:
    broker = node()
    client = broker.session()
    answer = client.ask("commit", broker.txid(1, 1), extensions={"offsets": len(body)}, body=body)
    assert (answer.code, answer.error) == (400, "bad-request")


@pytest.mark.parametrize("details", [b"[" * 1024, b'{"bqual":%b,"connection":1,"wrote":true,"marker":true}' % HALF])
def test_a_branch_that_nothing_can_work_with_is_refused(details: bytes) -> None:
    broker = node()
    client = broker.session()
    body = b"db %b %d\r\n%b" % (b"0" * 32, len(details), details)
    answer = client.ask("decide", broker.txid(1, 1), extensions={"branches": 1}, body=body)
    assert (answer.code, answer.error) == (400, "bad-request")


def test_text_takes_no_more_journal_than_it_took_wire() -> None:
    one = Consumer(node(), "one").join()
    rows = [[*A0, one.generation("a", 0), 5, "\u00e9" * 3000]]
    content = json.dumps(rows, ensure_ascii=False).encode()
    one.client.send("group", "save", "billing", extensions={"member": "one"}, body=content)
    assert one.made.context.group.size_bytes < len(content) + 200
    one.made.pump()
    assert one.client.received
