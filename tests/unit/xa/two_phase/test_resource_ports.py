"""Xids of our branches: what they say, and what is not ours."""

from __future__ import annotations

import pytest

from txmq.xa.two_phase.resource_ports import Bqual, ListedXid, decode_bqual, encode_bqual, listed_xid
from txmq.xid import FORMAT_ID, TxId, Xid, xid_sql

UUID = "0123456789abcdef" * 2
TXID = TxId((1 << 64) - 1, (1 << 64) - 1, (1 << 48) - 1, (1 << 56) - 1)
LONGEST = Bqual(UUID, (1 << 60) - 1, (1 << 56) - 1)


@pytest.mark.parametrize("bqual", [LONGEST, Bqual(UUID, 0, 0), Bqual(UUID, 1_790_000_000_000, 42)])
def test_bqual_is_read_as_it_was_written_and_fits_xid(bqual: Bqual) -> None:
    text = encode_bqual(bqual)
    assert decode_bqual(text) == bqual
    assert len(text) <= 64


@pytest.mark.parametrize(
    "text", [b"", b"x", UUID.encode(), f"{UUID}.1".encode(), f"{UUID}.1.g".encode(), f"{UUID}.1.1\n".encode()]
)
def test_a_bqual_of_somebody_else_is_none(text: bytes) -> None:
    assert decode_bqual(text) is None


def test_an_xid_of_ours_says_everything() -> None:
    xid = Xid(FORMAT_ID, str(TXID).encode(), encode_bqual(LONGEST))
    assert listed_xid(xid) == ListedXid(xid, TXID, *LONGEST)


@pytest.mark.parametrize(
    "xid",
    [
        Xid(1, str(TXID).encode(), encode_bqual(LONGEST)),
        Xid(FORMAT_ID, b"gtrid", encode_bqual(LONGEST)),
        Xid(FORMAT_ID, b"\xff\xfe", encode_bqual(LONGEST)),
        Xid(FORMAT_ID, str(TXID).encode(), b"branch"),
    ],
)
def test_an_xid_of_another_transaction_manager_is_none(xid: Xid) -> None:
    assert listed_xid(xid) is None


def test_xids_are_written_in_hex() -> None:
    assert xid_sql(Xid(7, b"\xff'\\", b"")) == "X'ff275c',X'',7"


@pytest.mark.parametrize(
    "xid", [Xid(7, b"", b"b"), Xid(7, b"x" * 65, b""), Xid(7, b"x", b"y" * 65), Xid(-1, b"x", b"")]
)
def test_oversized_or_empty_xid_is_refused_before_the_server(xid: Xid) -> None:
    with pytest.raises(ValueError, match="no xid"):
        xid_sql(xid)
