"""A transaction over two real brokers, said in raw requests: its branch and its decision."""

from __future__ import annotations

import json
from typing import NamedTuple

from tests.services.broker.wire import Wire
from txmq.log import records
from txmq.testing.processes.broker import BrokerProcess

START_MS = 1_700_000_000_000
Login = tuple[str, str]  # user and password


class Home:
    """A client's session at one broker."""

    def __init__(self, broker: BrokerProcess, partition: int, login: Login | None = None) -> None:
        self.wire, self.partition = wire_to(broker, login), partition
        code, body = self.wire.ask(b"hello 1 branches session=new 1\r\n")
        assert code == 200, body
        told = json.loads(body)
        self._head = f"{told['cluster']}-{told['home']}-{told['session']}"
        self._counter = 0

    def txid(self) -> str:
        """The next one."""
        self._counter += 1
        return f"{self._head}-{self._counter:x}"

    def ask(self, head: str, value: bytes = b"") -> bytes:
        """One request, with one message if it has a value."""
        content = bytes(records.encode([(b"k", value, (), START_MS)])) if value else b""
        part = b"orders %d %d keys=7\r\n%b" % (self.partition, len(content), content) if value else b""
        code, body = self.wire.ask(f"{head} {len(part)} 1\r\n".encode() + part)
        assert code == 200, (head, body)
        return body

    def close(self) -> None:
        """The client is gone."""
        self.wire.socket.close()


class OverTwoHomes(NamedTuple):
    """A transaction whose branch is prepared, and no more."""

    here: Home
    there: Home
    txid: str
    branch: str

    @classmethod
    def prepared(cls, here: Home, there: Home, value: bytes) -> OverTwoHomes:
        """Prepare the branch."""
        made = cls(here, there, here.txid(), there.txid())
        there.ask(f"prepare {made.branch} branch of={made.txid}", value)
        return made

    def decide(self, value: bytes) -> None:
        """Commit where it is decided; the branch is told nothing."""
        self.here.ask(f"commit {self.txid} homes={self.branch}", value)


def wire_to(broker: BrokerProcess, login: Login | None) -> Wire:
    """A connection, logged in if there is a user and a password."""
    wire = Wire(broker)
    assert login is None or wire.log_in(*login) == 200
    return wire


def values(broker: BrokerProcess, partition: int, login: Login | None = None) -> list[bytes]:
    """What readers see."""
    with wire_to(broker, login) as wire:
        _, body = wire.ask(b"get orders %d 0 1000000 1\r\n" % partition)
    return [message.value or b"" for message in records.decode(body, "orders", partition)]
