"""SIGTERM on an event loop: which listeners hear it, and which handler is set afterwards."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from txmq.runtime.strands import until_terminated

LONG_S = 60.0


@pytest.fixture
def former() -> Iterator[list[int]]:
    """What the handler that was there before has heard."""
    heard: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        heard.append(number)

    kept = signal.signal(signal.SIGTERM, note)
    yield heard
    assert signal.getsignal(signal.SIGTERM) is note
    signal.signal(signal.SIGTERM, kept)


def test_all_that_listen_and_the_former_handler_hear(former: list[int]) -> None:
    async def main() -> None:
        loop, stops = asyncio.get_running_loop(), [asyncio.Event() for _ in range(2)]
        first = until_terminated(loop, stops[0].set)
        with until_terminated(loop, stops[1].set):
            first.__enter__()
            os.kill(os.getpid(), signal.SIGTERM)
            async with asyncio.timeout(LONG_S):
                await asyncio.gather(*(stop.wait() for stop in stops))
            stops[1].clear()
        os.kill(os.getpid(), signal.SIGTERM)  # the first one still listens
        await asyncio.sleep(0)
        assert not stops[1].is_set()
        first.__exit__(None, None, None)

    asyncio.run(main())
    assert former == [signal.SIGTERM] * 2


def test_loop_that_has_ended_is_left_alone(former: list[int]) -> None:
    loop = asyncio.new_event_loop()
    with until_terminated(loop, lambda: None):
        loop.close()
        os.kill(os.getpid(), signal.SIGTERM)
    assert former == [signal.SIGTERM]


def test_another_thread_leaves_signals_alone(former: list[int]) -> None:
    found: list[object] = []

    async def main() -> None:
        with until_terminated(asyncio.get_running_loop(), lambda: None):
            found.append(signal.getsignal(signal.SIGTERM))

    def work() -> None:
        asyncio.run(main())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGTERM)]
    assert former == []
