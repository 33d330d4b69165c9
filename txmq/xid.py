"""Transaction ids and XA ids.

A txid names a transaction for ever: cluster id (64 bits, random), id of the home journal (64 bits, random), a session
id that the home broker issued, journaled and never reuses, and a counter of that session. Its text is at most 64
ASCII characters, so that it fits an XA gtrid whole. Source: X/Open XA, section 4.2.
"""

from __future__ import annotations

import re
from typing import NamedTuple

FORMAT_ID = 0x74786D71  # "txmq"; marks our xids among those of other transaction managers
_NUMBER = r"0|[1-9a-f][0-9a-f]"  # without leading zeros: an id has one form
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


class Xid(NamedTuple):
    """An XA id: ``gtrid`` holds the txid's text, ``bqual`` names the branch; both at most 64 bytes."""

    format_id: int
    gtrid: bytes
    bqual: bytes
