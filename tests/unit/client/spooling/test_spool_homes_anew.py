"""An ordered producer over several homes whose topic is deleted and created anew under its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.client.homes import Cluster
from tests.unit.client.spooling.test_spool_homes import NamedPartition, ordered, send
from txmq.client.spooling.direct_sender import Unsent
from txmq.client.spooling.ordered_producer import OrderedMessageProducer, OrderedOptions
from txmq.client.spooling.spool import Spool, Ticket
from txmq.errors import StaleTopicError
from txmq.model import SendStatus
from txmq.testing.eventually import eventually


def _spool_then_create_anew(cluster: Cluster, producer: OrderedMessageProducer, count: int) -> None:
    for home in cluster.homes:
        home.go_down()
    for number in range(count):
        assert send(producer, 1, b"old %d" % number) is SendStatus.SPOOLED
    cluster.create_anew()


def test_spooled_messages_for_a_topic_gone_are_parked_together(cluster: Cluster, tmp_path: Path) -> None:
    with ordered(cluster, tmp_path) as producer:
        send(producer, 1, b"first")
        _spool_then_create_anew(cluster, producer, 3)
        for number in range(3):
            cluster.back(number)
        cluster.pass_time_until(lambda: not producer.spooled)
        reasons = {parked.reason for parked in producer.parked()}
        assert len(producer.parked()) == 3
        assert len(reasons) == 1
        assert "topic 't' has id 8 now, not 7" in reasons.pop()
        assert cluster.values(1) == []
        cluster.pass_time_until(lambda: send(producer, 1, b"new") is SendStatus.ACKNOWLEDGED)
    assert cluster.values(1)[-1] == b"new"
    assert b"old" not in b"".join(value or b"" for value in cluster.values(1))


def test_messages_behind_those_of_the_former_topic_are_stored(cluster: Cluster, tmp_path: Path) -> None:
    with ordered(cluster, tmp_path) as producer:
        send(producer, 1, b"first")
        _spool_then_create_anew(cluster, producer, 2)
        cluster.back(0)  # tells of the topic; the partition's home is still away
        cluster.clock.now += 31.0
        cluster.pass_time_until(lambda: producer._topics["t"][0].topic_id == 8 or not send(producer, 0, b"ask"))
        assert [send(producer, 1, b"new %d" % number) for number in range(3)] == [SendStatus.SPOOLED] * 3
        cluster.back(1)
        cluster.pass_time_until(lambda: not producer.spooled)
        assert len(producer.parked()) == 2
        send(producer, 1, b"last")
    assert cluster.values(1) == [b"new 0", b"new 1", b"new 2", b"last"]


def test_a_later_process_knows_the_topic_from_its_spool(cluster: Cluster, tmp_path: Path) -> None:
    with ordered(cluster, tmp_path) as producer:
        send(producer, 1, b"first")
    for home in cluster.homes:
        home.go_down()
    with ordered(cluster, tmp_path) as producer:
        _spool_then_create_anew(cluster, producer, 1)
        for number in range(3):
            cluster.back(number)
        cluster.pass_time_until(lambda: len(producer.parked()) == 1)
    assert cluster.values(1) == []


def test_direct_message_for_a_topic_gone_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    with ordered(cluster, tmp_path) as producer:
        send(producer, 1, b"first")
        cluster.create_anew()
        with pytest.raises(StaleTopicError, match="has id 8 now, not 7"):
            send(producer, 1, b"for the former topic")
        assert send(producer, 1, b"second") is SendStatus.ACKNOWLEDGED
        assert send(producer, 1, b"third") is SendStatus.ACKNOWLEDGED
        assert (producer.spooled, producer.parked()) == (0, [])
    assert cluster.values(1) == [b"second", b"third"]


def test_refused_message_ends_at_the_home_it_was_sent_to(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may find the partition's new home while the refused message is taken over."""
    with ordered(cluster, tmp_path) as producer:
        send(producer, 1, b"first")
        queue = producer._queue(("t", 1))
        former, spooled_from = queue.home, queue._spooled_from

        def found_behind(unsent: Unsent) -> list[Ticket]:
            tickets = spooled_from(unsent)
            queue.home = producer._queue(("t", 2)).home
            return tickets

        monkeypatch.setattr(queue, "_spooled_from", found_behind)
        cluster.create_anew()
        refused = producer.send_async("t", b"for the former topic", b"1")
        eventually(refused.done, "the refusal is told")
        assert isinstance(refused.exception(), StaleTopicError)
        assert (former.sender.core.unfinished, queue.home.sender.core.unfinished) == (0, 0)
        assert queue.home is not former


def test_operator_sends_what_is_parked_to_the_present_topic(cluster: Cluster, tmp_path: Path) -> None:
    with ordered(cluster, tmp_path) as producer:
        send(producer, 1, b"first")
        _spool_then_create_anew(cluster, producer, 2)
        for number in range(3):
            cluster.back(number)
        cluster.pass_time_until(lambda: len(producer.parked()) == 2)
    with Spool(tmp_path) as spool:
        assert spool.unpark() == 2
    with ordered(cluster, tmp_path) as producer:
        cluster.pass_time_until(lambda: not producer.spooled)
        assert producer.parked() == []
    assert cluster.values(1) == [b"old 0", b"old 1"]


def test_message_for_an_unknown_id_goes_to_the_present_topic(cluster: Cluster, tmp_path: Path) -> None:
    for home in cluster.homes:
        home.go_down()
    client: Any = cluster.client
    options = OrderedOptions(visibility_wait_s=0.0, partitions={"t": 6})
    with OrderedMessageProducer(client, NamedPartition(), str(tmp_path), options) as producer:
        _spool_then_create_anew(cluster, producer, 1)
        for number in range(3):
            cluster.back(number)
        cluster.pass_time_until(lambda: not producer.spooled)
        assert producer.parked() == []
    assert cluster.values(1) == [b"old 0"]
