"""Transaction ids and XA ids.

A txid names a transaction for ever: cluster id (64 bits, random), id of the home journal (64 bits, random), a session
id that the home broker issued, journaled and never reuses, and a counter of that session. Its text is at most 64
ASCII characters, so that it fits an XA gtrid whole. Source: X/Open XA, section 4.2.
"""

from __future__ import annotations

import re
from typing import NamedTuple

XID_PART_BYTES_MAX = 64  # of a gtrid, and of a bqual
FORMAT_ID_MAX = (1 << 31) - 1  # a long of X/Open's C interface; -1 stands for "no xid"
FORMAT_ID = 0x74786D71  # "txmq"; marks our xids among those of other transaction managers
_NUMBER = r"0|[1-9a-f][0-9a-f]"  # without leading zeros: an id has one form
_BQUAL_TEXT = re.compile(r"[!-~]{0,64}").fullmatch
_TEXT = re.compile(rf"([0-9a-f]{{16}})-([0-9a-f]{{16}})-({_NUMBER}{{0,11}})-({_NUMBER}{{0,15}})\Z")


class TxId(NamedTuple):
    """A transaction id; ``str(txid)`` is its one text form."""

    cluster: int
    home: int
    session: int
    counter: int

    def __str__(self) -> str:
        return f"{self.cluster:016x}-{self.home:016x}-{self.session:x}-{self.counter:x}"

    @classmethod
    def parse(cls, text: str) -> TxId:
        """Read the text form.

        Raises:
            ValueError: ``text`` is not a txid in its one form.
        """
        match = _TEXT.match(text)
        if match is None:
            raise ValueError(f"not a transaction id: {text[:80]!r}")
        cluster, home, session, counter = match.groups()
        return cls(int(cluster, 16), int(home, 16), int(session, 16), int(counter, 16))


def home_word(txid: str) -> str:
    """The home in a transaction id's text, 16 hex digits."""
    return txid[17:33]


class Xid(NamedTuple):
    """An XA id: ``gtrid`` holds the txid's text, ``bqual`` names the branch; both at most 64 bytes."""

    format_id: int
    gtrid: bytes
    bqual: bytes


def is_bqual_text(text: str) -> bool:
    """Whether it may name a branch of txmq's in a database: at most 64 printable ASCII characters, no space."""
    return _BQUAL_TEXT(text) is not None


def branch_xid(txid: str, bqual: str) -> Xid | None:
    """The xid of a branch of txmq's; None if its bqual names none: brokers up to 0.1.0 kept what they were told."""
    return Xid(FORMAT_ID, txid.encode("ascii"), bqual.encode("ascii")) if is_bqual_text(bqual) else None


def xid_sql(xid: Xid) -> str:
    """An xid as MySQL and MariaDB write it, in hex: ``X'..',X'..',7``.

    Raises:
        ValueError: a part is longer than XA allows, the gtrid is empty, or the format id is none.
    """
    sizes = len(xid.gtrid), len(xid.bqual)
    if (
        not 1 <= sizes[0] <= XID_PART_BYTES_MAX
        or sizes[1] > XID_PART_BYTES_MAX
        or not 0 <= xid.format_id <= FORMAT_ID_MAX
    ):
        raise ValueError(f"no xid: format id {xid.format_id}, gtrid of {sizes[0]} bytes, bqual of {sizes[1]}")
    return f"X'{xid.gtrid.hex()}',X'{xid.bqual.hex()}',{xid.format_id}"
