"""``txmq retry`` and ``txmq dead-letter`` against a real broker, with members active and away, and killed redrives."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import txmq
from tests.services.consumer.consuming import WAIT_S
from tests.services.consumer.retrying import GROUP, IN_ORDER, LATER, TOPIC, bad, clear, listening, never, saved
from txmq.cli.main import main
from txmq.client.consumer.retry.dead_letters import DeadLetters, Redrive
from txmq.model import Message
from txmq.runtime.crashpoints import VARIABLE
from txmq.runtime.logging import get_logger
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess

DEAD_LETTERS = f"{GROUP}.dead-letter"


def run(shared_broker: BrokerProcess, *words: str, status: int = 0) -> str:
    """The command, in this process; its standard output, or its standard error where it says something for people."""
    out, err, ended = io.StringIO(), io.StringIO(), 0
    with (
        mock.patch.object(sys, "argv", ["txmq", *words, "--bootstrap", shared_broker.address]),
        contextlib.redirect_stdout(out), contextlib.redirect_stderr(err),
    ):  # fmt: skip
        try:
            main()
        except SystemExit as end:
            ended = int(end.code or 0)
    assert ended == status, err.getvalue()
    return out.getvalue() or err.getvalue()


def listed(shared_broker: BrokerProcess, *words: str) -> list[dict[str, Any]]:
    """Rows of ``retry list``."""
    found: list[dict[str, Any]] = json.loads(run(shared_broker, "retry", "list", GROUP, "--json", *words))
    return found


@pytest.fixture
def client(shared_broker: BrokerProcess) -> Iterator[txmq.Client]:
    """A client of a broker, with a topic of two partitions."""
    with txmq.connect(shared_broker.address) as made:
        made.topics.create(TOPIC, partitions=2)
        yield made
        clear(made)


def test_deferred_messages_are_listed_shown_redelivered_and_dropped_under_member(
    client: txmq.Client, shared_broker: BrokerProcess, tmp_path: Path
) -> None:
    store = str(tmp_path / "r")
    for value in (b"bad1", b"good", b"blocked"):
        client.producer().send(TOPIC, value, key=b"k" if value != b"good" else None, partition=0)
    client.producer().send(TOPIC, b"bad2", key=b"q", partition=1)
    with listening(client, store, IN_ORDER, bad) as found:
        eventually(lambda: saved(client) == (3, [[0, 1], [2, 0]]) and saved(client, 1) == (1, [[0, 1]]), "deferred")
        rows = listed(shared_broker, "--store", store)
        assert [(row["partition"], row["offset"], row["state"], row["failures"]) for row in rows] == [
            (0, 0, "waits", 1), (0, 2, "blocked", 0), (1, 0, "waits", 1),
        ]  # fmt: skip
        assert ("cannot" in rows[0]["reason"], rows[0]["key"], rows[0]["owner"]) == (True, "k", found.consumer.name)
        assert "blocked by" in rows[1]["reason"]
        assert "blocked" in run(shared_broker, "retry", "list", GROUP)
        place = ("--topic", TOPIC, "--partition", "0", "--offset")
        for words in ((), ("--store", store)):  # from the log, from the file
            assert (
                json.loads(run(shared_broker, "retry", "show", GROUP, *place, "2", "--json", *words))["value"]
                == "blocked"
            )
        assert "retry list" in run(shared_broker, "retry", "show", GROUP, *place, "1", status=1)
        assert found.values.count(b"bad1") == 1
        run(shared_broker, "retry", "redeliver", GROUP, *place, "0")
        eventually(lambda: found.values.count(b"bad1") == 2, "delivered again, long before its time")
        run(shared_broker, "retry", "drop", GROUP, *place, "0", "--store", store)
        eventually(lambda: b"blocked" in found.values, "what waited behind it goes on")
        eventually(lambda: saved(client) == (3, None), "and is saved as dealt with")
        assert json.loads(run(shared_broker, "retry", "drop", GROUP, "--all", "--json")) == {
            "group": GROUP,
            "dropped": 1,
        }
        eventually(lambda: saved(client, 1) == (1, None) and saved(client) == (3, None), "nothing is deferred")
        eventually(
            lambda: listed(shared_broker, "--store", store) == [], "the member removes what the group does not name"
        )
    assert found.values.count(b"good") == 1


def test_message_dropped_without_members_is_not_redelivered_from_its_file(
    client: txmq.Client, shared_broker: BrokerProcess, tmp_path: Path
) -> None:
    store = tmp_path / "r"
    client.producer().send(TOPIC, b"bad", partition=0)
    with listening(client, str(store), LATER, bad):
        eventually(lambda: saved(client) == (1, [[0, 1]]), "deferred")
    run(shared_broker, "retry", "drop", GROUP, "--topic", TOPIC, "--all")  # on a host that has not the file
    (stale,) = listed(shared_broker, "--store", str(store))
    assert (stale["state"], stale["offset"]) == ("stale", 0)
    client.producer().send(TOPIC, b"next", partition=0)
    with listening(client, str(store), LATER, never) as found:
        found.wait(1)
    assert found.values == [b"next"]
    assert listed(shared_broker, "--store", str(store)) == []


def test_unreadable_text_is_listed_and_goes_only_by_name(client: txmq.Client, shared_broker: BrokerProcess) -> None:
    with client.consumer(GROUP, [TOPIC]) as consumer:
        eventually(lambda: len(consumer.assignment) == 2, "assigned")
        client.producer().send(TOPIC, b"one", partition=0)
        (message,) = consumer.poll(timeout=WAIT_S)
        message.ack(sync=True)
    assert client.groups.change_deferred(GROUP, [[TOPIC, 0, None, "{of another version"]]) == []
    (row,) = listed(shared_broker)
    assert (row["state"], row["offset"], "cannot be read" in row["reason"]) == ("unreadable", None, True)
    assert "cannot be read" in run(shared_broker, "retry", "drop", GROUP, "--all", status=1)
    run(shared_broker, "retry", "drop", GROUP, "--topic", TOPIC, "--partition", "0", "--unreadable")
    assert listed(shared_broker) == []


def test_look_at_missing_store_creates_none_and_shows_its_path(shared_broker: BrokerProcess, tmp_path: Path) -> None:
    missing = tmp_path / "none"
    assert "no retry store" in run(shared_broker, "retry", "list", GROUP, "--store", str(missing), status=1)
    assert not missing.exists()
    assert "--all" in run(shared_broker, "retry", "drop", GROUP, status=2)
    assert "--topic" in run(shared_broker, "retry", "drop", GROUP, "--offset", "1", status=2)
    assert "--all" in run(shared_broker, "dead-letter", "redrive", GROUP, status=2)


# --- dead letters ----------------------------------------------------------------------------------------------------


def send_dead_letters(client: txmq.Client, *offsets: int) -> None:
    """Dead letters of messages of partition 1, as consumers write them."""
    client.groups.reset(GROUP, [(TOPIC, 0, 0)], create=True)
    dead_letters = DeadLetters(client, GROUP, "m", get_logger())
    for offset in offsets:
        value = b"letter %d" % offset
        dead_letters.dead_letter(Message(TOPIC, 1, offset, b"k", value, {"h": b"1"}, "red", 7, None), 6, "cannot")
    dead_letters.close()


def sent(client: txmq.Client, topic: str = TOPIC) -> list[bytes | None]:
    """What is in a topic."""
    return [message.value for message in client.browse(topic)]


def test_dead_letters_are_listed_shown_and_redriven_once_to_origin(
    client: txmq.Client, shared_broker: BrokerProcess
) -> None:
    client.groups.reset(GROUP, [(TOPIC, 0, 0)], create=True)
    assert json.loads(run(shared_broker, "dead-letter", "list", GROUP, "--json")) == []  # it has no dead letters
    send_dead_letters(client, 5, 8, 5)  # the first one twice: its consumer died in between
    rows = json.loads(run(shared_broker, "dead-letter", "list", GROUP, "--json"))
    assert [(row["offset"], row["from"], row["attempts"], row["reason"], row["redriven"]) for row in rows] == [
        (0, f"{TOPIC}/1/5", "6", "cannot", False), (1, f"{TOPIC}/1/8", "6", "cannot", False),
        (2, f"{TOPIC}/1/5", "6", "cannot", False),
    ]  # fmt: skip
    shown = json.loads(run(shared_broker, "dead-letter", "show", GROUP, "--offset", "1", "--json"))
    assert (shown["value"], shown["key"], shown["tag"]) == ("letter 8", "k", "red")
    said = run(shared_broker, "dead-letter", "redrive", GROUP, "--offset", "1", "--json")
    assert json.loads(said) == {"group": GROUP, "sent": 1, "before": 0, "gone": 0, "foreign": 0}
    said = run(shared_broker, "dead-letter", "redrive", GROUP, "--all", "--json")
    assert json.loads(said) == {"group": GROUP, "sent": 1, "before": 2, "gone": 0, "foreign": 0}
    assert sent(client) == [b"letter 8", b"letter 5"]
    first = client.fetch(TOPIC, 1, 0)[0]
    assert (first.key, first.tag, first.headers) == (
        b"k", "red", {"h": b"1", "txmq.redriven": f"{DEAD_LETTERS}/0/1".encode()},
    )  # fmt: skip
    assert all(row["redriven"] for row in json.loads(run(shared_broker, "dead-letter", "list", GROUP, "--json")))
    assert "no dead letter at 9; nothing" in run(
        shared_broker, "dead-letter", "redrive", GROUP, "--offset", "9", status=1
    )
    client.topics.create("elsewhere")
    run(shared_broker, "dead-letter", "redrive", GROUP, "--offset", "0", "--to", "elsewhere", "--again")
    assert sent(client, "elsewhere") == [b"letter 5"]
    assert "cannot" in run(shared_broker, "dead-letter", "list", GROUP)


def test_dead_letter_of_a_topic_made_anew_is_redriven(client: txmq.Client, shared_broker: BrokerProcess) -> None:
    """Found: it had the place of one that had been sent, of the former topic, and "done" was said."""
    options = txmq.ConsumerOptions(heartbeat_interval=0.1, retry_delay=0.01)
    for value in (b"former", b"anew"):
        client.topics.delete(TOPIC)
        client.topics.create(TOPIC, partitions=2)
        client.producer().send(TOPIC, value, partition=0)
        with client.consumer(GROUP, [TOPIC], max_retries=0, options=options) as consumer:
            message = next(iter(consumer))
            assert message.value == value
            message.reject("bad")
        said = json.loads(run(shared_broker, "dead-letter", "redrive", GROUP, "--all", "--json"))
        assert (said["sent"], said["before"]) == (1, 0 if value == b"former" else 1)
    assert [message.value for message in client.browse(TOPIC)] == [b"anew", b"anew"]


def test_dead_letters_without_value_are_redriven_from_log_or_reported(
    client: txmq.Client, shared_broker: BrokerProcess
) -> None:
    client.producer().send(TOPIC, b"large", key=b"k", headers={"h": b"1"}, partition=1)
    log = client.log_of(TOPIC, 1)[1].log.encode()
    client.groups.reset(GROUP, [(TOPIC, 0, 0)], create=True)
    dead_letters = DeadLetters(client, GROUP, "m", get_logger())
    dead_letters.dead_letter(Message(TOPIC, 0, 7, b"k", None, {}, None, 7, None), 6, "cannot")
    dead_letters.dead_letter_gone((TOPIC, 0), 9, 6)
    dead_letters.close()
    for offset, where in ((b"0", log), (b"5", log), (b"0", b"7.former")):  # in the log; no longer; in a former topic's
        words = {"topic": TOPIC.encode(), "partition": b"1", "offset": offset, "value": b"too-large", "log": where}
        headers = {f"txmq.dead.{name}": text for name, text in words.items()}
        client.producer().send(DEAD_LETTERS, b"", headers=headers)
    client.producer().send(DEAD_LETTERS, b"not a consumer's")
    said = run(shared_broker, "dead-letter", "redrive", GROUP, "--all", "--json")
    assert json.loads(said) == {"group": GROUP, "sent": 2, "before": 0, "gone": 4, "foreign": 0}
    (null,) = client.fetch(TOPIC, 0, 0)
    assert (null.value, null.key) == (None, b"k")
    large = client.fetch(TOPIC, 1, 1)[0]
    assert (large.value, large.key, large.headers["h"]) == (b"large", b"k", b"1")


def test_redrive_copies_nothing_of_topics_the_group_never_reads(
    client: txmq.Client, shared_broker: BrokerProcess
) -> None:
    """Headers are the word of whoever writes the dead-letter topic; the redrive has its operator's rights."""
    for name in ("secret", "copied"):
        client.topics.create(name)
    client.producer().send("secret", b"of nobody else")
    send_dead_letters(client, 5)
    log = client.log_of("secret", 0)[1].log.encode()
    words = {"topic": b"secret", "partition": b"0", "offset": b"0", "log": log, "value": b"too-large"}
    client.producer().send(DEAD_LETTERS, b"", headers={f"txmq.dead.{name}": text for name, text in words.items()})
    del words["value"]
    words["offset"] = b"1"
    client.producer().send(DEAD_LETTERS, b"forged", headers={f"txmq.dead.{name}": text for name, text in words.items()})
    said = run(shared_broker, "dead-letter", "redrive", GROUP, "--all", "--to", "copied", "--json")
    assert json.loads(said) == {"group": GROUP, "sent": 1, "before": 0, "gone": 0, "foreign": 2}
    assert sent(client, "copied") == [b"letter 5"]
    assert "2 name topics that the group does not read" in run(shared_broker, "dead-letter", "redrive", GROUP, "--all")
    assert sent(client, "secret") == [b"of nobody else"]
    said = run(shared_broker, "dead-letter", "redrive", GROUP, "--all", "--from", "secret", "--json")
    assert json.loads(said) == {"group": GROUP, "sent": 2, "before": 1, "gone": 0, "foreign": 0}
    for name in ("secret", "copied"):
        client.topics.delete(name)


def test_dead_letters_of_an_unknown_group_are_an_error(client: txmq.Client, shared_broker: BrokerProcess) -> None:
    client.groups.reset(GROUP, [(TOPIC, 0, 0)], create=True)
    before = [topic.name for topic in client.topics.list()]
    slip = GROUP[:-1]
    for words in (("list", slip), ("show", slip, "--offset", "0"), ("redrive", slip, "--all")):
        assert f"did you mean '{GROUP}'?" in run(shared_broker, "dead-letter", *words, status=1), words
    assert json.loads(run(shared_broker, "dead-letter", "list", GROUP, "--json")) == []
    assert json.loads(run(shared_broker, "dead-letter", "redrive", GROUP, "--all", "--json"))["sent"] == 0
    assert [topic.name for topic in client.topics.list()] == before


def test_redelivery_or_drop_of_an_undeferred_message_is_reported(
    client: txmq.Client, shared_broker: BrokerProcess
) -> None:
    client.groups.reset(GROUP, [(TOPIC, 0, 0)], create=True)
    for action in ("redeliver", "drop"):
        at = ("retry", action, GROUP, "--topic", TOPIC, "--partition", "0", "--offset")
        assert "has not deferred" in run(shared_broker, *at, "7", status=1)
        assert "0 to 1" in run(shared_broker, "retry", action, GROUP, "--topic", TOPIC, "-p", "7", "-o", "1", status=1)
        assert "no topic" in run(shared_broker, "retry", action, GROUP, "--topic", "zzz", "--all", status=1)


@pytest.mark.parametrize("point", ["client.redrive.begun:1", "client.redrive.sent:1"])
def test_redrive_that_is_killed_and_repeated_sends_each_message_once(
    client: txmq.Client, shared_broker: BrokerProcess, point: str
) -> None:
    send_dead_letters(client, 5, 8)
    command = [
        sys.executable,
        "-m",
        "txmq.cli.main",
        "dead-letter",
        "redrive",
        GROUP,
        "--all",
        "-b",
        shared_broker.address,
    ]
    killed = subprocess.run(command, check=False, timeout=WAIT_S, env={**os.environ, VARIABLE: point})
    assert killed.returncode == -signal.SIGKILL
    assert len(sent(client)) in (0, 2)  # all or none
    run(shared_broker, "dead-letter", "redrive", GROUP, "--all")
    assert sent(client) == [b"letter 5", b"letter 8"]


def test_concurrent_redrives_send_each_message_once(client: txmq.Client, shared_broker: BrokerProcess) -> None:
    send_dead_letters(client, *range(20))
    together = threading.Barrier(4)
    outcomes: list[str] = []

    def redrive() -> None:
        with txmq.connect(shared_broker.address) as mine:
            redriving = Redrive(mine, GROUP)
            dead_letters = list(redriving.dead_letters())
            together.wait(WAIT_S)
            try:
                outcomes.extend(redriven.outcome for redriven in redriving.redrive(dead_letters))
            except txmq.errors.RolledBackError:  # a later one was faster
                outcomes.append("rolled back")

    threads = [threading.Thread(target=redrive) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert set(sent(client)) == {b"letter %d" % offset for offset in range(20)}
    assert len(sent(client)) == 20
    assert outcomes.count("sent") == 20


def test_delayed_commit_of_redrive_that_was_overtaken_is_refused(
    client: txmq.Client, shared_broker: BrokerProcess
) -> None:
    """The proof does not rest on connections that end in time: the earlier one commits after the later one is done."""
    send_dead_letters(client, 5)
    (one,) = Redrive(client, GROUP).dead_letters()
    late = Redrive(client, GROUP)
    settled = late._settled

    def overtaken(txid: str, begun: int, origins: Any) -> set[Any]:
        found = settled(txid, begun, origins)
        other = threading.Thread(target=run, args=(shared_broker, "dead-letter", "redrive", GROUP, "--all"))
        other.start()  # a thread of its own: outside of the block this stands in
        other.join(WAIT_S)
        return found

    late._settled = overtaken  # type: ignore[method-assign]
    with pytest.raises(txmq.errors.RolledBackError):
        list(late.redrive([one]))
    assert sent(client) == [b"letter 5"]
