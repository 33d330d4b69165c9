"""Rule R0 for one broker: what is looked at around every case of bad input.

R0: the broker lives and has logged no error; others waited for no more than 50 ms of its work meanwhile; memory and
descriptors are back where they were; a normal put and get work; nothing was written but what the case says.

*The delay of others.* A prober on a connection of its own pings, puts into a topic in memory, and gets, over and over:
all that an answer takes but the disk, whose sync is not the bad input's doing. What counts is the processor time that
the broker spent between a question and its answer, for that is what it did for somebody else first; how long it took
by the clock on the wall is the machine's doing, which may run other things, too. That is looked at only for a broker
that stands still without working. A case that seems to delay others is repeated: a prober that the machine lets wait
while the broker works sees too much once, a bad input is seen every time.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess

from .bad_inputs import batch, put
from .wire import Wire

DELAY_S_MAX = 0.05  # of the broker's processor time
# A prober that wakes late finds work before it that was done after its answer. That others have their turn
# between is counted, not timed, by test_behind_a_flood_others_wait_for_one_turn_of_it.
FLOOD_DELAY_S_MAX = 0.25
STANDSTILL_S_MAX = 10.0  # by the clock on the wall
TRIES_MAX = 8
RSS_GROWTH_BYTES_MAX = 5 << 20
RSS_GROWTH_OF_ALL_BYTES_MAX = 16 << 20  # some 80 cases leave messages, sessions and outcomes
DEADLINE_S = 60.0


def _target(descriptor: Path) -> str:
    try:
        return str(descriptor.readlink())
    except FileNotFoundError:
        return ""  # closed since it was listed


def flood(broker: BrokerProcess) -> None:
    """200,000 requests without reading an answer, as far as the broker takes them."""
    with Wire(broker) as wire:
        wire.socket.settimeout(0.5)
        left = memoryview(b"".join(b"version %x\r\n" % number for number in range(1, 20_001)) * 10)
        while left:
            try:
                left = left[wire.socket.send(left) :]
            except TimeoutError:
                if "State:\tS" in Path(f"/proc/{broker.pid}/status").read_text():
                    return  # it has stopped reading, as it should; else it is still to have its turn


class Watch:
    """Rule R0 for one broker."""

    def __init__(self, broker: BrokerProcess) -> None:
        self.broker = broker
        with Wire(broker) as wire:
            assert wire.ask(b"topic create t partitions=2 1\r\n")[0] == 200
            assert wire.ask(b"topic create prober storage=memory retention_size_bytes=65536 1\r\n")[0] == 200
            assert wire.ask(put(batch()))[0] == 200
            wire.ask(b"put t 0 16777216 1\r\n" + bytes(16777216))  # the largest there is, refused
            # Threads are begun when they are needed first, and each has an arena of memory of its own.
            assert wire.ask(b"topic create gone 1\r\n")[0] == 200
            assert wire.ask(b"put gone 0 %d 1\r\n%b" % (len(batch()), bytes(batch())))[0] == 200
            assert wire.ask(b"topic delete gone 1\r\n")[0] == 200
        flood(broker)  # what an allocator keeps of the largest buffers is part of the baseline; a leak grows beyond it
        self.descriptors = self._descriptors()
        self.first_rss_bytes = self.rss_bytes = 0
        self.rebase()

    def rebase(self) -> None:
        """Take the memory in use now for the baseline."""
        self.first_rss_bytes = self.rss_bytes = self.rss_bytes_now()

    def begin(self) -> int:
        """Before a case: what memory is compared with afterwards. Returns ``end``."""
        self.rss_bytes = self.rss_bytes_now()
        return self.end()

    def _process(self) -> Path:
        return Path(f"/proc/{self.broker.pid}")

    def _descriptors(self) -> int:
        """Of sockets: open segment files are a cache, and bounded."""
        return sum(_target(path).startswith("socket:") for path in (self._process() / "fd").iterdir())

    def rss_bytes_now(self) -> int:
        """Memory of the broker's process."""
        found = re.search(r"VmRSS:\s+(\d+) kB", (self._process() / "status").read_text())
        assert found is not None
        return int(found[1]) << 10

    def end(self) -> int:
        """Messages in partition 0."""
        with Wire(self.broker) as wire:
            code, body = wire.ask(b"offset t 0 latest 1\r\n")
            assert code == 200
            return int(body.split()[2])

    def check(self, written: int, end_before: int, growth_bytes_max: int = RSS_GROWTH_BYTES_MAX) -> None:
        """All of R0 but the delay."""
        assert self.broker.is_running, self.broker.logs()
        errors = [line for line in self.broker.logs().splitlines() if not line.startswith("{") or '"error"' in line]
        assert errors == []
        assert self.end() == end_before + written
        with Wire(self.broker) as wire:
            assert wire.ask(put(batch()))[0] == 200
            assert wire.ask(b"get t 0 %d 65536 2\r\n" % (end_before + written))[0] == 200
        eventually(lambda: self._descriptors() <= self.descriptors, "descriptors are given back")
        grown = self.rss_bytes_now() - self.rss_bytes
        assert grown <= growth_bytes_max, f"memory grew by {grown} bytes"
        grown = self.rss_bytes_now() - self.first_rss_bytes
        assert grown <= RSS_GROWTH_OF_ALL_BYTES_MAX, f"memory grew by {grown} bytes over all cases"

    def _worked_s(self) -> float:
        """The broker's processor time. Source: clock_getcpuclockid(3), which Python has not got."""
        assert self.broker.pid is not None
        return time.clock_gettime((~self.broker.pid << 3) | 2)

    def delay_of_others_s(self, work: Callable[[], None]) -> float:
        """Run ``work``; the most that the broker did meanwhile between somebody else's question and its answer.

        Infinite where it stood still.
        """
        longest, begun, done = 0.0, threading.Event(), threading.Event()

        def probe() -> None:
            def timed(request: bytes) -> bytes:
                nonlocal longest
                asked, before_s = time.monotonic(), self._worked_s()
                code, body = wire.ask(request)
                longest = max(longest, self._worked_s() - before_s)
                assert code == 200
                if time.monotonic() - asked > STANDSTILL_S_MAX:
                    longest = float("inf")
                return body

            with Wire(self.broker) as wire:
                while not done.is_set():
                    timed(b"ping 1\r\n")
                    begun.set()
                    offset = int(timed(b"put prober 0 raw 5 1\r\nprobe"))
                    timed(b"get prober 0 %d 4096 1\r\n" % offset)

        prober = threading.Thread(target=probe)
        prober.start()
        try:
            assert begun.wait(DEADLINE_S)
            work()
        finally:
            done.set()
            prober.join()
        return longest

    def under_rule(
        self, work: Callable[[], None], written: int = 0, growth_bytes_max: int = RSS_GROWTH_BYTES_MAX,
        delay_s_max: float = DELAY_S_MAX,
    ) -> None:  # fmt: skip
        """Run ``work`` and hold it to R0."""
        least_s = float("inf")
        for _ in range(TRIES_MAX):
            end = self.begin()
            least_s = min(least_s, self.delay_of_others_s(work))
            self.check(written, end, growth_bytes_max)
            if least_s <= delay_s_max:
                return
        pytest.fail(f"others waited behind {least_s * 1000:.0f} ms of the broker's work and more, {TRIES_MAX} times")
