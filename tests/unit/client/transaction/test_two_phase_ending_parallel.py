"""Several databases at once: which one waits for which, what is raised, and what becomes of one that is late."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from txmq.client.transaction import two_phase_ending
from txmq.client.transaction.two_phase_ending import Job, run_all

WAIT_S = 10.0


def jobs(count: int) -> list[Job]:
    return [Job() for _ in range(count)]


def test_one_runs_in_callers_thread_and_no_thread_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_phase_ending, "start_daemon", lambda *_: pytest.fail("a thread"))
    seen: list[int] = []
    run_all(jobs(1), [lambda: seen.append(threading.get_ident())])
    assert seen == [threading.get_ident()]


def test_several_run_at_once() -> None:
    barrier = threading.Barrier(3, timeout=WAIT_S)  # passes only if all three are there together

    def together() -> None:
        barrier.wait()

    run_all(jobs(3), [together] * 3)
    assert barrier.n_waiting == 0


def test_jobs_run_in_sequence_if_no_thread_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(_name: str, _run: Callable[[], None]) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(two_phase_ending, "start_daemon", none_left)
    seen: list[int] = []
    run_all(jobs(3), [lambda number=number: seen.append(number) for number in range(3)])  # type: ignore[misc]
    assert sorted(seen) == [0, 1, 2]


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("kind", [ZeroDivisionError, KeyboardInterrupt])
def test_what_one_raises_is_raised_when_all_have_ended(place: int, kind: type[BaseException]) -> None:
    ended: list[int] = []

    def work(number: int) -> None:
        if number == place:
            raise kind
        ended.append(number)

    with pytest.raises(kind):
        run_all(jobs(3), [lambda number=number: work(number) for number in range(3)])  # type: ignore[misc]
    assert sorted(ended) == sorted({0, 1, 2} - {place})


def test_jobs_are_used_again_and_again() -> None:
    some, count = jobs(2), [0, 0]

    def add(place: int) -> None:
        count[place] += 1

    for _ in range(200):
        run_all(some, [lambda: add(0), lambda: add(1)])
        assert not any(job.is_busy for job in some)
    assert count == [200, 200]


def test_a_late_one_keeps_its_connection_until_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller was interrupted, and one database does not answer."""
    monkeypatch.setattr(two_phase_ending, "GRACE_S", 0.01)
    some, answer, used = jobs(2), threading.Event(), list[str]()

    def interrupted() -> None:
        raise KeyboardInterrupt

    def late() -> None:
        assert answer.wait(WAIT_S)
        used.append("late")

    with pytest.raises(KeyboardInterrupt):
        run_all(some, [interrupted, late])
    assert some[1].is_busy
    left = threading.Event()

    def leave() -> None:
        used.append("left")
        left.set()

    some[0].when_free(lambda: used.append("free"))
    some[1].when_free(leave)
    assert used == ["free"], "nobody touches what a late one uses"
    answer.set()
    assert left.wait(WAIT_S)
    assert used == ["free", "late", "left"]
