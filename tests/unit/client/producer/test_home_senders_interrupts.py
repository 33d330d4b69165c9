"""Ctrl-C while the main thread takes batches from one sender to another: each is sent once, in order, and told."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import pytest

from tests.interrupts import Strike
from tests.unit.client.homes import Cluster
from txmq.client.producer import core, home_senders, sender
from txmq.client.producer.home_senders import HomeSender, HomeSenders
from txmq.client.transport.connection import Waiter
from txmq.model import SendResult
from txmq.runtime.threads import Future

FIRST, MESSAGES = b"first", [b"0", b"1", b"2"]
Sent = tuple[HomeSenders, HomeSender, list[Future[SendResult]]]


def _moved(cluster: Cluster) -> Sent:
    """Batches of a partition that another home owns now; its answer has come."""
    producer = cluster.client.producer()
    producer.send("t", FIRST, partition=0)
    cluster.give(0, to=1)
    futures = [producer.send_async("t", value, partition=0) for value in MESSAGES]
    source = producer._senders._of_links[cluster.links[0]]
    source.take_arrived()
    assert source.core.due_returned()
    return producer._senders, source, futures


def _away(cluster: Cluster) -> Sent:
    """Batches that may go anywhere, of a home that is away."""
    producer = cluster.client.producer()
    cluster.client.topics.known("t")
    cluster.homes[0].go_down()
    futures = [producer.send_async("t", value) for value in MESSAGES]
    source = producer._senders._of_links[cluster.links[0]]
    assert source.core.movable()
    return producer._senders, source, futures


@pytest.mark.parametrize("prepared", [_moved, _away])
def test_interrupted_move_of_batches_goes_to_its_end(
    monkeypatch: pytest.MonkeyPatch, prepared: Callable[[Cluster], Sent]
) -> None:
    number, is_struck = 0, True
    while is_struck:
        number += 1
        cluster = Cluster(monkeypatch)
        with monkeypatch.context() as patch:
            patch.setattr(HomeSender, "_start_background", lambda _sender: None)  # this thread does its work
            senders, source, futures = prepared(cluster)
            strike = Strike(number, core, home_senders, home_senders, sender, threading)
            sys.setprofile(strike)
            with suppress(KeyboardInterrupt):
                source.step(Waiter(), cluster.clock.now + 1)
            sys.setprofile(None)
        is_struck = strike.left <= 0
        for link in cluster.links:
            senders._sender_of(link)._start_background()
        results = [future.result(5) for future in futures]
        assert len({(result.partition, result.offset) for result in results}) == len(MESSAGES), number
        if prepared is _moved:
            assert cluster.all_values() == [FIRST, *MESSAGES], number
        else:
            assert Counter(cluster.all_values()) == Counter(MESSAGES), number
        cluster.routes.close()
    assert number > 10
