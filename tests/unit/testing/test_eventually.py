"""``eventually``: waiting for a condition."""

from __future__ import annotations

from itertools import count

import pytest

from txmq.testing.eventually import eventually


def test_returns_once_the_condition_is_true() -> None:
    looks = count(1)
    eventually(lambda: next(looks) == 3, "the third look")
    assert next(looks) == 4


def test_looks_once_even_if_no_time_is_left() -> None:
    eventually(lambda: True, "nothing", within_s=-1.0)


def test_a_failed_wait_says_what_was_waited_for() -> None:
    with pytest.raises(AssertionError, match=r"^not within 0\.01 s: the moon is full$"):
        eventually(lambda: False, "the moon is full", within_s=0.01)


def test_text_of_the_error_is_made_after_the_last_look() -> None:
    seen: list[int] = []
    with pytest.raises(AssertionError, match=r"\[\d+(, \d+)*\]$"):
        eventually(lambda: seen.append(len(seen)), lambda: seen, within_s=0.01)


def test_a_failed_wait_raises_what_failure_makes() -> None:
    with pytest.raises(TimeoutError, match="not within"):
        eventually(lambda: False, "nothing", within_s=0.0, failure=TimeoutError)


def test_errors_of_the_condition_are_passed_on() -> None:
    with pytest.raises(ZeroDivisionError):
        eventually(lambda: 1 // 0, "a number")
