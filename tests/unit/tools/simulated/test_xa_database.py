"""The database in memory that prepares branches."""

from __future__ import annotations

import pytest

from tools.simulated.xa_answers import Fault, SimulatedError
from tools.simulated.xa_database import SimulatedSession, SimulatedXADatabase


def test_call_that_meets_a_crash_does_nothing() -> None:
    """A fault may take time: the server dies meanwhile, by the hand of another session."""
    database = SimulatedXADatabase()
    session = database.connect()

    def dies_meanwhile(_session: SimulatedSession, _call: str) -> Fault | None:
        database.crash()
        return None

    database.fault = dies_meanwhile
    with pytest.raises(SimulatedError):
        session.insert("rows", 1)
    database.start()
    assert not database.committed
    with pytest.raises(SimulatedError):
        session.touch()
