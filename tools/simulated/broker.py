"""A home broker in memory for tests of what a client does when answers go missing: the real core, and planned mishaps.

Theory of operation. A request goes to the broker's own core as the line that is sent over the network
(``connection``), on a simulated disk; its journal is forced, then its answer is there. What is planned happens around
that (``faults``). This is the connection's other end, and the client, too.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import cache
from threading import RLock
from typing import Any

from tools.images.homes import CLUSTER, directory
from tools.images.node import Client, Node, small_settings
from tools.images.requests import UUID, batch, part
from tools.simulated.clock import SimClock
from tools.simulated.connection import Sent, SimulatedConnection, WireReply
from tools.simulated.disk import SimDisk
from tools.simulated.faults import LOST_AFTER_S, Fault, GivenReply, Holding, Reply, lost
from tools.simulated.routes import SimulatedRoutes
from tools.simulated.stand_in import AnyClass
from txmq.broker.state.deadlines import TICK_MS
from txmq.broker.state.transaction import TransactionState
from txmq.broker.verbs.transaction_checks import state_of
from txmq.client.producer.producer import Content
from txmq.client.transaction.background_resolver import BackgroundResolver
from txmq.client.transaction.homes import PendingCommits
from txmq.client.transport.session import ClientSession
from txmq.config import BrokerSettings
from txmq.errors import BadRequestError, BrokerAwayError, ConnectionLostError, TxmqError
from txmq.log.records import Record
from txmq.model import Message, Outcome
from txmq.xid import TxId

PARTITIONS = 2  # of each topic, at each home
OWNER_GONE_S = 5.0  # others may settle what it left
_ENDS = ("committed", "rolled-back")
_UNSEEN = (TransactionState.NONE, TransactionState.FORGOTTEN)


@cache
def settings_of(request_size_bytes_max: int) -> BrokerSettings:
    """Of a small broker that takes requests of this size."""
    size = request_size_bytes_max
    settings = small_settings(request_size_bytes_max=size, batch_size_bytes_max=size)
    object.__setattr__(settings, "journal_file_size_bytes", size + settings.group_size_bytes_max)  # a record fits
    return settings


class SimulatedBroker(AnyClass):
    """The broker, a link to it, and the client of it.

    Attributes:
        node: the broker.
        home: id of its journal.
        control: as ``HomeLink.control``.
        connections: all that were used and not closed.
        faults: per verb, what happens to its next requests; None lets one pass.
        requests: verbs received, in order.
        witness: called before and after each execution; it may take the broker away, and the answer with it.
        timeout: as ``Client.timeout``.
        holds: requests that are carried out later.
        sent: the same requests in full.
        intercept: what stands before all this; it is given each request, and what carries it out.

    Args:
        home: its id.
        node: the broker, if it is there already.
    """

    def __init__(
        self, topics: Sequence[str] = ("orders", "audit"), request_size_bytes_max: int = 64 << 10, *,
        home: int = 0xA1, clock: SimClock | None = None, node: Node | None = None,
    ) -> None:  # fmt: skip
        self.clock = clock or SimClock()
        self.node = node or _lone(topics, request_size_bytes_max, home, self.clock)
        self.home = self.node.context.identity.node
        self.routes = SimulatedRoutes(self)
        self.resolver: BackgroundResolver | None = None
        self.pending_commits = PendingCommits(self.clock)
        self.lock = RLock()
        self.connections = list[SimulatedConnection]()
        self.control = SimulatedConnection(self)
        self.faults: dict[str, deque[Fault | None]] = defaultdict(deque)
        self.requests = list[str]()
        self.timeout, self._is_away = 5.0, False
        self.holds = Holding(self.clock)
        self.sent = list[Sent]()
        self.intercept: Callable[[Sent, Callable[[], Reply]], Reply] = _straight
        self.witness: Callable[[SimulatedBroker, str], None] | None = None
        self._states: dict[str, str] = {}
        self._decided_by: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"home {self.home:016x}"

    # --- the link ----------------------------------------------------------------------------------------------------

    @property
    def session(self) -> ClientSession:
        """As ``HomeLink.session``."""
        return self.control.session or self.control.connect_with_session(0.0)[1]

    def leave_session(self, full: ClientSession) -> None:
        """As ``HomeLink.leave_session``."""
        if self.control.session is full:
            self.control = SimulatedConnection(self)

    def new_connection(self) -> SimulatedConnection:
        """As ``HomeLink.new_connection``."""
        return SimulatedConnection(self)

    def known_outcome(self, txid: TxId) -> Outcome | None:
        """As ``HomeLink.known_outcome``."""
        return self.control.known_outcome(txid)

    def look(self) -> None:
        """As ``HomeLink.look`` of a broker that is alone."""

    def call(self, verb: str, *arguments: str | int, timeout: float = 5.0, **named: Any) -> bytes:
        """A request on the client's own connection."""
        return self.control.call(verb, *arguments, timeout=timeout, **named)

    # --- mishaps -----------------------------------------------------------------------------------------------------

    @property
    def is_away(self) -> bool:
        """Whether no connection can be had. Those that are there end; the client's own is made again when it can be."""
        return self._is_away

    @is_away.setter
    def is_away(self, is_away: bool) -> None:
        was_away, self._is_away = self._is_away, is_away
        if is_away and not was_away:
            self.connection_ends()
        elif was_away and not is_away and self.control.session is not None:
            self.control.connect_with_session(0.0)

    def connection_ends(self) -> None:
        """All connections are lost: the broker rolls back what was streamed."""
        for connection in self.connections:
            connection.end()
        self.pump()

    def owner_dies(self, gone_s: float = OWNER_GONE_S) -> None:
        """The client's process ends, and some time passes; from now on this is another client."""
        self.connection_ends()
        self.control = SimulatedConnection(self)
        self.clock.advance(gone_s)

    def prepare_earlier(self, topic: str, uuid: str = UUID) -> Callable[[], None]:
        """Have another client of a database prepare messages of any key for partition 0; returns what rolls them back.

        Transactions that are prepared or decided from now on get their place there after it.
        """
        wire = self.node.session()
        assert wire.client.session is not None
        txid = self._txid((wire.client.session.number, 1))
        words = {"resource": "db", "uuid": uuid, "table": "t"}
        body = part(topic, 0, batch(b"earlier"), "*")
        assert wire.ask("prepare", txid, "last-resource", extensions=words, body=body).code == 200

        def roll_back() -> None:
            assert wire.ask("rollback", txid).code == 200
            self.pump()

        return roll_back

    def take(self, sent: Sent, send: Callable[[], WireReply]) -> Reply:
        """A request comes in: carry it out, with what is planned."""
        return self.intercept(sent, lambda: self._taken(sent, send))

    def stand_in(self, verb: str, answer: Callable[[Sent], bytes]) -> None:
        """Answer a verb in the broker's place."""

        def intercept(sent: Sent, take: Callable[[], Reply]) -> Reply:
            if sent.verb != verb:
                return take()
            self.requests.append(verb)
            try:
                return GivenReply(answer(sent))
            except TxmqError as error:
                return GivenReply(error)

        self.intercept = intercept

    def _taken(self, sent: Sent, send: Callable[[], WireReply]) -> Reply:
        with self.lock:
            if self.is_away:
                raise BrokerAwayError("planned")
            self.requests.append(sent.verb)
            self.sent.append(sent)
            plan = self.faults[sent.verb]
            fault = plan.popleft() if plan else None
            if fault is not None and not fault.is_executed:
                return self._failed(fault)
            if self._goes_away(sent.verb):
                return self._failed(lost(is_executed=False))
            if sent.txid in self.holds.txids:
                return self.holds.reply(lambda: self._execute(sent, send, fault))
            return self._execute(sent, send, fault)

    def _execute(self, sent: Sent, send: Callable[[], WireReply], fault: Fault | None) -> Reply:
        with self.lock:
            self._note(sent.txid)
            reply = send()
            self._note(sent.txid)
            if reply.answer is not None and reply.answer.code != 200:
                return reply
            if self._goes_away(sent.verb):
                return self._failed(lost(is_executed=True))
            return reply if fault is None else self._failed(fault)

    def _goes_away(self, verb: str) -> bool:
        if self.witness is not None:
            self.witness(self, verb)
        return self.is_away

    def _failed(self, fault: Fault) -> GivenReply:
        if is_lost := isinstance(fault.error, ConnectionLostError):
            self.clock.advance(LOST_AFTER_S)
            self.connection_ends()
        return GivenReply(fault.error, is_lost_unsent=is_lost and not fault.is_executed)

    def put_back(self, disk: SimDisk) -> None:
        """The broker dies, and is started with another data directory: an older copy of its own."""
        self.connection_ends()
        self.node = Node(disk, self.node.settings, clock=self.clock)
        self._states.clear()

    def pump(self) -> None:
        """Let the broker do all it has to."""
        if self.clock.now_ms() - self.node.context.ticked_ms >= TICK_MS:
            self.node.core.tick(self.clock.now_ms())
        self.node.pump()

    # --- what tests look at ------------------------------------------------------------------------------------------

    def states(self) -> dict[str, str]:
        """Every transaction's state, also after the client has let the broker forget it."""
        state = self.node.state
        outcomes = ((session.number, counter) for session in state.sessions.values() for counter in session.outcomes)
        for name in (*state.transactions, *state.decisions.incomplete, *outcomes):
            self._note(self._txid(name))
        for txid in list(self._states):
            self._note(txid)
        return dict(self._states)

    def branches(self) -> dict[str, tuple[str, str]]:
        """State and deciding transaction of each branch of a transaction that another home decides."""
        states = self.states()
        return {txid: (states[txid], of) for txid, of in self._decided_by.items()}

    def homes_left(self) -> set[str]:
        """Branches at other homes that decisions here wait for."""
        found = self.node.state.decisions.incomplete.values()
        return {txid for decided in found for txid, is_complete in decided.homes.items() if not is_complete}

    def heuristics(self, txid: str) -> list[tuple[str, str]]:
        """The heuristic decisions that were reported: kind and reason."""
        facts = self.node.state.decisions.heuristics.get(TxId.parse(txid)[2:], ())
        return [(fact["what"].removeprefix("heuristic-"), fact["reason"]) for fact in facts]

    def messages(self, topic: str) -> list[Message]:
        """The messages of a topic that readers see, partition by partition."""
        node = self.node
        numbers = sorted(int(number) for name, number in node.state.partitions if name == topic.encode())
        return [message for number in numbers for message in node.messages(node.partition(topic, number))]

    def values(self, topic: str) -> list[bytes | None]:
        """What these say."""
        return [message.value for message in self.messages(topic)]

    @property
    def tokens(self) -> dict[str, str]:
        """The newest fencing token of each database."""
        return self.node.state.fencing_tokens.newest

    def _note(self, txid: str) -> None:
        """Keep what the broker knows of a transaction: it forgets the outcome when the client has seen it."""
        if self._states.get(txid) in _ENDS:
            return
        try:
            name = TxId.parse(txid)[2:]
        except ValueError:  # the request is of something else
            return
        session = self.node.state.sessions.get(name[0])
        found = TransactionState.NONE if session is None else state_of(self.node.context, session, name[1])
        if found not in _UNSEEN:
            self._states[txid] = found.value
            transaction = self.node.state.transactions.get(name)
            if transaction is not None and transaction.is_branch:
                self._decided_by[txid] = transaction.meta["of"]

    def _txid(self, name: tuple[int, int]) -> str:
        identity = self.node.context.identity
        return str(TxId(identity.cluster, identity.node, *name))

    # --- the producer ------------------------------------------------------------------------------------------------

    def send(self, topic: str, value: bytes, key: bytes | None = None, **_: Any) -> Any:
        """A producer's send inside a block."""
        from txmq.client.transaction.current import current_transaction

        transaction = current_transaction()
        if transaction is None:
            raise BadRequestError("the fake sends in blocks only")
        partition, record = self.route(topic, (key, value, None, None))
        return transaction.add(topic, partition, *record)

    def route(self, topic: str, message: Content, *_: object) -> tuple[int, Record]:
        """To partition 0; with a key, to the one of its first byte modulo 2."""
        key, value = message[:2]
        return key[0] % 2 if key else 0, (key, value, [], self.clock.now_ms())


def _lone(topics: Sequence[str], request_size_bytes_max: int, home: int, clock: SimClock) -> Node:
    node = Node(directory(CLUSTER, home), settings_of(request_size_bytes_max), clock=clock)
    client: Client = node.connect()
    for topic in topics:
        assert client.ask("topic", "create", topic, extensions={"partitions": PARTITIONS}).code == 200
    client.disconnect()
    return node


def _straight(_sent: Sent, take: Callable[[], Reply]) -> Reply:
    return take()
