"""``tools/suite``: what may be run once more, what is red whatever a second run says."""

from __future__ import annotations

import pytest

from tools.suite.promises import broken_promise, difference_of
from tools.suite.verdict import UNSTEADY_MAX, Failure, conclusion, to_repeat
from txmq.errors import ConnectionLostError, CorruptRecordError
from txmq.model import Outcome

SERVICE = "tests/services/broker/test_process.py::test_{}"


def _failure(number: int = 0, *, test: str = SERVICE, phase: str = "call", promise: str = "") -> Failure:
    return Failure("services", test.format(number), phase, f"E   TimeoutError: {number}", promise)


def _key(failure: Failure) -> tuple[str, str]:
    return failure.stage, failure.test


def test_no_failure_is_green() -> None:
    assert to_repeat([]) == []
    assert conclusion([], [])[0]


def test_failed_service_test_that_passes_alone_is_unsteady_and_green() -> None:
    failure = _failure()
    assert to_repeat([failure]) == [_key(failure)]
    assert conclusion([failure], [_key(failure)]) == (
        True, [f"unsteady: {failure.test}", "    E   TimeoutError: 0"],
    )  # fmt: skip


def test_test_that_fails_twice_is_red() -> None:
    steady, unsteady = _failure(1), _failure(2)
    assert conclusion([steady, unsteady], [_key(unsteady)]) == (False, [f"failed twice: {steady.test}"])


def test_phases_of_one_test_are_one_unsteady_test() -> None:
    failures = [_failure(number, phase=phase) for number in range(UNSTEADY_MAX) for phase in ("call", "teardown")]
    assert len(to_repeat(failures)) == UNSTEADY_MAX
    assert conclusion(failures, to_repeat(failures))[0]


def test_more_than_three_are_red_and_not_repeated() -> None:
    failures = [_failure(number) for number in range(UNSTEADY_MAX + 1)]
    assert to_repeat(failures) == []
    assert not conclusion(failures, [_key(failure) for failure in failures])[0]


@pytest.mark.parametrize(
    "final",
    [
        *(_failure(test=f"tests/{room}/test_x.py::test_{{}}") for room in ("unit", "vectors", "simulation", "images")),
        _failure(test="tests/compiled/test_compiled.py::test_{}"),
        _failure(phase="???"),
        _failure(promise="says 'lost'"),
    ],
)
def test_what_is_final_is_red_whatever_a_second_run_says(final: Failure) -> None:
    other = _failure(7)
    assert to_repeat([other, final]) == []
    is_green, lines = conclusion([other, final], [_key(other), _key(final)])
    assert not is_green
    assert final.test in lines[0]


@pytest.mark.parametrize(
    "error",
    [
        CorruptRecordError("00.log", 7, "crc"),
        AssertionError("assert 'L5 lost-write: put-3 was acknowledged' == ''"),
        AssertionError("P7: key b'k' overtaken"),
        AssertionError("3 messages were lost"),
        AssertionError("row 7 came Twice"),
        AssertionError("a torn transaction"),
        ExceptionGroup("both", [ValueError("x"), AssertionError("segment is damaged")]),
    ],
)
def test_error_that_says_a_promise_was_broken_is_known(error: BaseException) -> None:
    assert broken_promise(error)
    above = TimeoutError("not in time")
    above.__context__ = error
    assert broken_promise(above), "a cause says it, too"


@pytest.mark.parametrize(
    "error",
    [
        TimeoutError("not in time"),
        ConnectionLostError("connection lost"),
        AssertionError("not within 60 s: the broker serves"),
        AssertionError("A9 resolution-time: 6.1 s, at most 5 s"),
        AssertionError("assert 1 == 2"),
    ],
)
def test_error_about_time_says_nothing_of_a_promise(error: BaseException) -> None:
    assert broken_promise(error) == ""


@pytest.mark.parametrize(
    ("left", "right", "said"),
    [
        ([b"a"], [b"a", b"b"], "messages differ: 1 missing, 0 too many"),
        ([b"a", b"a"], [b"a"], "messages differ: 0 missing, 1 too many"),
        ([b"b", b"a"], [b"a", b"b"], "out of order"),
        ({0: [b"a"]}, {0: []}, "messages differ: 1 missing, 1 too many"),
        (Outcome.COMMITTED, Outcome.ROLLED_BACK, "wrong outcome: COMMITTED, not ROLLED_BACK"),
        (Outcome.UNKNOWN, Outcome.COMMITTED, ""),
        (["home-1"], ["home-1", "home-2"], ""),
        (1, 2, ""),
        (b"a", b"b", ""),
    ],
)
def test_difference_of_messages_says_what_is_missing(left: object, right: object, said: str) -> None:
    assert difference_of(left, right) == said


def test_difference_counts_only_for_the_assertion_that_compared() -> None:
    assert broken_promise(AssertionError("assert [b'a'] == []"), "out of order") == "out of order"
    assert broken_promise(AssertionError("who read what\nassert [b'a'] == []"), "out of order") == "out of order"
    assert broken_promise(TimeoutError("assert [b'a'] == []"), "out of order") == ""
    assert broken_promise(AssertionError("not within 60 s: it serves"), "out of order") == ""
