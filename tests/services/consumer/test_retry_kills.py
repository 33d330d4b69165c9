"""A member that is killed at each step of deferring a message, retrying it and dead-lettering it: nothing is lost.

The steps are store, acknowledge and save (``stored``, ``saved`` the first time), deal with it, save (``saved`` the
second time), remove the content (``removed``); or send its dead letter (``dead_letter.sent``). A second process with
the same store goes on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import txmq
from tests.services.consumer.consuming import WAIT_S
from tests.services.consumer.retrying import GROUP, LATER, NOW, TOPIC, bad, kept, listening, never, saved
from txmq.runtime.crashpoints import VARIABLE
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess

# "bad" fails always, or once: then it is dealt with, but not before the group knows that it is deferred.
_MEMBER = """
import sys, time, txmq
client = txmq.connect(sys.argv[1])
options = txmq.ConsumerOptions(
    retry_delay=0.0, deferred_delay=0.0, deferred_retries=1, name="dying", offset_save_interval=0.02)
consumer = client.consumer("billing", ["orders"], max_retries=0, retry_store=sys.argv[2] or None, options=options)
failures = 0
def handle(message):
    global failures
    if message.value != b"bad":
        return
    if failures and sys.argv[2]:
        while not client.groups.describe("billing")["partitions"][0]["deferred"]:
            time.sleep(0.01)
    if not failures or sys.argv[3] == "always":
        failures += 1
        raise ValueError("cannot")
consumer.run(handle)
"""


def die(broker: BrokerProcess, store: str, point: str, *, fails: str = "once") -> None:
    """A member that is killed at a point."""
    arguments = [sys.executable, "-c", _MEMBER, broker.address, store, fails]
    done = subprocess.run(arguments, check=False, timeout=WAIT_S, env={**os.environ, VARIABLE: point})
    assert done.returncode == -signal.SIGKILL
    with txmq.connect(broker.address) as other:  # nobody waits for the end of its session
        words = {"member": "dying"}
        other.control.call("group", "leave", GROUP, timeout=WAIT_S, extensions=words, body=[b""])


@pytest.mark.parametrize("kind", ["file", "topic"])
@pytest.mark.parametrize("point", ["client.deferred.stored:1", "client.deferred.saved:1"])
def test_kill_while_deferring_redelivers_the_message_but_not_its_copy(
    client: txmq.Client, broker: BrokerProcess, tmp_path: Path, kind: str, point: str
) -> None:
    file = tmp_path / "r"
    store = str(file) if kind == "file" else "topic"
    die(broker, store, point)
    is_named = saved(client)[1] is not None
    assert is_named is point.startswith("client.deferred.saved")
    assert (kept(file) if kind == "file" else [copy.value for copy in client.browse(f"{GROUP}.retry")]) == [b"bad"]
    with listening(client, store, LATER, never) as found:
        eventually(lambda: b"bad" in found.values and saved(client) == (3, None), "it is dealt with, and the rest")
        client.producer().send(TOPIC, b"last", key=b"k")
        eventually(lambda: b"last" in found.values, "nothing comes after it")
    assert found.values.count(b"bad") == 1
    assert kind == "topic" or kept(file) == []


@pytest.mark.parametrize(("point", "left"), [("client.deferred.saved:2", [b"bad"]), ("client.deferred.removed:1", [])])
def test_kill_after_completion_does_not_redeliver_the_message(
    client: txmq.Client, broker: BrokerProcess, tmp_path: Path, point: str, left: list[bytes]
) -> None:
    file = tmp_path / "r"
    die(broker, str(file), point)
    assert (saved(client)[1], kept(file)) == (None, left)
    client.producer().send(TOPIC, b"last", key=b"k")
    with listening(client, str(file), NOW, never) as found:
        eventually(lambda: b"last" in found.values, "the rest comes")
    assert b"bad" not in found.values
    assert kept(file) == []  # what the group does not name is stale


@pytest.mark.parametrize("has_store", [True, False])
def test_kill_after_the_dead_letter_repeats_it_and_loses_none(
    client: txmq.Client, broker: BrokerProcess, tmp_path: Path, has_store: bool
) -> None:
    file = tmp_path / "r"
    store = str(file) if has_store else None
    die(broker, store or "", "client.dead_letter.sent:1", fails="always")
    assert [dead_letter.value for dead_letter in client.browse(f"{GROUP}.dead-letter")] == [b"bad"]
    assert saved(client)[1] == ([[1, 1]] if has_store else None)
    with listening(client, store, NOW, bad):
        eventually(lambda: saved(client) == (3, None), "a dead letter, and the rest dealt with")
    dead_letters = [dead_letter.headers["txmq.dead.offset"] for dead_letter in client.browse(f"{GROUP}.dead-letter")]
    assert dead_letters == [b"1", b"1"]
    assert not has_store or kept(file) == []
