"""Where records end, however their bytes come."""

from __future__ import annotations

import random

from txmq.runtime.tls import RecordBounds


def test_every_cut_of_records_is_known() -> None:
    records = [b"\x17\x03\x03" + len(body).to_bytes(2, "big") + body for body in (b"", b"x", bytes(300), bytes(16000))]
    whole, ends = b"".join(records), {sum(map(len, records[:count])) for count in range(5)}
    for cut in range(len(whole) + 1):
        bounds = RecordBounds()
        assert bounds.is_within(memoryview(whole)[:cut]) == (cut not in ends)
        assert not bounds.is_within(memoryview(whole)[cut:])


def test_record_in_any_pieces_ends_where_it_ends() -> None:
    rng = random.Random(seed := random.randrange(1 << 32))
    for _ in range(300):
        bounds, ends, sent = RecordBounds(), {0}, b""
        for _ in range(rng.randint(1, 6)):
            body = rng.randbytes(rng.choice((0, 1, 2, 5, 40)))
            sent += b"\x16\x03\x03" + len(body).to_bytes(2, "big") + body
            ends.add(len(sent))
        at = 0
        while at < len(sent):
            until = min(at + rng.randint(1, 12), len(sent))
            assert bounds.is_within(memoryview(sent)[at:until]) == (until not in ends), seed
            at = until
