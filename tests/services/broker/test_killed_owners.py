"""An owner that is killed while the broker owes it an answer: a commit that waits for its turn."""

from __future__ import annotations

import json

from tools.images.requests import UUID, batch, part
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess

from .wire import Wire


class Owner(Wire):
    """A session's connection."""

    def __init__(self, broker: BrokerProcess) -> None:
        super().__init__(broker)
        _, answer = self.ask(b"hello 1 owner session=new 1\r\n")
        fields = json.loads(answer)
        self.prefix = f"{fields['cluster']}-{fields['home']}-{fields['session']}-".encode()

    def prepare(self, number: int) -> bytes:
        """A message that a database decides; its transaction."""
        txid, body = self.prefix + b"%x" % number, part("t", 0, batch(b"x"), "7")
        words = b"resource=db uuid=%b table=t deadline=0" % UUID.encode()
        assert self.ask(b"prepare %b last-resource %b %d 1\r\n%b" % (txid, words, len(body), body))[0] == 200
        return txid


def test_killed_owner_is_gone_though_its_commit_waits_its_turn(broker: BrokerProcess) -> None:
    with Owner(broker) as earlier, Owner(broker) as killed, Wire(broker) as other:
        assert other.ask(b"topic create t partitions=1 1\r\n")[0] == 200
        first, waiting, left = earlier.prepare(1), killed.prepare(1), killed.prepare(2)
        killed.send(b"commit %b 0 1\r\n" % waiting)
        killed.finish()

        def is_connected(txid: bytes) -> bool:
            _, answer = other.ask(b"recover txid=%b 1\r\n" % txid)
            (row,) = json.loads(answer)["transactions"]
            return bool(row["owner_connected"])

        eventually(lambda: not is_connected(left), "the owner is gone", within_s=10.0)
        assert not is_connected(waiting)
        assert is_connected(first)
        assert earlier.ask(b"rollback %b 1\r\n" % first)[0] == 200
        assert killed.hear(1).codes == [200], "what it has said is answered"
