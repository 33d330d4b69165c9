"""The search for a position at which nothing is prepared, against one that knows the whole binlog."""

from __future__ import annotations

import random

import pytest

from tests.services.binlog.scripted import DOMAIN, SERVER, part
from txmq.binlog.decoded_changes import TransactionPart, XaEnd, XaPrepare
from txmq.binlog.position import Position
from txmq.binlog.reader import UnpreparedSearch
from txmq.xid import Xid, xid_sql


def position(sequence: int) -> Position:
    return Position("mariadb", f"{DOMAIN}-{SERVER}-{sequence}")


def history(drawn: random.Random) -> list[TransactionPart]:
    """A binlog; an xid may be used again when it has ended, and an end may be written twice."""
    parts, prepared = list[TransactionPart](), list[Xid]()
    for sequence in range(1, drawn.randrange(2, 30)):
        xid = Xid(1, b"%d" % drawn.randrange(8), b"")
        if xid not in prepared and drawn.random() < 0.5:
            prepared.append(xid)
            parts.append(part(sequence, xa=XaPrepare(xid)))
        elif xid in prepared:
            prepared.remove(xid)
            parts.append(part(sequence, xa=XaEnd(xid, drawn.random() < 0.7)))
        else:
            parts.append(part(sequence))
    return parts


def prepared_at(parts: list[TransactionPart], sequence: int) -> set[str]:
    found = set[str]()
    for one in parts[:sequence]:
        if isinstance(one.xa, XaPrepare):
            found.add(xid_sql(one.xa.xid))
        elif isinstance(one.xa, XaEnd):
            found.discard(xid_sql(one.xa.xid))
    return found


@pytest.mark.parametrize("seed", range(100))
def test_what_is_found_is_first_position_with_nothing_prepared(seed: int) -> None:
    drawn = random.Random(seed)
    parts = history(drawn)
    first = drawn.randrange(len(parts))
    listed_at = drawn.randrange(first, len(parts) + 1)
    read_to = drawn.randrange(listed_at, len(parts) + 1)
    search = UnpreparedSearch(position(first))
    for one in parts[first:read_to]:
        search.take(one)
    waits = search.waits_for(sorted(prepared_at(parts, listed_at)))
    free = [number for number in range(first, read_to + 1) if not prepared_at(parts, number)]
    if waits:
        assert set(waits) <= prepared_at(parts, listed_at) | prepared_at(parts, read_to)
    else:
        assert search.found is not None
        assert search.found.gtids == position(free[0]).gtids
