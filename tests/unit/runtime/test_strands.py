"""Synchronous code on an event loop: doors that park, cancellation, daemons, the loop that it belongs to."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import cast

import pytest

from txmq.runtime.clocks import OSClock
from txmq.runtime.strands import Host, LoopClock, current, required
from txmq.runtime.threads import (
    Attempt,
    Exclusive,
    Future,
    Signal,
    blocking,
    new_condition,
    new_future,
    new_lock,
    off_loop,
    start_daemon,
    start_threads,
    thread_number,
    to_end,
)

LONG_S = 60.0


def _on_loop(scenario: Callable[[Host], Awaitable[None]]) -> None:
    async def main() -> None:
        host = Host()
        await scenario(host)
        await host.close()

    asyncio.run(main())


def test_strand_that_waits_lets_others_run() -> None:
    async def scenario(host: Host) -> None:
        asked, answered = Signal(), Signal()

        def answer() -> bool:
            was_asked = asked.wait(LONG_S)
            answered.set()
            return was_asked

        def ask() -> bool:
            asked.set()
            return answered.wait(LONG_S)

        assert all(await asyncio.gather(host.run(answer), host.run(ask)))

    _on_loop(scenario)


def test_signal_of_another_thread_wakes_a_strand() -> None:
    async def scenario(host: Host) -> None:
        signal, is_waiting = Signal(), threading.Event()

        def set_from_outside() -> None:
            assert is_waiting.wait(LONG_S)
            signal.set()

        setter = threading.Thread(target=set_from_outside)
        setter.start()
        asyncio.get_running_loop().call_soon(is_waiting.set)
        assert await host.run(lambda: signal.wait(LONG_S))
        setter.join()

    _on_loop(scenario)


def test_signal_of_another_thread_just_before_the_wait_is_heard() -> None:
    async def scenario(host: Host) -> None:
        signal, create_future = Signal(), host.loop.create_future

        def create_late() -> asyncio.Future[None]:
            setter = threading.Thread(target=signal.set)
            setter.start()
            setter.join()
            return create_future()

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(host.loop, "create_future", create_late)
            async with asyncio.timeout(LONG_S / 2):
                assert await host.run(lambda: signal.wait(LONG_S))

    _on_loop(scenario)


def test_wait_without_a_signal_ends_in_time() -> None:
    async def scenario(host: Host) -> None:
        assert not await host.run(lambda: Signal().wait(0.001))
        assert not await host.run(lambda: Signal().wait(0.0))

    _on_loop(scenario)


def test_signal_that_was_set_before_is_not_lost() -> None:
    async def scenario(host: Host) -> None:
        signal = Signal()
        signal.set()
        signal.set()
        assert await host.run(lambda: signal.wait(LONG_S))
        assert not await host.run(lambda: signal.wait(0.001))

    _on_loop(scenario)


def test_turn_is_handed_from_strand_to_strand() -> None:
    async def scenario(host: Host) -> None:
        turn, clock, order = Exclusive(), LoopClock(OSClock()), list[int]()

        def work(number: int) -> None:
            me = Attempt()
            assert turn.take_before(clock.monotonic() + LONG_S, me, clock)
            clock.sleep(0.001)
            order.append(number)
            turn.leave(me)

        await asyncio.gather(*(host.run(lambda number=number: work(number)) for number in range(3)))  # type: ignore[misc]
        assert sorted(order) == [0, 1, 2]

    _on_loop(scenario)


def test_cancelled_task_ends_in_the_door_and_may_wait_again() -> None:
    async def scenario(host: Host) -> None:
        ended = list[str]()
        is_parked = asyncio.Event()

        def work() -> None:
            host.loop.call_soon(is_parked.set)
            try:
                Signal().wait(LONG_S)
            except asyncio.CancelledError:
                Signal().wait(0.001)
                ended.append("cleaned up")
                raise

        task = asyncio.create_task(host.run(work))
        await is_parked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended == ["cleaned up"]

    _on_loop(scenario)


def test_exception_and_context_are_those_of_the_task() -> None:
    name: ContextVar[str] = ContextVar("name")

    async def scenario(host: Host) -> None:
        def work() -> None:
            assert name.get() == "caller's"
            name.set("strand's")
            Signal().wait(0.001)
            assert name.get() == "strand's"
            raise LookupError("its own")

        name.set("caller's")
        with pytest.raises(LookupError, match="its own"):
            await host.run(work)
        assert name.get() == "strand's"

    _on_loop(scenario)


def test_daemon_of_a_strand_is_a_task_that_close_awaits() -> None:
    done = list[bool]()

    async def scenario(host: Host) -> None:
        go_on = Signal()

        def daemon() -> None:
            done.append(current() is not None and go_on.wait(LONG_S))

        await host.run(lambda: start_daemon("test", daemon))
        host.loop.call_soon(go_on.set)

    _on_loop(scenario)
    assert done == [True]


def test_daemon_that_does_not_end_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("txmq.runtime.strands._CLOSE_S_MAX", 0.001)
    ended = list[str]()

    async def scenario(host: Host) -> None:
        def daemon() -> None:
            try:
                Signal().wait(LONG_S)
            finally:
                ended.append("ended")

        await host.run(lambda: start_daemon("test", daemon))

    _on_loop(scenario)
    assert ended == ["ended"]


def test_host_serves_its_own_loop_only() -> None:
    async def make() -> Host:
        return Host()

    async def use(host: Host) -> None:
        await host.run(lambda: None)

    host = asyncio.run(make())
    with pytest.raises(RuntimeError, match="belongs to another event loop"):
        asyncio.run(use(host))


def test_callback_that_would_wait_is_refused() -> None:
    async def scenario(host: Host) -> None:
        with pytest.raises(RuntimeError, match="waits, in a callback"):
            host.call(lambda: LoopClock(OSClock()).sleep(LONG_S))

    _on_loop(scenario)


def test_outside_of_strands_a_signal_is_a_threads() -> None:
    signal = Signal()
    signal.set()
    assert current() is None
    assert signal.wait(LONG_S)
    with pytest.raises(RuntimeError, match="outside of its methods"):
        required()


def test_lock_of_strands_is_held_over_a_park() -> None:
    async def scenario(host: Host) -> None:
        lock, inside, most = await host.run(new_lock), 0, 0
        is_first = Signal()

        def work() -> None:
            nonlocal inside, most
            with lock:
                is_first.set()
                inside += 1
                most = max(most, inside)
                Signal().wait(0.001)
                inside -= 1

        tasks = [asyncio.create_task(host.run(work)) for _ in range(5)]
        await host.run(lambda: is_first.wait(LONG_S))
        tasks[1].cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(end) for end in ended] == [type(None), asyncio.CancelledError, *[type(None)] * 3]
        assert most == 1

    _on_loop(scenario)


def test_future_is_awaited_by_tasks_and_waited_for_by_strands() -> None:
    async def scenario(host: Host) -> None:
        future = await host.run(new_future)
        waiting = asyncio.create_task(host.run(future.result))
        await asyncio.sleep(0)
        assert not waiting.done()
        assert future.set_running_or_notify_cancel()
        future.set_result("there")
        assert await waiting == "there"
        assert await asyncio.wait_for(cast("asyncio.Future[str]", future), LONG_S) == "there"
        assert await host.run(future.exception) is None
        assert not future.set_running_or_notify_cancel()

    _on_loop(scenario)
    assert isinstance(new_future(), Future)


def test_condition_of_strands_wakes_all_that_wait() -> None:
    async def scenario(host: Host) -> None:
        lock, changed = await host.run(new_condition)
        there: list[int] = []

        def wait() -> bool:
            with changed:
                return all(changed.wait(LONG_S) for _ in iter(lambda: bool(there), True))

        def tell() -> None:
            with lock:
                there.append(1)
                changed.notify_all()

        waiting = [asyncio.create_task(host.run(wait)) for _ in range(3)]
        await asyncio.sleep(0)
        await host.run(tell)
        assert await asyncio.gather(*waiting) == [True] * 3
        assert not await host.run(lambda: changed.wait(0.001))

    _on_loop(scenario)


def test_what_blocks_runs_in_a_thread_to_its_end() -> None:
    async def scenario(host: Host) -> None:
        begun, go_on, ended = threading.Event(), threading.Event(), list[int]()

        def block() -> None:
            begun.set()
            assert go_on.wait(LONG_S)
            ended.append(threading.get_ident())
            raise LookupError("its own")

        task = asyncio.create_task(host.run(lambda: off_loop(block)))
        while not begun.is_set():
            await asyncio.sleep(0)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0)
        assert not task.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended
        assert ended != [host.thread]
        with pytest.raises(LookupError, match="its own"):
            await host.run(lambda: off_loop(block))

    _on_loop(scenario)


def test_blocking_method_stays_in_a_caller_without_a_loop() -> None:
    class Disk:
        @blocking
        def write(self, number: int, *, more: int = 0) -> tuple[int, int]:
            return threading.get_ident(), number + more

    async def scenario(host: Host) -> None:
        thread, total = await host.run(lambda: Disk().write(1, more=2))
        assert total == 3
        assert thread != host.thread

    assert Disk().write(1) == (threading.get_ident(), 1)
    _on_loop(scenario)


def test_strands_together_are_tasks_that_end_together() -> None:
    async def scenario(host: Host) -> None:
        numbers = set[int]()

        def work() -> None:
            numbers.add(thread_number())
            Signal().wait(LONG_S)

        task = asyncio.create_task(host.run(lambda: start_threads("test", 3, work)))
        while len(numbers) < 3:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(asyncio.all_tasks()) == 1
        here = await host.run(lambda: [thread_number() for _ in range(2)])
        assert here == [id(asyncio.current_task())] * 2

        def fail() -> None:
            raise LookupError("its own")

        with pytest.raises(LookupError, match="its own"):
            await host.run(lambda: start_threads("test", 2, fail))

    _on_loop(scenario)


def test_cancelled_caller_leaves_work_to_its_end() -> None:
    async def scenario(host: Host) -> None:
        ended = list[str]()

        def work(name: str) -> None:
            Signal().wait(0.001)
            ended.append(name)

        async def in_host() -> None:
            await host.to_end(lambda: work("host"))

        async def in_strand() -> None:
            await host.run(lambda: to_end(lambda: work("strand")))

        for run in (in_host, in_strand):
            task = asyncio.create_task(run())
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert ended == []
            await host.await_ends(LONG_S)
            assert [f"in_{name}" for name in ended] == [run.__name__]
            ended.clear()

    _on_loop(scenario)


def test_work_that_goes_to_its_end_needs_no_task() -> None:
    async def scenario(host: Host) -> None:
        begun, numbers, signal = asyncio.all_tasks(), list[int](), Signal()

        def work() -> int:
            numbers.append(thread_number())
            signal.wait(LONG_S)
            numbers.append(thread_number())
            raise LookupError("its own")

        running = host.begin_end(work)
        assert len(numbers) == 1
        first, second = (asyncio.create_task(host.run(lambda: required().wait_for(running))) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        signal.set()
        with pytest.raises(LookupError, match="its own"):
            await second
        assert first.cancelled()
        assert numbers == [numbers[0]] * 2
        assert numbers[0] != await host.run(thread_number)
        assert asyncio.all_tasks() == begun
        assert await host.begin_end(lambda: 5) == 5

    _on_loop(scenario)


def test_end_may_await_and_is_told_of_a_cancelled_one() -> None:
    async def scenario(host: Host) -> None:
        def work() -> str:
            strand = current()
            assert strand is not None
            strand.wait_for(asyncio.sleep(0))
            with pytest.raises(TimeoutError):
                strand.wait_for(asyncio.wait_for(asyncio.Event().wait(), 0))
            cancelled = host.loop.create_future()
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                strand.wait_for(cancelled)
            return "ended"

        assert await host.to_end(work) == "ended"

    _on_loop(scenario)


@pytest.mark.parametrize("turns", range(5))
def test_what_a_cancelled_caller_opened_is_closed(turns: int) -> None:
    async def scenario(host: Host) -> None:
        there = list[int]()

        def make() -> int:
            Signal().wait(0.0)
            there.append(1)
            return 1

        task = asyncio.create_task(host.opened(make, there.remove))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        ended = (await asyncio.gather(task, return_exceptions=True))[0]
        await host.await_ends(LONG_S)
        assert there == ([1] if ended == 1 else [])

    _on_loop(scenario)


def test_strand_begun_inside_of_another_outlives_it() -> None:
    """A listener's handler may make a producer: that strand serves again when the listener waits."""

    async def scenario(host: Host) -> None:
        woken = Signal()

        def outer() -> str:
            assert host.call(lambda: "made") == "made"
            assert woken.wait(LONG_S)
            return "outer"

        running = asyncio.create_task(host.run(outer))
        await asyncio.sleep(0)
        assert await host.run(lambda: "next") == "next"  # in the strand that was made inside
        woken.set()
        assert await running == "outer"

    _on_loop(scenario)
