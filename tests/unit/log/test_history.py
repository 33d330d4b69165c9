"""How far two histories of a partition's log are the same."""

from __future__ import annotations

import pytest

from txmq.errors import StorageError
from txmq.log.history import LIVES_MAX, NO_LIFE, LogHistory, parsed, with_life

A, B, C, D = (letter * 16 for letter in "abcd")
KNOWN = LogHistory(7, ((A, 0), (B, 20)))


@pytest.mark.parametrize(
    ("other", "offset", "shared"),
    [
        (KNOWN, 50, 50),
        (LogHistory(7, ((A, 0), (B, 20), (C, 60))), 50, 50),  # the broker has started again
        (LogHistory(7, ((A, 0), (B, 20), (C, 40))), 50, 40),  # a copy of the second life was put back
        (LogHistory(7, ((A, 0), (C, 20), (D, 90))), 50, 20),  # one from before it
        (LogHistory(7, ((A, 0), (C, 10))), 50, 10),
        (LogHistory(7, ((A, 0), (C, 30))), 50, 20),  # a copy put back for a copy: the nearer end counts
        (LogHistory(7, ((A, 0), (C, 10))), 5, 5),
        (LogHistory(7, ((C, 0),)), 50, 0),
        (LogHistory(8, KNOWN.lives), 50, None),  # made anew under its name
    ],
)
def test_logs_are_shared_to_the_nearer_end_of_a_life(other: LogHistory, offset: int, shared: int | None) -> None:
    assert KNOWN.shared_with(other, offset) == shared
    assert other.shared_with(KNOWN, offset) == shared


def test_reader_goes_on_where_its_life_has_all_it_read() -> None:
    known = LogHistory(7, ((A, 0), (B, 20)))
    assert known.has_read(f"7.{A}", 20)
    assert not known.has_read(f"7.{A}", 21)
    assert known.has_read(f"7.{B}", 1 << 40)
    assert not known.has_read(f"7.{C}", 0)
    assert not known.has_read(f"8.{B}", 0)


def test_life_without_messages_is_replaced_and_the_newest_are_kept() -> None:
    assert with_life(((A, 0), (B, 20)), C, 20) == ((A, 0), (C, 20))
    assert with_life((), A, 0) == ((A, 0),)
    lives = tuple((f"{number:016x}", number) for number in range(LIVES_MAX))
    assert with_life(lives, A, LIVES_MAX) == (*lives[1:], (A, LIVES_MAX))
    assert len(LogHistory(1 << 31, with_life(lives, A, (1 << 63) - 1)).text) <= 2000


def test_text_is_read_back_and_another_one_refused() -> None:
    assert parsed(KNOWN.text) == KNOWN
    assert parsed("7") == LogHistory(7, ())
    assert [KNOWN.log, KNOWN.log_at(19), KNOWN.log_at(20)] == [f"7.{B}", f"7.{A}", f"7.{B}"]
    assert LogHistory(7, ((A, 5),)).log_at(4) == LogHistory(7, ()).log == f"7.{NO_LIFE}"
    for text in ("", "x", "7,", f"7,{A}", f"7,{A}:x", f"7,{A}:1\n"):
        with pytest.raises(StorageError, match="no history of a log"):
            parsed(text)
