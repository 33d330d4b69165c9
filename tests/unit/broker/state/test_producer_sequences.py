"""Producer sequences: what is new, what is a duplicate, what is refused."""

from __future__ import annotations

import sys

import pytest

from txmq.broker.state.producer_sequences import Sequences, batches
from txmq.errors import SequenceError


def _after(*batches: tuple[int, int, int, int], kept_max: int = 3) -> Sequences:
    sequences = Sequences(batches[0][0] if batches else 0)
    for sequence, count, crc, offset in batches:
        assert sequences.duplicate_of(sequence, crc) is None
        sequences.accept(sequence, count, crc, offset, kept_max)
    return sequences


def test_the_next_sequence_is_new() -> None:
    assert _after((0, 5, 11, 100)).duplicate_of(5, 12) is None


def test_a_producer_begins_at_zero() -> None:
    with pytest.raises(SequenceError):
        Sequences().duplicate_of(1, 11)


def test_a_repeat_has_the_offset_it_had() -> None:
    sequences = _after((0, 5, 11, 100), (5, 1, 12, 105))
    assert (sequences.duplicate_of(0, 11), sequences.duplicate_of(5, 12)) == (100, 105)


def test_a_repeat_with_other_content_is_refused() -> None:
    with pytest.raises(SequenceError, match="another batch"):
        _after((0, 5, 11, 100)).duplicate_of(0, 99)


def test_a_gap_is_refused_and_names_what_is_next() -> None:
    with pytest.raises(SequenceError, match="5 is next"):
        _after((0, 5, 11, 100)).duplicate_of(6, 12)


def test_a_sequence_inside_a_batch_is_refused() -> None:
    with pytest.raises(SequenceError):
        _after((0, 5, 11, 100)).duplicate_of(3, 11)


def test_only_the_last_batches_are_told_apart() -> None:
    sequences = _after((0, 1, 10, 0), (1, 1, 11, 1), (2, 1, 12, 2), (3, 1, 13, 3))
    assert sequences.duplicate_of(1, 11) == 1
    with pytest.raises(SequenceError):
        sequences.duplicate_of(0, 10)


def test_sequences_wrap_behind_the_largest_positive_number() -> None:
    sequences = _after((2**31 - 2, 1, 10, 0))
    assert sequences.duplicate_of(2**31 - 1, 11) is None
    sequences.accept(2**31 - 1, 1, 11, 1, 3)
    assert sequences.duplicate_of(0, 12) is None


def test_a_batch_may_span_the_wrap() -> None:
    sequences = _after((2**31 - 2, 5, 10, 0))
    assert sequences.next == 3
    assert sequences.duplicate_of(2**31 - 2, 10) == 0


def test_restore_is_the_reverse_of_snapshot() -> None:
    sequences = _after((0, 5, 11, 100), (5, 1, 12, 105))
    restored = Sequences.restore(sequences.next, [list(batch) for batch in batches(sequences.recent)])
    assert (restored.next, restored.recent) == (sequences.next, sequences.recent)
    assert restored.duplicate_of(0, 11) == 100


def test_a_partition_costs_few_bytes_for_each_batch() -> None:
    kept = [(number, 1, 2**32 - 1, 2**40 + number) for number in range(8)]
    sequences = _after(*kept, kept_max=8)
    assert batches(sequences.recent) == [(number, 2**40 + number, 2**32 - 1) for number in range(8)]
    assert sys.getsizeof(sequences.recent) < 8 * 16 + 50
