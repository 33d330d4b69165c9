"""A thread that works for others: order, context, errors, callers that give up their wait."""

from __future__ import annotations

import asyncio
import threading
from contextvars import ContextVar

import pytest

from txmq.runtime import workers
from txmq.runtime.strands import Host
from txmq.runtime.workers import Worker, WorkUnendedError

LONG_S = 60.0
_word: ContextVar[str] = ContextVar("word", default="none")


def _never() -> None:
    pytest.fail("nobody gave up")


def test_work_runs_in_one_thread_and_in_the_callers_context() -> None:
    worker = Worker("w")
    _word.set("mine")

    def work() -> tuple[str, int]:
        found = _word.get()
        _word.set("changed there")
        return found, threading.get_ident()

    first, second = worker.call(work, _never), worker.call(work, _never)
    assert first == second
    assert first[0] == _word.get() == "mine"
    assert first[1] != threading.get_ident()
    worker.end()


def test_exception_of_the_work_is_the_callers() -> None:
    worker = Worker("w")
    error = LookupError("its own")

    def work() -> None:
        raise error

    with pytest.raises(LookupError) as caught:
        worker.call(work, _never)
    assert caught.value is error
    assert worker.call(lambda: 1, _never) == 1
    worker.end()


def test_work_that_is_left_runs_to_its_end() -> None:
    worker, may_end, order = Worker("w"), threading.Event(), list[str]()

    def work() -> None:
        assert may_end.wait(LONG_S)
        order.append("left")

    async def main() -> None:
        host = Host()
        task = asyncio.create_task(host.run(lambda: worker.call(work, lambda: order.append("gives up"))))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        worker.post(lambda: order.append("behind"))
        may_end.set()
        await host.run(lambda: worker.call(lambda: order.append("last"), _never))
        await host.close()

    asyncio.run(main())
    worker.end()
    assert order == ["gives up", "left", "behind", "last"]


def test_thread_outlives_the_loop_of_a_caller() -> None:
    worker, may_end = Worker("w"), threading.Event()

    async def main() -> None:
        task = asyncio.create_task(Host().run(lambda: worker.call(lambda: may_end.wait(LONG_S), lambda: None)))
        await asyncio.sleep(0.01)
        task.cancel()

    asyncio.run(main())
    may_end.set()
    assert worker.call(lambda: 2, _never) == 2
    worker.end()


def test_forked_child_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker("w")
    monkeypatch.setattr(workers, "current_process", lambda: -1)
    with pytest.raises(RuntimeError, match="forked"):
        worker.call(lambda: 1, _never)
    worker.end()


def test_work_that_takes_too_long_goes_on_unwaited_for() -> None:
    worker, goes_on, left, ended = Worker("w"), threading.Event(), list[bool](), threading.Event()

    def work() -> None:
        assert goes_on.wait(LONG_S)
        ended.set()

    with pytest.raises(WorkUnendedError):
        worker.call(work, lambda: left.append(True), timeout_s=0.01)
    assert left
    assert not ended.is_set()
    goes_on.set()
    assert ended.wait(LONG_S)
    worker.end()
