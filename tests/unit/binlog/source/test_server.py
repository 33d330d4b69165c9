"""Whether a server's binlog is still the one in which a position was read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from txmq.binlog.changes import Origin
from txmq.binlog.errors import SourceError
from txmq.binlog.position import Position
from txmq.binlog.source.options import SourceOptions
from txmq.binlog.source.server import Server


class Told(Server):
    """A server that says what a test has written down: its files with their sizes, and GTIDs at the position."""

    def __init__(self, files: Sequence[tuple[str, int]], found: str | None) -> None:
        super().__init__(SourceOptions(name="test", server_id=9, captures=lambda table: True))
        self.origin = Origin("mariadb", "here")
        self._files, self._found = files, found

    def rows(self, sql: str, *parameters: object) -> Sequence[Any]:
        return self._files if sql.startswith("SHOW BINARY LOGS") else [(self._found,)]


FILES = (("binlog.000002", 900), ("binlog.000003", 900))


def position(gtids: str, file: str = "binlog.000003", **more: Any) -> Position:
    """A position that was saved in a file."""
    given: dict[str, Any] = {"file": file, "offset": 500, "server": "here"}
    return Position("mariadb", gtids, **given | more)


@pytest.mark.parametrize(
    ("saved", "files", "found"),
    [
        (position("0-1-7"), FILES, "0-1-7"),
        (position(""), FILES, ""),
        (position("0-1-7", rows=3, partial="0-1-8"), FILES, "0-1-8"),
        (position("0-1-7,1-2-9"), FILES, "0-1-4,1-2-9"),  # domain 0 was read from further on
        (position("0-1-7", file="binlog.000001"), FILES, None),  # purged
        (position("0-1-7", file="other.000009"), FILES, None),  # the server's log-bin was changed
        (position("0-1-7"), [("binlog.000003", 5 << 30)], None),  # offsets of events have 32 bits
        (position("0-1-7", server=""), FILES, None),
    ],
)
def test_position_in_the_same_binlog_is_taken(
    saved: Position, files: Sequence[tuple[str, int]], found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Told(files, found)
    monkeypatch.setattr(server, "_knows", lambda gtids: True)
    server.check_position(saved)


@pytest.mark.parametrize(
    ("saved", "found"),
    [
        (position("0-1-7"), None),  # nothing ends there
        (position("0-1-7"), "0-1-6"),
        (position("0-1-7"), "0-1-8"),
        (position("0-1-7"), "0-2-7"),
        (position("0-1-7"), ""),
        (position(""), "0-1-1"),
        (position("0-1-7", rows=3, partial="0-1-8"), "0-1-7"),
        (position("0-1-7", file="binlog.000004"), None),
    ],
)
def test_position_in_a_binlog_that_was_reset_is_refused(saved: Position, found: str | None) -> None:
    with pytest.raises(SourceError, match="it was reset"):
        Told(FILES, found).check_position(saved)
