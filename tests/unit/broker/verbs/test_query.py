"""A batch too large for a journal record; and what other tests write and ask of batches with."""

from __future__ import annotations

import json
from typing import Any

from tools.images.node import Answer, Client, Node
from tools.images.requests import batch, part
from txmq.broker.verbs.query import prepared_of
from txmq.redo import entries

from ..support import node

Contents = tuple[str, int, bytes]


def write(
    client: Client, txid: str, *contents: Contents, query: str = "q", epoch: int = 1, number: int = 0, task: int = 0,
    attempt: int = 0,
) -> Answer:  # fmt: skip
    """One task attempt's part."""
    body = b"".join(part(topic, partition, content) for topic, partition, content in contents)
    words: dict[str, str | int | None] = {
        "query": query, "epoch": epoch, "batch": number, "task": task, "attempt": attempt,
    }  # fmt: skip
    return client.ask("prepare", txid, "spark", extensions=words, body=body)


def ask(client: Client, action: str, name: str = "q", body: str = "", **words: int) -> Answer:
    """One action."""
    return client.ask("query", action, name, extensions=words, body=body.encode())


def told(answer: Answer) -> dict[str, Any]:
    """Its content, without times."""
    assert answer.code == 200, answer
    fields: dict[str, Any] = json.loads(answer.body)
    fields.pop("time_ms", None)
    return fields


def commit(client: Client, *txids: str, epoch: int = 1, number: int = 0, name: str = "q") -> Answer:
    """The driver's decision."""
    return ask(client, "commit", name, "".join(f"{txid}\n" for txid in txids), epoch=epoch, batch=number)


def two_tasks(made: Node) -> tuple[Client, Client, list[str]]:
    """A driver (session 1) that opened, and a worker (session 2); tasks 0 and 1 wrote, task 1 in two attempts."""
    driver, worker = made.session(), made.session()
    assert told(ask(driver, "epoch", "*")) == {"epoch": 1}
    assert told(ask(driver, "open", epoch=1)) == {"query": "q", "epoch": 1, "batch": None}
    txids = [made.txid(2, counter) for counter in (1, 2, 3)]
    assert write(worker, txids[0], ("a", 0, batch(b"x1", b"x2")), ("b", 0, batch(b"y1"))).code == 200
    assert write(worker, txids[1], ("a", 0, batch(b"lost")), ("b", 0, batch(b"lost")), task=1).code == 200
    assert write(worker, txids[2], ("a", 0, batch(b"x3")), ("b", 0, batch(b"y2")), task=1, attempt=1).code == 200
    return driver, worker, txids


def test_a_decision_that_would_not_fit_a_record_is_refused() -> None:
    made = node()
    driver, _, txids = two_tasks(made)
    size = entries.batch_committed_size(2, 4)
    object.__setattr__(made.settings, "request_size_bytes_max", size - 1)
    answer = commit(driver, txids[0], txids[2])
    assert (answer.code, answer.error) == (413, "too-large")
    object.__setattr__(made.settings, "request_size_bytes_max", size)
    assert commit(driver, txids[0], txids[2]).code == 200
    assert [*prepared_of(made.context, "q")] == []
