"""How long a client may stand still in a transaction of PostgreSQL: the block's time, or less if that was set."""

from __future__ import annotations

from typing import Any

import pytest

from txmq.xa.database.installation import IdleLimit


class Shows:
    """A connection on which SHOW has one answer."""

    description = ()
    rowcount = 1

    def __init__(self, shown: str) -> None:
        self.shown, self.asked = shown, 0

    def cursor(self) -> Shows:
        return self

    def execute(self, _statement: str) -> None:
        self.asked += 1

    def fetchall(self) -> list[tuple[str]]:
        return [(self.shown,)]

    def close(self) -> None:
        """As of a cursor."""


@pytest.mark.parametrize(
    ("shown", "told"),
    [
        ("0", "32s"), ("1h", "32s"), ("1d", "32s"), ("1min", "32s"), ("33s", "32s"), ("32s", ""), ("31500ms", ""),
        ("500ms", ""),
    ],
)  # fmt: skip
def test_smaller_limit_of_the_session_stays(shown: str, told: str) -> None:
    limit, connection = IdleLimit(), Shows(shown)
    given: Any = connection
    for _ in range(2):
        said = limit.in_transaction(given, 20.0)
        assert said == (f"SET LOCAL idle_in_transaction_session_timeout = '{told}'" if told else "")
    assert connection.asked == 1
