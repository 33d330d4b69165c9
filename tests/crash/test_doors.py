"""The doors of campaigns with users: each process may do what it was granted, and what it was refused is found."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

import txmq
from tools.crash.doors import GuardedDoors, may, user_of
from txmq.errors import ConnectionLostError, ForbiddenError
from txmq.testing.processes.broker import BrokerProcess


def test_guarded_doors_find_what_a_process_was_refused(tmp_path: Path) -> None:
    doors = GuardedDoors(tmp_path / "tls")
    with BrokerProcess(tmp_path / "broker", tls=doors.tls) as broker:
        doors.close([broker])
        with txmq.connect(doors.address([broker])) as operator:
            operator.topics.create("orders")
            operator.topics.create("secrets")
        doors.admit([broker], {"w0": may("write", "topic", ["orders"]), "w1": []})
        with txmq.connect(doors.address([broker], user_of("w0.7"))) as client, client.producer() as producer:
            producer.send("orders", b"one")
            assert doors.refused([broker]) == []
            with pytest.raises(ForbiddenError):
                producer.send("secrets", b"two")
        (found,) = doors.refused([broker])
        assert found.startswith("broker refused w0: w0 may do nothing with topic secrets")


def test_nobody_comes_in_without_a_certificate_of_the_campaign(tmp_path: Path) -> None:
    doors = GuardedDoors(tmp_path / "tls")
    with BrokerProcess(tmp_path / "broker", tls=doors.tls) as broker:
        doors.close([broker])
        stranger = f"txmqs://operator@127.0.0.1:{broker.port}?ca={doors.tls.ca}"
        with pytest.raises((ConnectionLostError, ssl.SSLError)):
            txmq.connect(stranger, password="guess", timeout=2.0)
