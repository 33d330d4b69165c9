"""Positions in a binlog: which transactions are published, and how much of the next one.

A global transaction id (GTID) names a transaction on every server of a replication topology, so that a position holds
after a fail-over. A set of them is immutable, and each flavor has its own:

=======  ==================================================  =====================================================
MariaDB  the last transaction of each domain: ``0-1-442``    ``domain-server-sequence``, separated by commas
MySQL    all transactions of each server, as intervals       ``uuid:1-5:8,uuid:1-3``
=======  ==================================================  =====================================================

Sources: MariaDB, "Global Transaction ID"; MySQL 8.0, 19.1.3.1 "GTID Format and Storage".
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal, Protocol, Self, get_args

Flavor = Literal["mariadb", "mysql"]

_MARIADB: Final = re.compile(r"(\d{1,10})-(\d{1,10})-(\d{1,20})\Z")
_MYSQL: Final = re.compile(r"([0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12})((?::\d{1,19}(?:-\d{1,19})?)+)\Z")


class GtidSet(Protocol):
    """A set of transactions; immutable. ``str`` gives its one text form."""

    def including(self, gtid: str) -> GtidSet:
        """This set and one transaction more."""

    def covers(self, other: GtidSet) -> bool:
        """Whether each transaction of ``other`` is in this set."""


class MariadbGtids:
    """The last transaction of each domain, and with it all before."""

    __slots__ = ("last",)

    def __init__(self, last: Mapping[int, tuple[int, int]]) -> None:
        self.last = last

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``0-1-442,1-2-7``; the empty text is the set of no transaction.

        Raises:
            ValueError: it is no such text, or names a domain twice.
        """
        last = {}
        for gtid in _parts(text):
            match = _MARIADB.match(gtid)
            if match is None:
                raise ValueError(f"not a GTID of MariaDB (domain-server-sequence): {gtid[:80]!r}")
            domain, server, sequence = map(int, match.groups())
            if domain in last:
                raise ValueError(f"domain {domain} stands twice in {text[:200]!r}")
            last[domain] = (server, sequence)
        return cls(last)

    def including(self, gtid: str) -> MariadbGtids:
        """This position, moved in the domain of ``gtid``."""
        domain, server, sequence = gtid.split("-")
        return self.moved(int(domain), int(server), int(sequence))

    def moved(self, domain: int, server: int, sequence: int) -> MariadbGtids:
        """``including`` for a GTID in numbers: the reader's hot path."""
        return MariadbGtids({**self.last, domain: (server, sequence)})

    def sequence(self, domain: int) -> int:
        """The last sequence number of a domain; 0 if it has none."""
        return self.last.get(domain, (0, 0))[1]

    def covers(self, other: GtidSet) -> bool:
        """By sequence numbers, which rise within a domain (GTID strict mode)."""
        return isinstance(other, MariadbGtids) and all(
            self.sequence(domain) >= sequence for domain, (_server, sequence) in other.last.items()
        )

    def __str__(self) -> str:
        return ",".join(f"{domain}-{server}-{sequence}" for domain, (server, sequence) in sorted(self.last.items()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MariadbGtids) and self.last == other.last

    def __hash__(self) -> int:
        return hash(frozenset(self.last.items()))


Interval = tuple[int, int]  # first and last number, both in it


class MysqlGtids:
    """The executed transactions of each server, in intervals that neither touch nor overlap."""

    __slots__ = ("intervals",)

    def __init__(self, intervals: Mapping[str, tuple[Interval, ...]]) -> None:
        self.intervals = intervals

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``uuid:1-5:8,uuid:1-3``; the empty text is the set of no transaction.

        Raises:
            ValueError: it is no such text; a GTID with a tag (MySQL 8.3) is none.
        """
        found: dict[str, list[Interval]] = {}
        for gtid in _parts(text):
            match = _MYSQL.match(gtid)
            if match is None:
                raise ValueError(f"not a GTID set of MySQL (uuid:first-last, no tags): {gtid[:80]!r}")
            intervals = found.setdefault(match[1].lower(), [])
            for word in match[2][1:].split(":"):
                first, _, last = word.partition("-")
                intervals.append((int(first), int(last or first)))
                if not 1 <= intervals[-1][0] <= intervals[-1][1]:
                    raise ValueError(f"not an interval of transactions: {word}")
        return cls({uuid: _merged(intervals) for uuid, intervals in found.items()})

    def including(self, gtid: str) -> MysqlGtids:
        """This set and ``uuid:number``."""
        uuid, _, number = gtid.partition(":")
        uuid, count = uuid.lower(), int(number)
        intervals = self.intervals.get(uuid, ())
        if intervals and intervals[-1][1] == count - 1:  # nearly always: the next one of the same server
            merged = (*intervals[:-1], (intervals[-1][0], count))
        else:
            merged = _merged([*intervals, (count, count)])
        return MysqlGtids({**self.intervals, uuid: merged})

    def covers(self, other: GtidSet) -> bool:
        return isinstance(other, MysqlGtids) and all(
            any(low <= first and last <= high for low, high in self.intervals.get(uuid, ()))
            for uuid, intervals in other.intervals.items()
            for first, last in intervals
        )

    def __str__(self) -> str:
        return ",".join(
            ":".join([uuid, *(f"{first}-{last}" if last > first else str(first) for first, last in intervals)])
            for uuid, intervals in sorted(self.intervals.items())
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MysqlGtids) and self.intervals == other.intervals

    def __hash__(self) -> int:
        return hash(frozenset(self.intervals.items()))


def parse_gtids(flavor: Flavor, text: str) -> MariadbGtids | MysqlGtids:
    """The set that ``text`` describes.

    Raises:
        ValueError: it is not the text of a set of this flavor.
    """
    return MariadbGtids.parse(text) if flavor == "mariadb" else MysqlGtids.parse(text)


@dataclass(frozen=True, slots=True)
class Position:
    """What is published: every transaction of ``gtids``, and of the next one the first ``rows`` changes.

    Args:
        flavor: of the server, and so of ``gtids``.
        gtids: the set's text.
        rows: changes of the next transaction; above 0 only between the parts of a large one.
        file: the binlog file of the server that was read, for people.
        offset: byte after the last published event in ``file``, for people.
        server: which server was read (MySQL's uuid, MariaDB's fingerprint).
        partial: id of the transaction that ``rows`` counts; empty if ``rows`` is 0.
    """

    flavor: Flavor
    gtids: str
    rows: int = 0
    file: str = ""
    offset: int = 0
    server: str = ""
    partial: str = ""

    def __post_init__(self) -> None:
        if self.flavor not in get_args(Flavor):
            raise ValueError(f"flavor is mariadb or mysql, not {self.flavor!r}")
        if self.rows < 0 or self.offset < 0:
            raise ValueError(f"rows and offset are not below 0: {self.rows}, {self.offset}")
        if bool(self.rows) != bool(self.partial):
            raise ValueError(f"rows are those of a transaction: {self.rows} of {self.partial!r}")

    @property
    def gtid_set(self) -> MariadbGtids | MysqlGtids:
        """The set of published transactions.

        Raises:
            ValueError: ``gtids`` is not the text of one.
        """
        return parse_gtids(self.flavor, self.gtids)

    def covers(self, other: Position) -> bool:
        """Whether all that ``other`` has published is published here."""
        mine, theirs = self.gtid_set, other.gtid_set
        return mine.covers(theirs) and (mine != theirs or self.rows >= other.rows)

    def on_server(self, server: str) -> Position:
        """The same transactions, read from another server: file and offset, which were the former one's, are gone."""
        return replace(self, server=server, file="", offset=0)

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Position:
        """Read what ``to_json`` wrote.

        Raises:
            ValueError: it is something else.
        """
        found: Any = json.loads(text)
        if not isinstance(found, dict) or {"flavor", "gtids"} - found.keys():
            raise ValueError(f"not a position: {str(found)[:80]!r}")
        try:
            position = cls(**found)
        except TypeError as error:
            raise ValueError(f"not a position: {error}") from None
        if not all(isinstance(value, kind) for value, kind in zip(asdict(position).values(), _FIELDS, strict=True)):
            raise ValueError(f"not a position: {str(found)[:200]!r}")
        _ = position.gtid_set
        return position


_FIELDS: Final = (str, str, int, str, int, str, str)


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")] if text.strip() else []


def _merged(intervals: list[Interval]) -> tuple[Interval, ...]:
    merged: list[Interval] = []
    for first, last in sorted(intervals):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return tuple(merged)
