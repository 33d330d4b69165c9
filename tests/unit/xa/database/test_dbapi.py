"""One statement on a cursor of its own: what is raised, and what is closed."""

from __future__ import annotations

from typing import Any

import pytest

from txmq.xa.database.dbapi import run


class HalfReadCursor:
    """As a cursor of MySQLdb that was interrupted: its result is unread."""

    description = None

    def __init__(self, raised: BaseException) -> None:
        self._raised = raised

    def execute(self, _operation: str) -> None:
        raise self._raised

    def close(self) -> None:
        raise ValueError("Commands out of sync")


class Connection:
    def __init__(self, raised: BaseException) -> None:
        self._raised = raised

    def cursor(self) -> Any:
        return HalfReadCursor(self._raised)

    def commit(self) -> None: ...

    def rollback(self) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize("raised", [KeyboardInterrupt(), LookupError("of the statement")])
def test_cursor_that_cannot_be_closed_hides_no_error(raised: BaseException) -> None:
    with pytest.raises(type(raised)) as caught:
        run(Connection(raised), "SELECT 1")
    assert caught.value is raised
