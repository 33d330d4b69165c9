"""``HeldKeys`` holds back what ``OutboxKey.collides`` with a row before it that stays."""

from __future__ import annotations

import itertools

import pytest

from txmq.xa.database.outbox_keys import ANY_KEY, HeldKeys, OutboxKey

KEYS = [OutboxKey(slot, word) for slot in ("a-0", "a-1", "b-0") for word in ("1", "2", ANY_KEY)]


@pytest.mark.parametrize(("stays", "ours"), list(itertools.product(KEYS, KEYS)))
def test_later_row_is_held_if_its_key_collides(stays: OutboxKey, ours: OutboxKey) -> None:
    held = HeldKeys()
    held.add([stays], 5)
    assert held.hold([ours], 6) is stays.collides(ours)
    assert not held.hold([ours], 4)


def test_row_of_several_keys_is_held_by_one_of_them() -> None:
    held = HeldKeys()
    assert not held
    held.add(KEYS[:1], 7)
    held.add(KEYS[:1], 3)
    assert held
    assert held.hold([KEYS[1], KEYS[0]], 4)
    assert not held.hold([KEYS[1]], 9)
