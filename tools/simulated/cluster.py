"""Several home brokers in memory, and a client of them all: for tests of transactions over homes.

Partition n of every topic belongs to home n modulo their number. The homes share a clock; each has faults, a log and
transactions of its own (``broker.py``).
"""

from __future__ import annotations

from typing import Any

from tools.simulated.broker import SimulatedBroker
from tools.simulated.clock import SimClock
from tools.simulated.routes import SimulatedRoutes
from txmq.client.transaction.background_resolver import BackgroundResolver
from txmq.client.transport.session import ClientSession
from txmq.log.records import Record
from txmq.xid import TxId


class SimulatedCluster:
    """The client of several homes, and its producer.

    Attributes:
        homes: the brokers.
    """

    def __init__(self, count: int = 3, **settings: Any) -> None:
        self.clock = SimClock()
        self.homes = [
            SimulatedBroker(home=0xA1 + number, clock=self.clock, slots=(number, count), **settings)
            for number in range(count)
        ]
        self.routes = SimulatedRoutes(*self.homes)
        self.timeout = 5.0
        self.resolver: BackgroundResolver | None = None

    @property
    def control(self) -> SimulatedBroker:
        """Any home's."""
        return self.routes.any_link()

    @property
    def session(self) -> ClientSession:
        """Any home's."""
        return self.control.session

    def leave_session(self, full: ClientSession) -> None:
        """As ``Client.leave_session``."""
        self.routes.link_of_home(full.home).leave_session(full)

    def new_connection(self) -> SimulatedBroker:
        """Any home."""
        return self.control

    def route(self, topic: str, value: bytes, key: bytes | None = None, *_: object) -> tuple[int, Record]:
        """To the partition of the key's first byte; without a key, to partition 0."""
        return key[0] % len(self.homes) if key else 0, (key, value, [], self.clock.now_ms())

    def values(self, topic: str) -> list[bytes | None]:
        """The messages of a topic that readers see, partition by partition."""
        return [value for home in self.homes for value in home.values(topic)]

    # --- what brokers do among themselves ----------------------------------------------------------------------------

    def talk(self) -> None:
        """Let branches that wait ask the homes that decide, and committed ones report, as far as homes are there."""
        for home in self.homes:
            for txid, (state, decided_by) in home.branches().items():
                decides = self.routes.link_of_home(TxId.parse(decided_by).home)
                if not home.is_away and not decides.is_away:
                    _talk_of(home, decides, txid, state, decided_by)

    def check(self) -> None:
        """A part is committed where its transaction's decision lists it, and nowhere else; nothing is in doubt."""
        for home in self.homes:
            for txid, (state, decided_by) in home.branches().items():
                decides = self.routes.link_of_home(TxId.parse(decided_by).home)
                is_committed = decides.states().get(decided_by) in ("committed", "decided")
                assert state == ("committed" if is_committed else "rolled-back"), (txid, decided_by)
            assert home.homes_left() == set()
            assert not {"prepared", "open"} & set(home.states().values())


def _talk_of(home: SimulatedBroker, decides: SimulatedBroker, txid: str, state: str, decided_by: str) -> None:
    if state == "prepared":
        asked: dict[str, str | None] = {"branch": txid, "owner": None}
        word, _, owner = decides.call("outcome", decided_by, timeout=1.0, extensions=asked).partition(b"\n")
        if word == b"unknown" and owner.startswith(b"owner gone"):
            asked["fence"] = None
            word = decides.call("outcome", decided_by, timeout=1.0, extensions=asked).partition(b"\n")[0]
        if word in (b"committed", b"rolled-back"):
            home.call("commit" if word == b"committed" else "rollback", txid, timeout=1.0)
    if home.branches()[txid][0] == "committed":
        decides.call("complete", decided_by, timeout=1.0, extensions={"branch": txid})
