"""Rule R0 of reference/bad-inputs.md for one broker: what is looked at around every case.

R0: the broker lives and has logged no error; others were answered within 50 ms meanwhile; memory and descriptors are
back where they were; a normal put and get work; nothing was written but what the case says.

*The delay of others.* A prober on a connection of its own pings, puts into a topic in memory, and gets, over and over:
all that an answer takes but the disk, whose sync is not the bad input's doing. A case that seems to delay it is
repeated, because a busy machine delays once, a bad input every time; and what the machine delays while nothing is sent
does not count.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from txmq.testing.broker_process import BrokerProcess

from .bad_inputs import batch, put
from .wire import Wire

DELAY_S_MAX = 0.05
TRIES_MAX = 8
RSS_GROWTH_BYTES_MAX = 5 << 20
RSS_GROWTH_OF_ALL_BYTES_MAX = 16 << 20  # some 80 cases leave messages, sessions and outcomes behind
DEADLINE_S = 60.0


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition with a deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, what
        threading.Event().wait(0.005)


def _target(descriptor: Path) -> str:
    try:
        return str(descriptor.readlink())
    except FileNotFoundError:
        return ""  # closed since it was listed


def flood(broker: BrokerProcess) -> None:
    """200,000 requests without reading an answer, as far as the broker takes them."""
    with Wire(broker) as wire:
        wire.socket.settimeout(0.5)
        requests = b"".join(b"version %x\r\n" % number for number in range(1, 20_001))
        with suppress(TimeoutError):  # it has stopped reading, as it should
            for _ in range(10):
                wire.socket.sendall(requests)


class Watch:
    """Rule R0 for one broker."""

    def __init__(self, broker: BrokerProcess) -> None:
        self.broker = broker
        with Wire(broker) as wire:
            assert wire.ask(b"topic create t partitions=2 1\r\n")[0] == 200
            assert wire.ask(b"topic create prober storage=memory retention_size_bytes=65536 1\r\n")[0] == 200
            assert wire.ask(put(batch()))[0] == 200
            wire.ask(b"put t 0 16777216 1\r\n" + bytes(16777216))  # the largest there is, refused
        flood(broker)  # what an allocator keeps of the largest buffers is part of the baseline; a leak grows beyond it
        self.descriptors = self._descriptors()
        self.first_rss_bytes = self.rss_bytes = 0
        self.rebase()

    def rebase(self) -> None:
        """Take the memory in use now for the baseline."""
        self.first_rss_bytes = self.rss_bytes = self._rss_bytes()

    def begin(self) -> int:
        """Before a case: what memory is compared with afterwards. Returns ``end``."""
        self.rss_bytes = self._rss_bytes()
        return self.end()

    def _process(self) -> Path:
        return Path(f"/proc/{self.broker.pid}")

    def _descriptors(self) -> int:
        """Of sockets: open segment files are a cache, and bounded."""
        return sum(_target(path).startswith("socket:") for path in (self._process() / "fd").iterdir())

    def _rss_bytes(self) -> int:
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
        eventually(lambda: self._descriptors() <= self.descriptors, "descriptors are not given back")
        grown = self._rss_bytes() - self.rss_bytes
        assert grown <= growth_bytes_max, f"memory grew by {grown} bytes"
        grown = self._rss_bytes() - self.first_rss_bytes
        assert grown <= RSS_GROWTH_OF_ALL_BYTES_MAX, f"memory grew by {grown} bytes over all cases"

    def delay_of_others_s(self, work: Callable[[], None]) -> float:
        """Run ``work``; the longest time somebody else waited for an answer meanwhile."""
        longest, done = 0.0, threading.Event()

        def probe() -> None:
            def timed(request: bytes) -> bytes:
                nonlocal longest
                asked = time.perf_counter()
                code, body = wire.ask(request)
                longest = max(longest, time.perf_counter() - asked)
                assert code == 200
                return body

            with Wire(self.broker) as wire:
                while not done.is_set():
                    timed(b"ping 1\r\n")
                    offset = timed(b"put prober 0 raw 5 1\r\nprobe")
                    timed(b"get prober 0 %b 4096 1\r\n" % offset)

        prober = threading.Thread(target=probe)
        prober.start()
        try:
            work()
        finally:
            done.set()
            prober.join()
        return longest

    def _delay_without_it_s(self, seconds: float) -> float:
        def nothing() -> None:
            threading.Event().wait(seconds)

        return self.delay_of_others_s(nothing)

    def under_rule(
        self, work: Callable[[], None], written: int = 0, growth_bytes_max: int = RSS_GROWTH_BYTES_MAX
    ) -> None:
        """Run ``work`` and hold it to R0."""
        excess_s = float("inf")  # beyond what the machine itself delays somebody while nothing bad is sent
        for _ in range(TRIES_MAX):
            end, began = self.begin(), time.monotonic()
            delay_s = self.delay_of_others_s(work)
            took_s = time.monotonic() - began
            self.check(written, end, growth_bytes_max)
            if delay_s > DELAY_S_MAX:
                delay_s -= self._delay_without_it_s(took_s)
            excess_s = min(excess_s, delay_s)
            if excess_s <= DELAY_S_MAX:
                return
        pytest.fail(f"others waited {excess_s * 1000:.0f} ms longer than without it, {TRIES_MAX} times")
