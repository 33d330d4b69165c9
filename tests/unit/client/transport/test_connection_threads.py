"""Threads that share a link: no waiting thread is forgotten when another one stops reading."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import pytest

from txmq.client.transport.connection import HELD_BACK_MAX, Connection, Pending, Reply, Waiter
from txmq.errors import ConnectionLostError, TxmqError
from txmq.protocol.requests import ByteBudget, Limits, RequestReader, Violation
from txmq.runtime.clocks import OSClock
from txmq.runtime.net import SLEEP_S_MAX, TcpStream
from txmq.runtime.ports import Buffer

DEADLINE_S = 20.0


@pytest.fixture
def ends() -> Iterator[tuple[TcpStream, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield TcpStream(ours), theirs


def listed(link: Connection, count: int) -> list[Reply]:
    """Requests whose threads sleep."""
    replies = [link.request(link.clock.monotonic() + DEADLINE_S, "ping") for _ in range(count)]
    for reply in replies:
        link._followers[reply] = True
    return replies


@contextmanager
def somebody_reading(link: Connection) -> Iterator[None]:
    link._leader = "somebody"
    yield
    link._leader = None


def is_woken(reply: Reply) -> bool:
    return reply.signal.wait(0.0)


def answer(*replies: Reply) -> bytes:
    return b"".join(b"result 200 0 %b\r\n" % reply.opaque for reply in replies)


# --- waiting ---------------------------------------------------------------------------------------------------------


def test_followers_that_one_read_answered_wake_each_other_in_turn(ends: tuple[TcpStream, socket.socket]) -> None:
    stream, broker = ends
    link = Connection(stream, OSClock(), "broker")
    replies = listed(link, 3)
    broker.sendall(answer(*replies))
    link.take_arrived()
    assert [is_woken(reply) for reply in replies] == [True, False, False]
    link._pass_on()  # as the first does when it leaves
    assert [is_woken(reply) for reply in replies] == [False, True, False]


def test_a_follower_that_left_before_its_turn_is_passed_over(ends: tuple[TcpStream, socket.socket]) -> None:
    stream, broker = ends
    link = Connection(stream, OSClock(), "broker")
    first, second, third = listed(link, 3)
    broker.sendall(answer(first, second, third))
    link.take_arrived()
    assert is_woken(first)
    second.signal.set()  # as if its time were up
    link._follow(second, link.clock.monotonic())
    assert is_woken(third)


def test_the_last_in_turn_wakes_one_to_lead(ends: tuple[TcpStream, socket.socket]) -> None:
    stream, broker = ends
    link = Connection(stream, OSClock(), "broker")
    answered, other = listed(link, 2)
    broker.sendall(answer(answered))
    link.take_arrived()
    assert (is_woken(answered), is_woken(other)) == (True, False)
    link._pass_on()
    assert is_woken(other)


def test_nobody_is_woken_to_lead_while_another_reads(ends: tuple[TcpStream, socket.socket]) -> None:
    link = Connection(ends[0], OSClock(), "broker")
    (reply,) = listed(link, 1)
    with somebody_reading(link):
        link._pass_on()
    assert not is_woken(reply)


def test_finished_follower_that_is_called_to_lead_passes_it_on(
    ends: tuple[TcpStream, socket.socket],
) -> None:
    stream, broker = ends
    clock = OSClock()
    link = Connection(stream, clock, "broker")
    (first,) = listed(link, 1)
    second = link.request(clock.monotonic() + DEADLINE_S, "ping")
    link._leader = "somebody"
    woken: list[bytes] = []
    waiting = threading.Thread(target=lambda: woken.append(second.result()))
    waiting.start()
    wait_until_listed(link, second)
    link._leader = None
    first.answered(200, b"")
    link._follow(first, clock.monotonic())  # finds itself done, and another thread asleep that nobody reads for
    broker.sendall(answer(second))
    waiting.join(DEADLINE_S / 2)
    assert woken == [b""]


def test_thread_whose_wake_up_was_lost_looks_again_by_itself(
    ends: tuple[TcpStream, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, broker = ends
    monkeypatch.setattr("txmq.client.transport.connection.SLEEP_S_MAX", 0.01)
    link = Connection(stream, OSClock(), "broker")
    link._leader = "somebody"
    reply = link.request(link.clock.monotonic() + DEADLINE_S, "ping")
    answers: list[bytes] = []
    waiting = threading.Thread(target=lambda: answers.append(reply.result()))
    waiting.start()
    wait_until_listed(link, reply)
    # Taken from the list, and then the thread that was to wake it got a KeyboardInterrupt.
    del link._followers[reply]
    link._leader = None
    broker.sendall(answer(reply))
    waiting.join(DEADLINE_S / 2)
    assert answers == [b""]


class Sleepless:
    """A signal that must not be waited for."""

    def set(self) -> None:
        """Nobody sleeps."""

    def wait(self, timeout: float) -> bool:
        raise AssertionError("it went to sleep")


def test_waiter_done_before_entering_the_list_does_not_sleep(ends: tuple[TcpStream, socket.socket]) -> None:
    link = Connection(ends[0], OSClock(), "broker")

    class Answering(dict[Waiter, bool]):
        """The answer comes right before the waiter is listed: the leader did not find it there."""

        def __setitem__(self, waiter: Waiter, value: bool) -> None:
            waiter.done = True
            super().__setitem__(waiter, value)

    link._followers = Answering()
    waiter = Waiter()
    waiter.signal = Sleepless()  # type: ignore[assignment]
    with somebody_reading(link):
        link.wait(waiter, link.clock.monotonic() + DEADLINE_S)
    assert waiter.done


def test_waiter_without_a_request_wakes_when_the_link_fails(ends: tuple[TcpStream, socket.socket]) -> None:
    link = Connection(ends[0], OSClock(), "broker")
    waiter = Waiter()
    link._followers[waiter] = True
    with somebody_reading(link):
        link.fail(ConnectionLostError("cut"))
        assert waiter.signal.wait(0.0)
    link.stream.close()


def test_answer_that_comes_while_given_up_is_not_awaited(ends: tuple[TcpStream, socket.socket]) -> None:
    stream, broker = ends
    link = Connection(stream, OSClock(), "broker")
    early, late = (link.request(link.clock.monotonic() + DEADLINE_S, "ping") for _ in range(2))
    broker.sendall(answer(early))
    link.take_arrived()
    link.abandon(early.opaque)
    link.abandon(late.opaque)
    assert link._abandoned == {late.opaque}
    broker.sendall(answer(late))
    link.take_arrived()
    assert (link._abandoned, link._pending, link.failure) == (set(), {}, None)


def test_many_threads_get_every_answer(ends: tuple[TcpStream, socket.socket]) -> None:
    stream, broker = ends
    link = Connection(stream, OSClock(), "broker")
    threads, requests = 24, 200
    sent: list[int] = []

    def serve() -> None:
        reader = RequestReader(Limits(), ByteBudget(1 << 20))
        served = 0
        while served < threads * requests:
            opaques = [item[4] for item in reader.feed(broker.recv(1 << 16)) if not isinstance(item, Violation)]
            sent.append(len(opaques))
            served += len(opaques)
            # The odd ones late: the threads are not answered in the order of their requests.
            opaques.sort(key=lambda opaque: opaque[-1] % 2)
            broker.sendall(b"".join(b"result 200 4 %b\r\npong" % opaque for opaque in opaques))

    failures: list[BaseException] = []

    def ask() -> None:
        try:
            for _ in range(requests):
                assert link.request(link.clock.monotonic() + DEADLINE_S, "ping").result() == b"pong"
        except BaseException as error:  # noqa: BLE001  told below
            failures.append(error)

    serving = threading.Thread(target=serve)
    asking = [threading.Thread(target=ask) for _ in range(threads)]
    for thread in (serving, *asking):
        thread.start()
    for thread in (serving, *asking):
        thread.join(2 * DEADLINE_S)
    assert failures == []
    assert (sum(sent), link._pending, link._followers) == (threads * requests, {}, {})


def wait_until_listed(link: Connection, waiter: Waiter) -> None:
    deadline = OSClock().monotonic() + DEADLINE_S
    while waiter not in link._followers:
        assert OSClock().monotonic() < deadline


# --- sending ---------------------------------------------------------------------------------------------------------


class Recording:
    """A stream that takes everything; during a write, other threads send."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.meanwhile: list[Callable[[], object]] = []
        self.is_over = False

    def send(self, buffers: Sequence[Buffer]) -> int:
        whole = b"".join(buffers)
        self.writes.append(whole)
        while self.meanwhile:
            other = threading.Thread(target=self.meanwhile.pop(0))
            other.start()
            other.join()
        return len(whole)

    def shut_down(self) -> None:
        self.is_over = True

    def close(self) -> None:
        assert self.is_over


def test_requests_during_a_write_go_out_together_without_lock_waits() -> None:
    stream = Recording()
    link = Connection(stream, OSClock(), "broker")  # type: ignore[arg-type]
    batch = bytearray(b"x" * 10)
    replies: list[Reply] = []
    stream.meanwhile = [
        lambda: replies.append(link.request(DEADLINE_S, "ping")),
        lambda: link.put(link.request(DEADLINE_S, "version"), b"t", 0, batch),
        lambda: replies.append(link.transaction(DEADLINE_S, "commit 1-1-1-1", {"floor": 3}, (b"part", batch))),
    ]
    link.request(DEADLINE_S, "ping")
    assert stream.writes == [
        b"ping 1\r\n",
        b"ping 2\r\nversion 3\r\nput t 0 10 4\r\nxxxxxxxxxxcommit 1-1-1-1 floor=3 14 5\r\npartxxxxxxxxxx",
    ]
    assert [reply.done for reply in replies] == [False, False]


def test_requests_during_wake_ups_are_written_by_the_last_waker() -> None:
    stream = Recording()
    link = Connection(stream, OSClock(), "broker")  # type: ignore[arg-type]
    first, second = listed(link, 2)
    del stream.writes[:]
    for reply in (first, second):
        reply.answered(200, b"")
    link._pass_on()
    assert is_woken(first)
    link.request(DEADLINE_S, "version")
    assert stream.writes == []
    link._pass_on()
    assert is_woken(second)
    assert stream.writes == [b"version 3\r\n"]
    link.request(DEADLINE_S, "version")
    assert len(stream.writes) == 2


def test_held_back_requests_are_limited() -> None:
    stream = Recording()
    link = Connection(stream, OSClock(), "broker")  # type: ignore[arg-type]
    (follower,) = listed(link, 1)
    follower.answered(200, b"")
    del stream.writes[:]
    for _ in range(HELD_BACK_MAX):
        assert stream.writes == []
        link.request(DEADLINE_S, "ping")
    assert stream.writes[0].count(b"ping") == HELD_BACK_MAX


def test_requests_of_a_loops_turn_leave_by_a_few() -> None:
    stream, asked = Recording(), list[bool]()
    link = Connection(stream, OSClock(), "broker")  # type: ignore[arg-type]
    link.appoint(stream, lambda: asked.append(True))
    for _ in range(HELD_BACK_MAX):
        assert stream.writes == []
        link.request(DEADLINE_S, "ping")
    assert asked == [True]
    link.request(DEADLINE_S, "ping")
    assert [written.count(b"ping") for written in stream.writes] == [HELD_BACK_MAX]
    link.write()
    assert [written.count(b"ping") for written in stream.writes] == [HELD_BACK_MAX, 1]


def test_requests_held_back_for_followers_that_left_are_written() -> None:
    stream = Recording()
    link = Connection(stream, OSClock(), "broker")  # type: ignore[arg-type]
    (follower,) = listed(link, 1)
    follower.answered(200, b"")
    del stream.writes[:]
    link.request(DEADLINE_S, "version")
    with somebody_reading(link):
        link._follow(follower, link.clock.monotonic())
    assert stream.writes == [b"version 2\r\n"]


def test_who_reads_writes_first_what_was_held_back() -> None:
    class Watching(Recording):
        """Looks, when it is read, at what has been written."""

        def receive(self, timeout: float) -> None:
            assert self.writes == [b"ping 1\r\n"]
            self.is_over = True

    stream = Watching()
    link = Connection(stream, OSClock(), "broker")  # type: ignore[arg-type]
    link._woken.append(Waiter())
    link.request(DEADLINE_S, "ping")
    assert stream.writes == []
    link.take_arrived()
    assert stream.is_over


def test_request_arriving_as_the_writer_leaves_is_written() -> None:
    stream = Recording()
    link = Connection(stream, OSClock(), "broker")  # type: ignore[arg-type]
    late = [lambda: link.request(DEADLINE_S, "version")]

    class Leaving:
        """The sending lock; another thread's request comes right before it is released, and finds it taken."""

        def __init__(self) -> None:
            self._lock = threading.Lock()

        def locked(self) -> bool:
            return self._lock.locked()

        def __enter__(self) -> None:
            self._lock.acquire()

        def __exit__(self, *_: object) -> None:
            while late:
                late.pop()()
            self._lock.release()

    link._sending = Leaving()  # type: ignore[assignment]
    link.request(DEADLINE_S, "ping")
    assert stream.writes == [b"ping 1\r\n", b"version 2\r\n"]


def test_large_body_is_not_copied_and_its_rest_follows() -> None:
    class Short(Recording):
        def send(self, buffers: Sequence[Buffer]) -> int:
            taken = b"".join(buffers)[:70_000]
            self.writes.append(taken)
            return len(taken) if len(self.writes) != 2 else 0

    stream = Short()
    link = Connection(stream, OSClock(), "broker")  # type: ignore[arg-type]
    batch = bytearray(range(256)) * 400
    reply = link.transaction(0.0, "commit 1-1-1-1", {}, (b"part", memoryview(batch)))
    assert link.has_unsent
    for _ in range(2):
        link.write()
    del stream.writes[1]
    assert b"".join(stream.writes) == b"commit 1-1-1-1 %d 1\r\npart" % (4 + len(batch)) + batch
    assert (link.has_unsent, reply.done) == (False, False)


def test_an_interrupted_write_ends_the_conversation() -> None:
    class Interrupted(Recording):
        def send(self, buffers: Sequence[Buffer]) -> int:
            raise KeyboardInterrupt

    stream = Interrupted()
    link = Connection(stream, OSClock(), "broker")  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        link.request(DEADLINE_S, "ping")
    assert stream.is_over, "how much of the request is out is not known: nothing may follow it"
    link.request(DEADLINE_S, "ping")
    assert stream.writes == []


@pytest.mark.parametrize("told_by_fail", [False, True])
def test_request_that_meets_links_end_is_told_exactly_once(told_by_fail: bool) -> None:
    link = Connection(Recording(), OSClock(), "broker")  # type: ignore[arg-type]
    told: list[TxmqError] = []

    class Meeting(dict[bytes, tuple[Pending, float, int]]):
        """The link fails right when the request is put into the list: before, or after."""

        def __setitem__(self, opaque: bytes, asked: tuple[Pending, float, int]) -> None:
            if told_by_fail:
                super().__setitem__(opaque, asked)
            link.fail(ConnectionLostError("cut"))
            if not told_by_fail:
                super().__setitem__(opaque, asked)

    class Told:
        def answered(self, code: int, body: bytes) -> None:
            raise AssertionError

        def lost(self, error: TxmqError) -> None:
            told.append(error)

    link._pending = Meeting()
    with nullcontext() if told_by_fail else pytest.raises(ConnectionLostError, match="cut"):
        link.put(Told(), b"t", 0, bytearray(1))
    assert len(told) == told_by_fail
    assert link._pending == {}


# --- the stream ------------------------------------------------------------------------------------------------------


def test_receive_waits_as_long_as_it_is_told(ends: tuple[TcpStream, socket.socket]) -> None:
    stream, client = ends
    clock = OSClock()
    assert stream.receive() is None
    for timeout in (0.02, SLEEP_S_MAX):
        started = clock.monotonic()
        assert stream.receive(timeout) is None
        assert timeout * 0.9 < clock.monotonic() - started < DEADLINE_S
    client.sendall(b"xy")
    assert bytes(stream.receive(DEADLINE_S) or b"") == b"xy"
    client.shutdown(socket.SHUT_WR)
    end = stream.receive(DEADLINE_S)
    assert end is not None
    assert bytes(end) == b""


def test_shutting_down_wakes_a_thread_that_receives(ends: tuple[TcpStream, socket.socket]) -> None:
    stream, _ = ends
    received: list[object] = []

    def read() -> None:
        while not received:
            data = stream.receive(DEADLINE_S)
            if data is not None:
                received.append(bytes(data))

    reading = threading.Thread(target=read)
    reading.start()
    stream.shut_down()
    reading.join(DEADLINE_S / 2)
    assert received == [b""]


def test_many_threads_may_ask_for_quiet_while_one_waits(ends: tuple[TcpStream, socket.socket]) -> None:
    stream, client = ends
    waiting = threading.Thread(target=lambda: stream.wait(DEADLINE_S, writable=False))
    waiting.start()
    failures: list[BaseException] = []

    def look() -> None:
        try:
            for _ in range(2000):
                assert stream.is_quiet()
        except BaseException as error:  # noqa: BLE001  told below
            failures.append(error)

    looking = [threading.Thread(target=look) for _ in range(4)]
    for thread in looking:
        thread.start()
    for thread in looking:
        thread.join(DEADLINE_S)
    client.sendall(b"x")
    waiting.join(DEADLINE_S)
    assert failures == []
    assert not stream.is_quiet()
