"""Strands on a loop whose tasks begin at once (``asyncio.eager_task_factory``)."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Awaitable, Callable, Generator
from typing import Any

from txmq.runtime.strands import Host, required
from txmq.runtime.threads import start_daemon, start_threads

LONG_S = 60.0


def _on_loop(scenario: Callable[[Host], Awaitable[None]]) -> None:
    async def main() -> None:
        asyncio.get_running_loop().set_task_factory(getattr(asyncio, "eager_task_factory", _eager_task_factory))
        host = Host()
        await scenario(host)
        await host.close()

    asyncio.run(main())


@types.coroutine
def _continued(work: Any, awaited: Any) -> Generator[Any, Any, Any]:
    while True:
        try:
            found = yield awaited
            awaited = work.send(found)
        except StopIteration as end:
            return end.value


def _eager_task_factory(loop: asyncio.AbstractEventLoop, work: Any, **named: Any) -> asyncio.Task[Any]:
    """As that of Python 3.12, near enough: the first step of a task runs where it is made."""
    rest: Awaitable[Any]
    try:
        rest = _continued(work, work.send(None))
    except StopIteration as end:
        rest = asyncio.sleep(0, end.value)

    async def whole() -> Any:
        return await rest

    return asyncio.Task(whole(), loop=loop, **named)


def test_strand_comes_back_to_who_goes_on_with_it() -> None:
    """Found: with ``asyncio.eager_task_factory`` a strand that another one's task had begun came back into that one."""

    async def scenario(host: Host) -> None:
        done: list[str] = []

        def nap(name: str) -> None:
            for _ in range(3):
                required().wait_for(asyncio.sleep(0))
            done.append(name)

        async def ask(name: str) -> None:
            await host.run(lambda: nap(name))

        def work() -> list[str]:
            asked = host.loop.create_task(ask("begun in a strand"))
            start_daemon("daemon", lambda: nap("daemon"))
            start_threads("together", 2, lambda: nap("together"))
            required().wait_for(asked)
            return sorted(set(done))

        found = await asyncio.gather(*(host.loop.create_task(host.run(work)) for _ in range(3)))
        assert found[-1] == ["begun in a strand", "daemon", "together"]

    _on_loop(scenario)


def test_daemon_begins_behind_what_starts_it() -> None:
    async def scenario(host: Host) -> None:
        order: list[str] = []
        ended = asyncio.Event()

        def daemon() -> None:
            order.append("daemon")
            ended.set()

        def work() -> None:
            start_daemon("daemon", daemon)
            order.append("starter")  # which may hold a lock that the daemon takes

        await host.run(work)
        async with asyncio.timeout(LONG_S):
            await ended.wait()
        assert order == ["starter", "daemon"]

    _on_loop(scenario)
