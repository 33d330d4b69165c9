"""Batches of parallel writers: parts of many sessions, one decision, each batch once, former drivers fenced."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tools.images.node import Answer, Client, Node
from tools.images.requests import batch, part
from txmq.broker.verbs.query import prepared_of
from txmq.redo import entries

from ..support import node, prepare, put, restarted, values
from .test_decide import complete, decide, listed, lives

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


def test_decision_shows_winners_in_order_and_rolls_losers_back() -> None:
    made = node()
    driver, worker, txids = two_tasks(made)
    put(worker, b"before", producer=2)
    assert values(made) == [b"before"]
    before = made.context.counters.group_commits
    assert told(commit(driver, txids[2], txids[0]))["already_committed"] is False
    assert made.context.counters.group_commits == before + 1
    assert (values(made), values(made, "b")) == ([b"before", b"x3", b"x1", b"x2"], [b"y2", b"y1"])
    assert worker.ask("outcome", txids[0]).text == "committed\na 0 2 2\nb 0 1 1\n"
    assert worker.ask("outcome", txids[1]).text == "rolled-back\n"
    assert listed(driver) == []
    assert told(ask(driver, "list", "*"))["queries"][0]["batch"] == 0


@pytest.mark.parametrize("checkpoint", [False, True])
def test_batch_is_committed_once_however_often_it_is_repeated(checkpoint: bool) -> None:
    made = node()
    driver, worker, txids = two_tasks(made)
    commit(driver, txids[0], txids[2])
    seen = values(made)
    assert told(commit(driver, txids[0], txids[2]))["already_committed"] is True
    assert write(worker, made.txid(2, 4), ("a", 0, batch(b"late"))).error == "transaction-conflict"
    again = lives(made, checkpoint=checkpoint)
    successor, worker = again.session(), again.session("2.0")
    assert [told(ask(successor, "epoch", "*"))["epoch"] for _ in range(2)] == [2, 3]
    assert told(ask(successor, "open", epoch=3)) == {"query": "q", "epoch": 3, "batch": 0}
    assert told(commit(successor, epoch=3))["already_committed"] is True
    assert write(worker, again.txid(2, 5), ("a", 0, batch(b"later")), epoch=3).error == "transaction-conflict"
    assert values(again) == seen
    assert write(worker, again.txid(2, 6), ("a", 0, batch(b"next")), epoch=3, number=1).code == 200
    assert told(commit(successor, again.txid(2, 6), epoch=3, number=1))["already_committed"] is False
    assert values(lives(again, checkpoint=checkpoint)) == [*seen, b"next"]


@pytest.mark.parametrize("checkpoint", [False, True])
def test_parts_live_through_a_restart_and_are_decided_after_it(checkpoint: bool) -> None:
    made = node()
    _, _, txids = two_tasks(made)
    again = lives(made, checkpoint=checkpoint)
    assert values(again) == []
    assert len(listed(again.connect())) == 3
    assert commit(again.session("1.0"), txids[0], txids[2]).code == 200
    assert (values(again), values(again, "b")) == ([b"x1", b"x2", b"x3"], [b"y1", b"y2"])
    last = lives(again, checkpoint=checkpoint)
    assert (values(last), values(last, "b")) == ([b"x1", b"x2", b"x3"], [b"y1", b"y2"])
    assert last.connect().ask("outcome", txids[1]).text == "rolled-back\n"


def test_missing_or_foreign_winner_is_refused_and_nothing_happens() -> None:
    made = node()
    driver, worker, txids = two_tasks(made)
    ask(driver, "open", "other", epoch=1)
    others = [made.txid(2, counter) for counter in range(4, 9)]
    write(worker, others[0], ("a", 0, batch(b"n")), query="other", task=7)
    write(worker, others[1], ("a", 0, batch(b"n")), number=1, task=7)
    prepare(worker, others[2], ("a", 0, batch(b"n")))
    worker.ask("rollback", others[3])
    for winner in (*others, made.txid(9, 1), txids[0], txids[1]):  # the last two: named twice, two attempts of a task
        answer = commit(driver, txids[0], txids[2], winner)
        assert (answer.code, answer.error) == (409, "transaction-conflict"), winner
    assert (values(made), values(made, "b")) == ([], [])
    assert len(listed(driver)) == 6
    assert told(ask(driver, "list"))["queries"][0]["batch"] is None
    assert commit(driver, txids[0], txids[2]).code == 200


@pytest.mark.parametrize("checkpoint", [False, True])
def test_new_driver_fences_the_old_and_rolls_its_parts_back(checkpoint: bool) -> None:
    made = node()
    driver, worker, txids = two_tasks(made)
    ask(driver, "open", "other", epoch=1)
    write(worker, made.txid(2, 8), ("a", 0, batch(b"stays")), query="other")
    successor = made.session()
    assert [told(ask(successor, "epoch", "*"))["epoch"] for _ in range(2)] == [2, 3]
    assert told(ask(successor, "open", epoch=3)) == {"query": "q", "epoch": 3, "batch": None}
    assert [row["query"] for row in listed(driver)] == ["other"]
    made = lives(made, checkpoint=checkpoint)
    driver, worker = made.session("1.0"), made.session("2.0")
    refused = [
        ask(driver, "open", epoch=1), commit(driver, txids[0], txids[2]), ask(driver, "delete", epoch=1),
        write(worker, made.txid(2, 9), ("a", 0, batch(b"zombie"))),
    ]  # fmt: skip
    assert [(answer.code, answer.error) for answer in refused] == [(410, "fenced")] * 4
    assert commit(driver, txids[0], epoch=3).error == "transaction-conflict"
    assert values(made) == []
    assert told(commit(driver, epoch=3))["already_committed"] is False


def test_an_epoch_is_drawn_once_and_must_have_opened() -> None:
    made = node()
    driver = made.session()
    assert told(ask(driver, "epoch", "*")) == {"epoch": 1}
    assert ask(driver, "epoch").error == "bad-request"
    wrong: tuple[dict[str, int], ...] = ({"epoch": 2}, {"epoch": 0}, {})
    for words in wrong:
        assert ask(driver, "open", "q", "", **words).error == "bad-request"
    assert ask(driver, "open", "*", epoch=1).error == "bad-request"
    assert ask(driver, "open", "-", epoch=1).error == "invalid-name"
    assert write(driver, made.txid(1, 1), ("a", 0, batch(b"x"))).error == "unknown-query"
    assert commit(driver).error == "unknown-query"
    assert told(ask(driver, "open", epoch=1))["epoch"] == 1
    assert told(ask(driver, "epoch", "*")) == {"epoch": 2}
    assert write(driver, made.txid(1, 1), ("a", 0, batch(b"x")), epoch=2).error == "bad-request"
    assert commit(driver, epoch=2).error == "bad-request"
    assert ask(driver, "commit", body="no line end", epoch=1, batch=0).error == "bad-request"
    assert ask(driver, "nosuch").error == "bad-request"
    stated: dict[str, str | int | None] = {"query": "q", "epoch": 1, "batch": 0, "task": 0}
    body = part("a", 0, batch(b"x"))
    assert driver.ask("prepare", made.txid(1, 1), "spark", extensions=stated, body=body).error == "bad-request"


def test_part_is_committed_only_by_driver_or_forcing_operator() -> None:
    made = node()
    _, worker, txids = two_tasks(made)
    for client in (worker, made.connect()):
        answer = client.ask("commit", txids[0], body=b"")
        assert (answer.code, answer.error) == (409, "transaction-conflict")
    assert values(made) == []
    assert worker.ask("rollback", txids[1]).code == 200
    assert worker.ask("commit", txids[2], extensions={"heuristic": "why"}, body=b"").code == 200
    assert values(made) == [b"x3"]


def test_part_is_listed_with_query_batch_task_and_attempt() -> None:
    made = node()
    driver, _, txids = two_tasks(made)
    row = listed(driver)[2]
    shown = {name: row[name] for name in ("txid", "kind", "state", "query", "epoch", "batch", "task", "attempt")}
    assert shown == {
        "txid": txids[2], "kind": "spark", "state": "prepared", "query": "q", "epoch": 1, "batch": 0, "task": 1,
        "attempt": 1,
    }  # fmt: skip
    (query,) = told(ask(driver, "list"))["queries"]
    assert (query["prepared"], query["prepared_bytes"]) == (3, made.state.payload_bytes)
    figures = dict(line.split(" ") for line in driver.ask("stats", "transactions").text.splitlines())
    assert (figures["in_doubt_spark"], figures["queries"]) == ("3", "1")


def test_a_resolver_is_never_told_of_a_part() -> None:
    made = node()
    driver, _, _ = two_tasks(made)
    assert listed(driver, uuid="0" * 32) == []


def test_repeated_prepare_is_accepted_and_one_of_other_content_refused() -> None:
    made = node()
    _, worker, txids = two_tasks(made)
    assert write(worker, txids[0], ("a", 0, batch(b"x1", b"x2")), ("b", 0, batch(b"y1"))).code == 200
    assert write(worker, txids[0], ("a", 0, batch(b"other"))).error == "transaction-conflict"
    assert len(listed(worker)) == 3


def test_abort_rolls_back_by_query_by_epoch_and_by_batch() -> None:
    made = node()
    driver, worker, _ = two_tasks(made)
    ask(driver, "open", "other", epoch=1)
    write(worker, made.txid(2, 8), ("a", 0, batch(b"n")), query="other", number=5)
    assert told(ask(driver, "abort", epoch=1, batch=7))["rolled_back"] == 0
    assert told(ask(driver, "abort", epoch=2))["rolled_back"] == 0
    assert told(ask(driver, "abort", epoch=1, batch=0))["rolled_back"] == 3
    assert ask(driver, "abort", "*").error == "bad-request"
    assert told(ask(driver, "abort", "*", epoch=1))["rolled_back"] == 1
    assert listed(driver) == []
    assert listed(restarted(made).connect()) == []


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_query_is_forgotten_only_by_command(checkpoint: bool) -> None:
    made = node(queries_max=2)
    driver, worker, txids = two_tasks(made)
    commit(driver, txids[0])
    assert told(ask(driver, "open", "second", epoch=1))["batch"] is None
    assert ask(driver, "open", "third", epoch=1).error == "overloaded"
    write(worker, made.txid(2, 9), ("a", 0, batch(b"n")), number=1)
    assert told(ask(driver, "delete", epoch=1))["batch"] == 0
    assert ask(driver, "delete").error == "unknown-query"
    again = lives(made, checkpoint=checkpoint)
    driver = again.session("1.0")
    assert [row["query"] for row in told(ask(driver, "list", "*"))["queries"]] == ["second"]
    assert listed(driver) == []
    assert told(ask(driver, "open", "third", epoch=1))["batch"] is None


@pytest.mark.parametrize("checkpoint", [False, True])
def test_epochs_differ_between_lives_of_a_broker(checkpoint: bool) -> None:
    made = node()
    drawn = [told(ask(made.connect(), "epoch", "*"))["epoch"] for _ in range(2)]
    made = lives(made, checkpoint=checkpoint)
    drawn.append(told(ask(made.connect(), "epoch", "*"))["epoch"])
    assert drawn == [1, 2, 3]


@pytest.mark.parametrize("checkpoint", [False, True])
def test_winners_behind_a_held_transaction_are_shown_together(checkpoint: bool) -> None:
    made = node()
    driver, worker, _ = two_tasks(made)
    decide(driver, made.txid(1, 1), ("a", 0, batch(b"held")))
    first, second = made.txid(2, 8), made.txid(2, 9)
    write(worker, first, ("a", 0, batch(b"behind")), task=8)
    write(worker, second, ("a", 1, batch(b"beside")), task=9)
    assert commit(driver, first, second).code == 200
    assert (values(made), values(made, "a", 1)) == ([], [])
    made = lives(made, checkpoint=checkpoint)
    driver = made.session("1.0")
    assert (values(made), values(made, "a", 1)) == ([], [])
    assert complete(driver, made.txid(1, 1)).code == 200
    assert (values(made), values(made, "a", 1)) == ([b"held", b"behind"], [b"beside"])


def test_part_of_topic_that_was_deleted_goes_with_it() -> None:
    made = node()
    driver, _, txids = two_tasks(made)
    driver.ask("topic", "delete", "b")
    assert commit(driver, txids[0], txids[2]).code == 200
    again = restarted(made)
    assert values(again) == [b"x1", b"x2", b"x3"]


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


def test_every_answer_first_or_repeated_waits_for_the_sync() -> None:
    made = node()
    driver, _, txids = two_tasks(made)
    told_again = []
    for name, action, words, body in (
        ("*", "epoch", {}, b""), ("q", "commit", {"epoch": 1, "batch": 0}, f"{txids[0]}\n".encode()),
        ("q", "open", {"epoch": 2}, b""), ("q", "delete", {}, b""),
    ):  # fmt: skip
        stated: dict[str, str | int | None] = {**words}
        first, again = (driver.send("query", action, name, extensions=stated, body=body) for _ in range(2))
        made.flush()
        assert not {first, again} & driver.received.keys(), action
        made.pump()
        assert driver.received.pop(first).code == 200
        told_again.append(driver.received.pop(again).code)
    assert told_again == [200, 200, 200, 404]


# --- which batches are committed -------------------------------------------------------------------------------------


def written(made: Node, driver: Client, number: int, digest: str, name: str = "q") -> dict[str, Any]:
    """A batch of one row, committed by the driver itself; what ``commit`` answered."""
    txid = made.txid(1, 1000 + number)
    assert write(driver, txid, ("a", 0, batch(b"%d" % number)), query=name, number=number).code == 200
    words: dict[str, Any] = {"epoch": 1, "batch": number, "digest": digest}
    return told(driver.ask("query", "commit", name, extensions=words, body=f"{txid}\n".encode()))


@pytest.mark.parametrize("checkpoint", [False, True])
def test_batch_below_the_newest_is_written_if_absent(checkpoint: bool) -> None:
    made = node()
    driver = made.session()
    ask(driver, "epoch", "*")
    ask(driver, "open", epoch=1)
    for number in (7, 3, 5, 4):
        assert written(made, driver, number, f"1-{number}")["already_committed"] is False
    made = lives(made, checkpoint=checkpoint)
    driver = made.session("1.0")
    known = [told(ask(driver, "open", epoch=1, batch=number)) for number in range(2, 9)]
    assert [(one["committed"], one["digest"]) for one in known] == [
        (False, None), (True, "1-3"), (True, "1-4"), (True, "1-5"), (False, None), (True, "1-7"), (False, None),
    ]  # fmt: skip
    assert {one["batch"] for one in known} == {7}
    assert values(made) == [b"7", b"3", b"5", b"4"]
    assert written(made, driver, 6, "1-6")["already_committed"] is False
    assert made.context.state.queries.named["q"].intervals == [(3, 7)]


def test_digest_that_is_too_long_is_refused() -> None:
    made = node()
    driver = made.session()
    ask(driver, "epoch", "*")
    ask(driver, "open", epoch=1)
    words: dict[str, Any] = {"epoch": 1, "batch": 0, "digest": "x" * 65}
    assert driver.ask("query", "commit", "q", extensions=words, body=b"").error == "bad-request"
