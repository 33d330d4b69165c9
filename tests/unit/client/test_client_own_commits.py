"""What a client does next goes after the commits that a lone broker has yet to answer, and finds what they wrote."""

from __future__ import annotations

import pytest

from tests.unit.client.homes import OpenCommits
from tests.unit.client.scripted import ScriptedBroker, connection_to
from txmq.client.client import DRAIN_S, Client
from txmq.errors import BrokerAwayError, ConnectionLostError
from txmq.runtime import threads


@pytest.fixture
def commits(broker: ScriptedBroker, client: Client) -> OpenCommits:
    made = client.routes.any_link().pending_commits = OpenCommits(broker.clock)
    return made


@pytest.mark.parametrize("key", [None, b"k"])
def test_message_waits_for_commits_to_its_partition(client: Client, commits: OpenCommits, key: bytes | None) -> None:
    producer = client.producer()
    with pytest.raises(BrokerAwayError, match="nothing was stored"):
        producer.send("t", b"v", key=key, partition=0)
    with pytest.raises(BrokerAwayError, match="nothing was stored"):
        producer.send_async("t", b"v", key=key, partition=0)
    commits.is_open = False
    assert producer.send("t", b"v", key=key, partition=0).offset == 0


def test_send_many_waits_once_for_all_batches(client: Client, commits: OpenCommits, broker: ScriptedBroker) -> None:
    producer, pairs = client.producer(), [(b"%d" % number, b"v") for number in range(50)]
    began = broker.clock.now
    with pytest.raises(BrokerAwayError, match="nothing was stored") as failed:
        producer.send_many("t", pairs, timeout=5.0)
    assert commits.deadlines == [began + 5.0, began]
    assert (broker.ends, failed.value.__notes__) == ({}, ["0 of 50 messages were acknowledged; failed: t-0, t-1"])
    commits.is_open = False
    assert all(result.is_success for result in producer.send_many("t", pairs))


def test_reads_wait_within_their_timeout_and_go_on(
    client: Client, commits: OpenCommits, broker: ScriptedBroker
) -> None:
    commits.is_open = False
    client.producer().send("t", b"v", partition=0)
    commits.is_open, began = True, broker.clock.now
    assert [message.value for message in client.fetch("t", 0, 0, timeout=0.5)] == [b"v"]
    assert commits.deadlines == [began + 0.5]
    assert client.offsets("t", 0).end == 1
    assert commits.waited == 2


def test_close_drains(broker: ScriptedBroker, commits: OpenCommits, client: Client) -> None:
    drained: list[float] = []
    commits.drain = drained.append  # type: ignore[method-assign, assignment]
    began = broker.clock.now
    client.close()
    assert drained == [began + DRAIN_S]


def test_exit_drains_clients_that_are_not_closed() -> None:
    class Unclosed:
        exits = 0

        def exiting(self) -> None:
            self.exits += 1

    unclosed = Unclosed()
    threads.watch_exit(unclosed)
    threads._at_exit()
    assert unclosed.exits == 1


# --- the request after a decision ------------------------------------------------------------------------------------


def test_request_behind_a_decision_is_written_beside_those_held_back(broker: ScriptedBroker) -> None:
    reconnecting = connection_to(broker)
    connection = reconnecting.connect(broker.clock.now + 5)
    held = connection.request(broker.clock.now + 5, "ping")
    connection._woken.append(held)  # a thread is being woken: requests wait for company
    broker.verbs.clear()
    waits = connection.request(broker.clock.now + 5, "ping")
    assert broker.verbs == []
    reconnecting.write_transaction("commit 1-2-3-4", {}, ())
    assert broker.verbs == ["ping", "commit"]
    assert waits.result()


def test_request_behind_a_decision_waits_for_no_connection(broker: ScriptedBroker) -> None:
    reconnecting, began = connection_to(broker), broker.clock.now
    with pytest.raises(ConnectionLostError):
        reconnecting.write_transaction("commit 1-2-3-4", {}, ())
    assert (broker.streams, broker.clock.now) == ([], began)


def test_full_socket_is_not_waited_for_long(broker: ScriptedBroker) -> None:
    reconnecting = connection_to(broker)
    connection = reconnecting.connect(broker.clock.now + 5)
    broker.streams[0].takes.extend([0] * 100)
    began = broker.clock.now

    def wait(timeout: float, *, writable: bool) -> bool:
        broker.clock.now += timeout
        return False

    broker.streams[0].wait = wait  # type: ignore[method-assign]
    reconnecting.write_transaction("commit 1-2-3-4", {}, ())
    assert connection.has_unsent
    assert broker.clock.now < began + 1.0
