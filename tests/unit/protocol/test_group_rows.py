"""Rows cut into requests that every broker takes."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from txmq.protocol.group_rows import PIECE_ROWS, PIECE_SIZE_BYTES, ROWS_MAX, in_pieces

LEAST_REQUEST_SIZE_BYTES = 64 << 10


@given(
    st.lists(
        st.one_of(st.just(["t", 1, 2]), st.just(["t", 1, "x" * 20_000]), st.just(["\u00e9" * 30_000])), max_size=30
    )
)
def test_pieces_hold_every_row_in_order_and_fit_if_possible(rows: list[list[Any]]) -> None:
    pieces = in_pieces(rows)
    assert [row for piece in pieces for row in piece] == rows
    assert all(pieces) or pieces == [[]]
    for piece in pieces:
        assert len(piece) == 1 or len(json.dumps(piece)) <= LEAST_REQUEST_SIZE_BYTES


def test_many_small_rows_are_cut_by_their_number() -> None:
    pieces = in_pieces(["t", number] for number in range(2 * PIECE_ROWS + 1))
    assert [len(piece) for piece in pieces] == [PIECE_ROWS, PIECE_ROWS, 1]
    assert PIECE_ROWS <= ROWS_MAX
    assert PIECE_SIZE_BYTES < LEAST_REQUEST_SIZE_BYTES
