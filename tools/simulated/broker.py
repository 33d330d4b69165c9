"""A home broker in memory, as far as transactions see one: for tests of what a client does when answers go missing.

It follows docs/protocol.md for ``put tx=``, ``prepare``, ``commit``, ``rollback``, ``outcome``, ``recover``,
``checks``, ``resource report``, ``token``, and for ``decide`` and ``complete`` without a held watermark; the same
contract tests run against it and a real broker (tests/services/transaction/test_broker_contract.py). Faults are planned
(``faults``).
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from tools.simulated.clock import SimClock
from tools.simulated.faults import LOST_AFTER_S, FakeReply, Fault, Holding, lost
from tools.simulated.held_transaction import HeldTransaction
from tools.simulated.routes import SimulatedRoutes
from txmq.client.transaction.background_resolver import BackgroundResolver
from txmq.client.transaction.home_part import PendingCommits
from txmq.client.transport.session import ClientSession
from txmq.errors import (
    BadRequestError,
    BrokerAwayError,
    ConnectionLostError,
    NotOwnerError,
    OtherTokenError,
    StaleTopicError,
    TransactionConflictError,
    TxmqError,
    UnknownTopicError,
    UnknownTransactionError,
)
from txmq.log.records import Record, decode
from txmq.model import Message, Outcome
from txmq.protocol.branches import split_branches
from txmq.protocol.halves import DueHalf, encode_half
from txmq.protocol.parts import encode_result_line, parse_parts
from txmq.runtime.ports import Buffer
from txmq.xid import TxId

_DECIDED = ("decided", "committed")
Extensions = Mapping[str, Any]


class SimulatedBroker:
    """The broker, the connection to it, and the client: ``control``, ``session`` and ``clock`` are its own.

    Attributes:
        faults: per verb, what happens to its next requests; None lets one pass.
        requests: verbs received, in order.
        reports: resources that resolvers reported, and what they said.
        tokens: the newest fencing token of each database.
        topic_ids: of each topic that there is; another one after it was deleted and created anew.
        log: per topic and partition, the messages that readers see.
        owner_connected: what ``recover`` says of every owner.
        is_away: no connection can be had.
        witness: called before and after each execution; it may take the broker away, and the answer with it.
        home: id of its journal.
        timeout: as ``Client.timeout``.
        holds: requests that are carried out later.

    Args:
        home: id of its journal.
        slots: (n, m) of a home that owns the partitions whose number is n modulo m.
    """

    def __init__(
        self, topics: Sequence[str] = ("orders", "audit"), request_size_bytes_max: int = 1 << 20, *,
        home: int = 0xA1, clock: SimClock | None = None, slots: tuple[int, int] = (0, 1),
    ) -> None:  # fmt: skip
        self.clock, self.control = clock or SimClock(), self
        self.routes: SimulatedRoutes[SimulatedBroker] = SimulatedRoutes(self)
        self.resolver: BackgroundResolver | None = None
        self.pending_commits = PendingCommits(self.clock)
        self.home, self._slots, self._request_size_bytes_max = home, slots, request_size_bytes_max
        self.session = self._new_session(7)
        self.faults: dict[str, deque[Fault | None]] = defaultdict(deque)
        self.requests, self.reports = list[str](), list[tuple[str, dict[str, Any]]]()
        self.log: dict[tuple[str, int], list[Message]] = defaultdict(list)
        self.owner_connected, self.is_away, self.timeout = True, False, 5.0
        self.holds, self.tokens = Holding(self.clock), dict[str, str]()
        self.witness: Callable[[SimulatedBroker, str], None] | None = None
        self.topic_ids = {topic: number for number, topic in enumerate(topics, 1)}
        self._held: dict[str, HeldTransaction] = {}
        self._assigned: dict[tuple[str, int], int] = defaultdict(int)

    def __repr__(self) -> str:
        return f"home {self.home:016x}"

    # --- the connection ----------------------------------------------------------------------------------------------

    def _new_session(self, number: int) -> ClientSession:
        return ClientSession(
            {
                "cluster": "00000000000000c1", "home": f"{self.home:016x}", "session": f"{number:x}", "epoch": 0,
                "secret": f"{number:032x}", "in_flight_max": 8, "request_size_bytes_max": self._request_size_bytes_max,
                "time_ms": self.clock.now_ms(),
            },
            int(self.clock.monotonic() * 1000),
        )  # fmt: skip

    def leave_session(self, full: ClientSession) -> None:
        """As ``Client.leave_session``."""
        if self.session is full:
            self.session = self._new_session(full.id + 1)

    def new_connection(self) -> SimulatedBroker:
        """As ``HomeLink.new_connection``."""
        return self

    def close(self) -> None:
        """As ``ReconnectingConnection.close``."""

    def connect_with_session(self, deadline: float) -> tuple[SimulatedBroker, ClientSession]:
        """As ``Connection.connect_with_session``."""
        return self, self.session

    def known_outcome(self, txid: TxId) -> Outcome | None:
        """As ``ReconnectingConnection.known_outcome``."""
        return self.session.known_outcome(txid.counter)

    def measure_clock(self, session: ClientSession, timeout: float) -> None:
        """As ``Connection.measure_clock``."""
        session.clock_ahead_ms = self.clock.now_ms() - int(self.clock.monotonic() * 1000)

    def reach(self, deadline: float) -> None:
        """As ``Connection.reach``."""
        if self.is_away:
            raise BrokerAwayError("planned")

    def look(self) -> None:
        """As ``HomeLink.look`` of a broker that is alone."""

    def regain(self, deadline: float) -> None:
        """As ``Connection.regain``."""
        if self.is_away:
            self.clock.advance(max(deadline - self.clock.monotonic(), 0.0))
            raise BrokerAwayError("planned")

    def call(self, verb: str, *arguments: str | int, timeout: float, **named: Any) -> bytes:
        """As ``Connection.call``."""
        return self.submit(verb, *arguments, timeout=timeout, **named).result()

    def submit(
        self, verb: str, *arguments: str | int, timeout: float,
        extensions: Extensions | None = None, body: Sequence[Buffer] | None = None,
    ) -> FakeReply:  # fmt: skip
        """As ``Connection.submit``."""
        if timeout < 0:
            raise ValueError(f"timeout {timeout}")
        if self.is_away:
            raise BrokerAwayError("planned")
        self.requests.append(verb)
        plan = self.faults[verb]
        fault = plan.popleft() if plan else None
        if fault is not None and not fault.is_executed:
            return self._failed(fault)
        if self._goes_away(verb):
            return self._failed(lost(is_executed=False))
        words = (*arguments, dict(extensions or {}), b"".join(bytes(buffer) for buffer in body or ()))
        if arguments and arguments[0] in self.holds.txids:
            return self.holds.reply(lambda: self._execute(verb, words, fault))
        return self._execute(verb, words, fault)

    def _execute(self, verb: str, words: Sequence[Any], fault: Fault | None) -> FakeReply:
        try:
            answer = getattr(self, f"_{verb}")(*words)
        except TxmqError as error:
            return FakeReply(b"", error)
        if self._goes_away(verb):
            return self._failed(lost(is_executed=True))
        return FakeReply(answer, None) if fault is None else self._failed(fault)

    def _goes_away(self, verb: str) -> bool:
        if self.witness is not None:
            self.witness(self, verb)
        return self.is_away

    def repeat(self, verb: str, *arguments: str | int, timeout: float, **named: Any) -> bytes:
        """As ``Connection.repeat``, except that a planned loss is not tried again."""
        return self.call(verb, *arguments, timeout=timeout, **named)

    def submit_transaction(
        self, head: str, fields: Mapping[str, str | int], body: Sequence[Buffer] | None, deadline: float
    ) -> FakeReply:
        """As ``Connection.submit_transaction``."""
        verb, *arguments = head.removesuffix(" held").removesuffix(" delayable").split(" ")
        left_s = max(deadline - self.clock.monotonic(), 0.0)
        return self.submit(verb, *arguments, extensions=dict(fields), body=body, timeout=left_s)

    def write_transaction(self, head: str, fields: Mapping[str, str | int], body: Sequence[Buffer] | None) -> FakeReply:
        """As ``Connection.write_transaction``."""
        return self.submit_transaction(head, fields, body, self.clock.monotonic()).sent()

    def _failed(self, fault: Fault) -> FakeReply:
        if is_lost := isinstance(fault.error, ConnectionLostError):
            self.clock.advance(LOST_AFTER_S)
            self.connection_ends()
        return FakeReply(b"", fault.error, is_lost_unsent=is_lost and not fault.is_executed)

    def connection_ends(self) -> None:
        """The broker rolls back what a lost connection was streaming."""
        for held in self._held.values():
            if held.state == "open":
                held.state = "rolled-back"

    # --- the verbs ---------------------------------------------------------------------------------------------------

    def _put(self, topic: str, partition: int, fields: Extensions, body: bytes) -> bytes:
        held = self._held.setdefault(fields["tx"], HeldTransaction())
        self._require(held, "open")
        self._add(held, topic, partition, bytearray(body), fields.get("id", 0))
        held.streamed.add(body)
        return b"%d\n" % (len(held.parts) - 1)

    def _offset(self, topic: str, partition: int, *_words: Any) -> bytes:
        return b"%d 0 %d" % (2 * (len(self.log[topic, partition]),))

    def _prepare(self, txid: str, kind: str, fields: Extensions, body: bytes) -> bytes:
        held = self._held.get(txid) or HeldTransaction()
        if held.state == "prepared":
            return b""
        self._require(held, "open")
        if 0 < fields.get("deadline", 0) <= self.clock.now_ms():
            raise TransactionConflictError("the deadline has passed")
        if "xid" in fields and any(
            h.state == "prepared" and h.meta.get("xid") == fields["xid"] for h in self._held.values()
        ):
            raise TransactionConflictError("that xid is prepared already")
        if "of" in fields and self._is_own(fields["of"]):
            raise BadRequestError("this home decides it")
        self._add_all(held, fields, body)
        self._held[txid] = held
        held.state = "prepared"
        held.meta = {
            "kind": kind, "resource": fields.get("resource", ""), "uuid": fields.get("uuid", ""),
            "deadline_ms": fields.get("deadline", 0), "prepared_ms": self.clock.now_ms(),
            **{name: fields[name] for name in ("table", "group", "xid", "of") if name in fields},
        }  # fmt: skip
        self._list_homes(held, fields)
        return b""

    def _checks(self, group: str, fields: Extensions, _body: bytes) -> bytes:
        """Return all half messages of the group: each is always due."""
        due: list[bytes] = []
        for txid, held in self._held.items():
            if held.state == "prepared" and held.meta.get("group") == group and len(due) < fields.get("limit", 100):
                held.checks += 1
                age_ms = self.clock.now_ms() - held.meta["prepared_ms"]
                due.append(encode_half(DueHalf(txid, held.checks, age_ms, tuple(held.parts))))
        return b"".join(due)

    def _commit(self, txid: str, fields: Extensions, body: bytes) -> bytes:
        held = self._held.get(txid) or HeldTransaction()
        if held.state in _DECIDED:
            return held.lines
        if held.state == "prepared" and body:
            raise TransactionConflictError("prepared otherwise")
        if held.state != "prepared":
            self._require(held, "open")
            if not body and "homes" not in fields and txid not in self._held:
                raise UnknownTransactionError(txid)
            self._add_all(held, fields, body)
        self._held[txid] = held
        self._list_homes(held, fields)
        held.state, held.lines = "committed", b"".join(self._append(*part) for part in held.parts)
        return held.lines

    def _rollback(self, txid: str, fields: Extensions, _body: bytes) -> bytes:
        held = self._held.setdefault(txid, HeldTransaction())
        if held.state in _DECIDED:
            raise TransactionConflictError("committed")
        if "hazard" in fields and not held.heuristics:
            held.heuristics.append(("hazard", unquote(fields["hazard"])))
        held.state = "rolled-back"
        return b""

    def _decide(self, txid: str, fields: Extensions, body: bytes) -> bytes:
        held = self._held.get(txid) or HeldTransaction()
        if held.state in _DECIDED:
            return held.lines
        self._require(held, "open")
        branches, start = split_branches(body, fields["branches"])
        self._add_all(held, fields, body[start:])
        self._held[txid] = held
        self._list_homes(held, fields)
        held.state = "decided"
        held.branches = [{**branch, "complete": False, "heuristic": None} for branch in branches]
        held.meta = {"kind": "xa", "resource": "", "uuid": "", "deadline_ms": 0, "prepared_ms": self.clock.now_ms()}
        # Readers see it when every branch is complete; the offsets are assigned now.
        held.lines = b"".join(self._assign(*part) for part in held.parts)
        return held.lines

    def _complete(self, txid: str, fields: Extensions, _body: bytes) -> bytes:
        held = self._held.get(txid)
        if held is None or held.state not in _DECIDED:
            raise (UnknownTransactionError if held is None else TransactionConflictError)(txid)
        if "branch" in fields:
            held.homes[fields["branch"]] = True
            return b""
        branch = next((b for b in held.branches if b["uuid"] == fields["uuid"]), None)
        if branch is None:
            raise BadRequestError("no such branch")
        if not branch["complete"] and "heuristic" in fields:
            branch["heuristic"] = fields["heuristic"]
            held.heuristics.append((fields["heuristic"], fields["reason"]))
        branch["complete"] = True
        if held.state == "decided" and all(b["complete"] for b in held.branches):
            held.state = "committed"
            for part in held.parts:
                self._append(*part)
        return b""

    def _outcome(self, txid: str, fields: Extensions, _body: bytes) -> bytes:
        held = self._held.get(txid)
        if "fence" in fields and (held is None or held.state == "open"):
            held = self._held[txid] = HeldTransaction("rolled-back")
        if held is not None and held.state in _DECIDED:
            if "branch" in fields:
                return b"rolled-back\n" if held.homes.get(fields["branch"], True) else b"committed\n"
            return b"committed\n" + held.lines
        word = "unknown" if held is None or held.state == "open" else held.state
        owner = "owner connected" if self.owner_connected else "owner gone 5000"
        return f"{word}\n{owner}\n".encode() if "owner" in fields else f"{word}\n".encode()

    def _resource(self, _action: str, name: str, _fields: Extensions, body: bytes) -> bytes:
        self.reports.append((name, json.loads(body)))
        return b"{}\n"

    def _token(self, uuid: str, token: str, fields: Extensions, _body: bytes) -> bytes:
        newest = self.tokens.get(uuid, "")
        if token != newest and "adopted" not in fields and newest != fields.get("after", ""):
            raise OtherTokenError(f"{newest} is the newest")
        self.tokens[uuid] = token
        return b""

    def _recover(self, fields: Extensions, _body: bytes) -> bytes:
        state = fields.get("state")
        wanted = (state,) if state not in (None, "all") else ("prepared", "decided", "heuristic")[: 3 if state else 2]
        listed = [
            held.meta | {
                "txid": txid, "state": held.state, "client": "test", "parts": [], "branches": held.branches,
                "age_ms": self.clock.now_ms() - held.meta["prepared_ms"],
                "owner_connected": self.owner_connected,
                "owner_gone_ms": 0 if self.owner_connected else 5000,
            }
            for txid, held in self._held.items()
            if held.state in wanted and self._concerns(held, fields.get("uuid"), fields.get("xid"))
        ]  # fmt: skip
        start = int(fields.get("after", 0))
        end = start + fields.get("limit", 1000)
        page = {"transactions": listed[start:end], "next": str(end) if end < len(listed) else None}
        return json.dumps(page).encode() + b"\n"

    # --- what tests look at ------------------------------------------------------------------------------------------

    def states(self) -> dict[str, str]:
        """Every transaction's state."""
        return {txid: held.state for txid, held in self._held.items()}

    def branches(self) -> dict[str, tuple[str, str]]:
        """State and deciding transaction of each branch of a transaction that another home decides."""
        found = ((txid, held) for txid, held in self._held.items() if held.meta.get("kind") == "branch")
        return {txid: (held.state, held.meta["of"]) for txid, held in found}

    def homes_left(self) -> set[str]:
        """Branches at other homes that decisions here wait for."""
        found = (held.homes for held in self._held.values() if held.state in _DECIDED)
        return {txid for homes in found for txid, is_complete in homes.items() if not is_complete}

    def heuristics(self, txid: str) -> list[tuple[str, str]]:
        """The heuristic decisions that were reported: kind and reason."""
        return self._held[txid].heuristics

    def values(self, topic: str) -> list[bytes | None]:
        """The messages of a topic that readers see, partition by partition."""
        return [m.value for place, found in sorted(self.log.items()) if place[0] == topic for m in found]

    def send(self, topic: str, value: bytes, key: bytes | None = None, **_: Any) -> Any:
        """A producer's send inside a block."""
        from txmq.client.transaction.current import current_transaction

        transaction = current_transaction()
        if transaction is None:
            raise BadRequestError("the fake sends in blocks only")
        partition, record = self.route(topic, value, key)
        return transaction.add(topic, partition, *record)

    def route(self, topic: str, value: bytes, key: bytes | None = None, *_: object) -> tuple[int, Record]:
        """To partition 0; with a key, to the one of its first byte modulo 2."""
        return key[0] % 2 if key else 0, (key, value, [], self.clock.now_ms())

    # --- helpers -----------------------------------------------------------------------------------------------------

    def _concerns(self, held: HeldTransaction, uuid: str | None, xid: str | None) -> bool:
        if uuid is None:
            return xid is None or held.meta.get("xid") == xid
        incomplete = {branch["uuid"] for branch in held.branches if not branch["complete"]}
        return uuid == held.meta["uuid"] or uuid in incomplete

    def _is_own(self, txid: str) -> bool:
        return TxId.parse(txid).home == self.home

    def _list_homes(self, held: HeldTransaction, fields: Extensions) -> None:
        if "homes" not in fields:
            return
        listed = fields["homes"].split(",")
        if any(self._is_own(txid) for txid in listed):
            raise BadRequestError("a branch of its own home")
        held.homes, held.meta["homes"] = dict.fromkeys(listed, False), listed

    def _require(self, held: HeldTransaction, state: str) -> None:
        if held.state != state:
            raise TransactionConflictError(f"it is {held.state}")

    def _add_all(self, held: HeldTransaction, fields: Extensions, body: bytes) -> None:
        expected = tuple(fields.get(name, 0) for name in ("parts", "bytes", "crc"))
        if expected != (held.streamed.parts, held.streamed.size_bytes, held.streamed.checksum):
            raise TransactionConflictError("streamed otherwise")
        for part in parse_parts(body[fields.get("offsets", 0) :]):
            self._add(held, part.topic, part.partition, part.batch, part.topic_id)

    def _add(self, held: HeldTransaction, topic: str, partition: int, batch: bytearray, topic_id: int) -> None:
        if topic not in self.topic_ids:
            raise UnknownTopicError(topic)
        if topic_id not in (0, self.topic_ids[topic]):
            raise StaleTopicError(f"topic {topic!r} has id {self.topic_ids[topic]} now, not {topic_id}")
        number, count = self._slots
        if partition % count != number:
            raise NotOwnerError(f"another home owns partition {partition} of {topic}")
        held.parts.append((topic, partition, batch))

    def _assign(self, topic: str, partition: int, batch: bytearray) -> bytes:
        base = self._assigned[topic, partition] = max(self._assigned[topic, partition], len(self.log[topic, partition]))
        count = len(decode(batch, topic, partition))
        self._assigned[topic, partition] += count
        return encode_result_line(topic, partition, base, count)

    def _append(self, topic: str, partition: int, batch: bytearray) -> bytes:
        place, base = self.log[topic, partition], len(self.log[topic, partition])
        place.extend(decode(batch, topic, partition))
        return encode_result_line(topic, partition, base, len(place) - base)
