"""``txmq.aio``, called as ``txmq`` is: so that one test states a promise of both.

Theory of operation. A loop runs in a thread. Each thread that calls has a task there, which makes its calls one after
another: a block that was entered is that of its caller, as in a thread. A ``Shown`` object looks like its original of
``txmq.aio``: what is awaited, iterated over or entered there is called, iterated over or entered here. A handler or a
checker is called in a thread of its own.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar, cast

import txmq
import txmq.aio
from tools.shown import Shown, is_shown

T = TypeVar("T")
_CALLED_BACK = frozenset({"handle", "checker"})  # parameters


class Connect(Protocol):
    """``txmq.connect``, or what looks like it."""

    def __call__(self, bootstrap: str, *, timeout: float = 5.0, lazy: bool = False) -> txmq.Client: ...


class _Caller:
    """The task that makes the calls of one thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._work: asyncio.Queue[tuple[Callable[[], Any], Future[Any]] | None] = asyncio.Queue()
        self.task = asyncio.run_coroutine_threadsafe(self._serve(), loop)

    def call(self, work: Callable[[], Any]) -> Any:
        """Its result, awaited if that can be."""
        result: Future[Any] = Future()
        self._loop.call_soon_threadsafe(self._work.put_nowait, (work, result))
        return result.result()

    def end(self) -> None:
        """No more calls."""
        self._loop.call_soon_threadsafe(self._work.put_nowait, None)
        self.task.result()

    async def _serve(self) -> None:
        while (item := await self._work.get()) is not None:
            work, result = item
            try:
                found = work()
                result.set_result(await found if isinstance(found, Awaitable) else found)
            except BaseException as error:  # noqa: BLE001  raised by the caller
                result.set_exception(error)
            del item, work, result


class LoopThread:
    """A loop in a thread, and its callers."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="loop of a test", daemon=True)
        self._callers: dict[threading.Thread, _Caller] = {}
        self._clients: list[Any] = []
        self._thread.start()

    def call(self, work: Callable[[], Any]) -> Any:
        """Call in the task of this thread, and show the result."""
        caller = self._callers.get(threading.current_thread())
        if caller is None:
            caller = self._callers[threading.current_thread()] = _Caller(self.loop)
        return self.shown(caller.call(work))

    def connect(self, bootstrap: str, **options: Any) -> txmq.Client:
        """As ``txmq.connect``."""
        client = self.call(lambda: txmq.aio.connect(bootstrap, **options))
        self._clients.append(client)
        return cast("txmq.Client", client)

    def shown(self, found: Any) -> Any:
        """As the caller is to see it."""
        if isinstance(found, list):
            return [self.shown(each) for each in found]
        if isinstance(found, asyncio.Future):
            return _ShownFuture(found, self)
        if isinstance(found, txmq.Message) and hasattr(found, "consumer"):
            return _ShownMessage(found, self)
        return Shown(found, self) if is_shown(found) else found

    def given(self, name: str, argument: Any) -> Any:
        """As ``txmq.aio`` is to see it."""
        if isinstance(argument, Shown):
            return argument.original
        if name in _CALLED_BACK and callable(argument):
            return lambda *given: asyncio.to_thread(argument, *map(self.shown, given))
        return argument

    def close(self) -> None:
        """Close what is open; nothing is left on the loop.

        Raises:
            AssertionError: something is.
        """
        for client in self._clients:
            client.close()
        for caller in list(self._callers.values()):
            caller.end()
        left = asyncio.run_coroutine_threadsafe(_others(), self.loop).result()
        asyncio.run_coroutine_threadsafe(self.loop.shutdown_default_executor(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
        assert not left, left


async def _others() -> list[str]:
    return [repr(task) for task in asyncio.all_tasks() if task is not asyncio.current_task()]


class _ShownFuture:
    """What ``send_async`` gives."""

    def __init__(self, original: asyncio.Future[Any], loop: LoopThread) -> None:
        self._original, self._loop = original, loop

    def result(self, timeout: float | None = None) -> Any:
        """See ``concurrent.futures.Future``."""
        return self._loop.call(lambda: asyncio.wait_for(asyncio.shield(self._original), timeout))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """See ``concurrent.futures.Future``."""
        try:
            self.result(timeout)
        except Exception as error:  # noqa: BLE001  it is asked for
            return error
        return None

    def add_done_callback(self, tell: Callable[[Any], object]) -> None:
        """See ``concurrent.futures.Future``."""
        self._loop.call(lambda: self._original.add_done_callback(tell))


class _ShownMessage(Shown):
    """A message that a consumer delivered: only its methods are of the loop."""

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name in ("ack", "reject") else getattr(self.original, name)

    def __eq__(self, other: object) -> bool:
        return bool(self.original == (other.original if isinstance(other, Shown) else other))

    def __hash__(self) -> int:
        return hash(self.original)


def inside(client: txmq.Client, work: Callable[[txmq.Client], T]) -> T:
    """``work`` with the client of ``txmq``: this one, or the one that a loop's client wraps, in a strand."""
    if not isinstance(client, Shown):
        return work(client)
    original: txmq.aio.Client = client.original
    return cast("T", client.in_loop(lambda: original.host.run(partial(work, original.inner))))


@contextmanager
def connected_by_loop() -> Iterator[Connect]:
    """``connect`` for clients of a loop, which ends with the block."""
    loop = LoopThread()
    try:
        yield loop.connect
    finally:
        loop.close()
