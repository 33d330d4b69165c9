"""One accepted connection: bytes to requests, answers to bytes, and its deadlines.

All connections of a loop share one receive buffer; a connection keeps only its unfinished request (``RequestReader``).
The transport of an encrypted one is its ``tls_transport``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, cast

from txmq.addresses import join_address
from txmq.broker.client_connection import ClientConnection
from txmq.broker.core import REQUESTS_A_TURN
from txmq.broker.shell.answer_budget import OWN_BYTES
from txmq.broker.verbs.access.authorizer import permissions_of
from txmq.broker.verbs.transaction_checks import is_new
from txmq.protocol import answers
from txmq.protocol.requests import Limits, Request, RequestReader, Violation
from txmq.runtime.logging import get_logger
from txmq.runtime.net import keep_alive

if TYPE_CHECKING:
    from txmq.broker.context import Read
    from txmq.broker.shell.server import Server

log = get_logger()
RECEIVE_SIZE_BYTES = 64 << 10
FULL_READ_BYTES = RECEIVE_SIZE_BYTES // 2  # of so many there are probably more; encrypted, they filled the buffer
_buffer = memoryview(bytearray(RECEIVE_SIZE_BYTES))
WRITE_HIGH_BYTES = 1 << 20
STRANGER_BYTES_MAX = 4 << 10  # of a connection that has not logged in, where there are users
RECEIVE_RATE_BYTES_MIN = 64 << 10  # per second: the least rate of a long body, over handshake_timeout_ms


class Connection(asyncio.BufferedProtocol):
    """See the module's docstring."""

    __slots__ = (
        "_deadline_ms", "_delayed_bytes", "_given_bytes", "_greeted", "_host", "_is_delayed", "_is_full", "_paid",
        "_parked", "_queued", "_reader", "_reserved_bytes", "_since_ms", "_stalled_ms", "_stranger_bytes", "_taken",
        "_transport", "_waits", "client",
    )  # fmt: skip

    def __init__(self, host: Server) -> None:
        self._host = host
        self._transport: asyncio.Transport
        limits = Limits(host.settings.request_size_bytes_max, host.settings.batch_size_bytes_max)
        self._reader = RequestReader(limits, host.budget)
        self._greeted = False
        # By the ``LivenessClock``, and 0 if there is none: the end of the unfinished request's time, or of the
        # first one's; when answers stopped being taken.
        self._deadline_ms = self._stalled_ms = 0.0
        self._taken = 0  # requests, since it last let others have their turn
        self._queued: list[Request | Violation] = []  # read, and not taken in yet; meanwhile nothing more is read
        self._is_full = False  # too many of its requests are unanswered
        self._waits = False  # for room in the budget of answers
        self._paid = 0  # of the queued requests, those that were admitted by quotas
        self._is_delayed, self._delayed_bytes = False, 0  # by a quota, and the bodies that wait meanwhile
        self._parked: deque[Read] = deque()  # reads that wait until it may be given an answer
        self._given_bytes = 0  # answers handed to the transport, all its life
        self._reserved_bytes = 0  # for answers that reader threads are making
        self._stranger_bytes, self._since_ms = 0, host.context.liveness.now_ms
        self.client: ClientConnection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept, or refuse if there are too many."""
        host = self._host
        self._transport = transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it
        transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)
        keep_alive(transport.get_extra_info("socket"), host.settings.write_timeout_ms / 1000)
        self.client = host.core.connected(_address(transport.get_extra_info("peername")))
        self.client.shell = self
        host.connections.add(self)
        self._deadline_ms = self._latest_ms()
        refusal = host.admission.enter(self.client.address, host.clock.monotonic())
        if host.context.stopping:
            refusal = "the broker is stopping"
        if refusal is not None:
            self.tell("connection refused", refusal)
            self.client.closing = True
            transport.write(answers.result(503, b"-", b"unavailable " + refusal.encode()))
            transport.close()

    def now_on(self, transport: asyncio.Transport) -> None:
        """Go on with another transport, before anything came or went."""
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        """The loop's one receive buffer."""
        return _buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Take in what one read brought."""
        if self._is_stranger():
            self._stranger_bytes += nbytes
            if self._stranger_bytes > STRANGER_BYTES_MAX:
                self.tell("connection closed: too much before it has logged in", f"{STRANGER_BYTES_MAX} bytes")
                self._transport.abort()
                return
        requests = self._reader.feed(_buffer[:nbytes])
        if requests:
            if isinstance(requests[-1], Violation) and requests[-1].closes:
                self.tell("connection closed: outside the protocol", requests[-1].text)
            if self._queued:
                self._queued += requests
            elif not self._take_in(requests):
                return
            elif nbytes >= FULL_READ_BYTES:
                self._taken += len(requests)
                if self._taken >= REQUESTS_A_TURN:
                    self._taken = 0
                    self.hold()  # libuv would read 2 MiB in a row, 0.4 s for the other connections
                    asyncio.get_running_loop().call_soon(self.release)
            self._greeted = True
        if self._reader.is_idle:
            if self._greeted:
                self._deadline_ms = 0.0
        elif requests or not self._deadline_ms:
            self._deadline_ms = self._latest_ms()
        elif self._greeted:
            # A fast beginning earns no time for later: 16 bodies that stop short would hold the budget for 4 minutes.
            earned_ms = nbytes * 1000 / RECEIVE_RATE_BYTES_MIN
            self._deadline_ms = min(self._deadline_ms + earned_ms, self._latest_ms())

    def awaits(self, is_within_record: bool) -> None:
        """After each encrypted read: whether it began a record, whose end is then due as that of a request is."""
        if is_within_record:
            self._deadline_ms = self._deadline_ms or self._latest_ms()
        elif self._greeted and self._reader.is_idle:
            self._deadline_ms = 0.0

    def _is_stranger(self) -> bool:
        """Whether there are users, and it is none of them, nor another home's broker."""
        principals, user = self._host.context.state.principals, self.client.user
        return bool(principals.users) and user not in principals.users and principals.speaker(user) is None

    def _latest_ms(self) -> float:
        """The end of a time that begins now."""
        return self._host.context.liveness.now_ms + self._host.settings.handshake_timeout_ms

    def _take_in(self, requests: list[Request | Violation]) -> bool:
        """Up to one whose answer may be long, or REQUESTS_A_TURN; the others' turn comes first then.

        One whose answer may be long waits until there is room for it, and one that is over a quota until it may go on.
        False where the broker failed.
        """
        host, admitted = self._host, requests
        host.context.now_ms = host.clock.now_ms()
        if host.throttle.is_on:
            admitted = self._admitted(requests)
        may_be_long = not self._parked and (not host.answers.used or host.answers.admits(self))
        try:
            taken = host.core.receive_some(self.client, admitted, 0, may_be_long=may_be_long)
        except Exception as error:  # noqa: BLE001  a defect: assigned state may be half moved, only the journal is true
            host.fail(error)
            return False
        host.received()
        if admitted is not requests:
            self._paid = len(admitted) - taken
        if taken < len(requests):
            self._queued = requests[taken:]
            self.hold()
            if self.client.waiting is not None:
                self._note_held()  # ``resumed`` goes on
            elif taken == len(admitted):
                self._delay()
            elif taken:
                asyncio.get_running_loop().call_soon(self._go_on)
            else:
                self._wait()
        elif len(self.client.unanswered) > host.settings.pipeline_requests_max:
            self._is_full = True
            self._note_held()
            self._transport.pause_reading()
        return True

    def _admitted(self, requests: list[Request | Violation]) -> list[Request | Violation]:
        """The first ones, as far as quotas let them through: a new list, whose length is noted afterwards."""
        host = self._host
        now_s = host.clock.monotonic()
        known = permissions_of(host.context, self.client)
        return requests[: host.throttle.admitted(self, known, requests, self._paid, now_s)]

    def _delay(self) -> None:
        """A quota says so. What waits counts as a body that has not come whole."""
        self._is_delayed = True
        self._note_held()
        self._free_delayed()
        self._delayed_bytes = sum(len(item[3] or b"") for item in self._queued if not isinstance(item, Violation))
        self._host.budget.used += self._delayed_bytes

    def _free_delayed(self) -> None:
        self._host.budget.release(self._delayed_bytes)
        self._delayed_bytes = 0

    @property
    def is_gone(self) -> bool:
        """See ``throttle.Waiter``."""
        return self.client.gone

    def begins(self, txid: bytes) -> bool:
        """Whether nothing is known of that transaction yet."""
        return is_new(self._host.context, txid)

    def may_go_on(self) -> None:
        """See ``throttle.Waiter``."""
        self._is_delayed = False
        self._free_delayed()
        self._note_held()
        self._go_on()
        self.release()

    def _wait(self) -> None:
        """There is no room for its next answer."""
        self._waits = True
        self._host.answers.wait(self)
        self._note_held()

    def _note_held(self) -> None:
        """The broker does not read it, or does so again."""
        is_held = self._is_full or self._waits or self._is_delayed or self.client.waiting is not None
        if self.client.held and not is_held:
            self._host.core.read_again(self.client)
        self.client.held = is_held

    def _go_on(self) -> None:
        """Take in more of what was read, unless answers are not taken: then ``resume_writing`` comes back here."""
        requests = self._queued
        if not requests or self._stalled_ms:
            return
        self._queued = []
        if not self.client.closing and self._take_in(requests) and not self._queued:
            self.release()

    def eof_received(self) -> bool:
        """The client sends no more; its requests are still answered.

        One that was killed is gone from now on, not from its last answer: that may wait for what others settle.
        """
        self.client.closing = True
        self._host.context.now_ms = self._host.clock.now_ms()
        self._host.core.sends_no_more(self.client)
        self.send()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        host = self._host
        host.connections.discard(self)
        host.admission.leave(self.client.address)
        host.answers.forget(self)
        self._parked.clear()
        host.context.now_ms = (
            host.clock.now_ms()
        )  # its owner is gone from now on, however long this process was stopped
        self._queued = []
        self._reader.close()
        self._free_delayed()
        host.core.disconnected(self.client)
        self.client.shell = None  # a cycle with this: nothing would free it (``runtime.garbage``)
        host.received()

    # --- called by the server ----------------------------------------------------------------------------------------

    def send(self) -> None:
        """Write what the core answered; close when it said so and nothing more is owed."""
        client = self.client
        out = client.out
        if out:
            client.out = []
            if not self._transport.is_closing():
                data = answers.encode(out[0][0], out[0][1]) if len(out) == 1 else answers.encode_all(out)
                self._given_bytes += len(data)
                self._transport.write(data)
                if len(data) > OWN_BYTES or (self._host.answers.used and self._host.answers.is_holding(self)):
                    self.look()
        if self._is_full and len(client.unanswered) <= self._host.settings.pipeline_requests_max // 2:
            self._is_full = False
            self._note_held()
            self.release()
        if self._parked:
            self._unpark()
        if client.closing and not client.unanswered and not self._transport.is_closing():
            self._transport.close()

    def resumed(self) -> None:
        """The request that waited (for the registry, or as a failed login) waits no more."""
        self._note_held()
        self._go_on()
        self.release()

    def hold(self) -> None:
        """Read no more for now."""
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def release(self) -> None:
        """Read again, unless answers are not taken, too many are owed, or the broker takes in nothing."""
        if self._is_full or self._queued or self._stalled_ms or self._host.paused or self._transport.is_closing():
            return
        self._transport.resume_reading()

    def pause_writing(self) -> None:
        """Answers are not taken: take in nothing more, and give up after ``write_timeout_ms``."""
        self._stalled_ms = self._host.context.liveness.now_ms
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        """Answers are taken again."""
        self._stalled_ms = 0.0
        self.look()
        self._unpark()
        self._go_on()
        self.release()
        self._host.received()  # others may wait for the room that it had

    # --- room for answers --------------------------------------------------------------------------------------------

    @property
    def user(self) -> str:
        """Whose it is now; empty: nobody's."""
        return self.client.user

    def look(self) -> None:
        """Say with ``AnswerBudget.holds`` what it holds now."""
        unsent = self._transport.get_write_buffer_size()
        now_ms = self._host.context.liveness.now_ms
        self._host.answers.holds(self, unsent + self._reserved_bytes, self._given_bytes - unsent, now_ms)

    def reserve(self, size_bytes: int) -> None:
        """A reader thread makes an answer of that size, or (below 0) has made it."""
        self._reserved_bytes += size_bytes
        if not self.client.gone:
            self.look()

    def may_read(self, read: Read) -> bool:
        """Whether the answer may be made now; else it is asked for again when it may."""
        if not self._stalled_ms and self._host.answers.admits(self):
            return True
        self._parked.append(read)
        if not self._stalled_ms:
            self._wait()
        return False

    def has_room(self) -> None:
        """It waited for room, and may go on."""
        self._waits = False
        self._note_held()
        self._unpark()
        self._go_on()
        self.release()

    def _unpark(self) -> None:
        """Have the first read that waits carried out."""
        if self._parked and not self._stalled_ms and not self._waits:
            self._host.context.reads.append(self._parked.popleft())
            self._host.received()

    def cut_off(self) -> None:
        """It takes nothing, and others wait for the room that it holds."""
        self._drop("connection dropped: answers are not taken, and others wait for the memory")

    def _drop(self, event: str) -> None:
        client = self.client
        log.warning(event, connection=client.number, address=client.address, client=client.name)
        self._transport.abort()

    def check_deadlines(self) -> bool:
        """Close what sends its request too slowly, or does not take its answers; whether it was closed now.

        Called every few milliseconds.
        """
        settings, now_ms = self._host.settings, self._host.context.liveness.now_ms
        if self._stalled_ms and now_ms - self._stalled_ms > settings.write_timeout_ms:
            self._drop("connection dropped: answers are not taken")
            return True
        if now_ms - self._since_ms > settings.login_timeout_ms and self._is_stranger():
            self.tell("connection closed: it has not logged in", "login_timeout_ms")
            self._transport.abort()
            return True
        if not self._deadline_ms:
            return False
        if self.client.held or self._queued or self._stalled_ms:  # not read meanwhile
            self._deadline_ms = max(self._deadline_ms, self._latest_ms())
        elif now_ms > self._deadline_ms:
            self.tell("connection closed: request not complete in time", "handshake_timeout_ms")
            self._transport.abort()
            return True
        return False

    def tell(self, event: str, reason: str) -> None:
        """Have the log say why it is closed."""
        client = self.client
        log.debug(event, reason=reason, connection=client.number, address=client.address, client=client.name)

    def finish(self) -> None:
        """The broker stops cleanly: what is written goes out, then it closes."""
        self.send()
        self._transport.close()

    def cut(self) -> None:
        """Close without waiting for what was not taken."""
        self._transport.abort()

    def abandon(self) -> None:
        """The broker failed: everything unanswered is unknown."""
        for opaque in self.client.unanswered:
            self._transport.write(answers.result(503, opaque, b"unavailable the broker failed; the outcome is unknown"))
        self._transport.close()


def _address(peername: object) -> str:
    """As people write it; empty of a connection that was gone before it was looked at."""
    return join_address(str(peername[0]), int(peername[1])) if isinstance(peername, tuple) else ""
