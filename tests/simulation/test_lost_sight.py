"""An XA COMMIT that meets the end of the owner's session (MariaDB 10.11): believing its answer is caught by a seed.

The resolver that ships waits for the marker row's lock after the answer, and for the end of a session that it kills:
the same seed finds nothing then.
"""

from __future__ import annotations

import pytest

from tests.simulation.caught import seed_that_catches
from tools.simulated import xa_resource
from tools.simulated.xa_resource import SimulatedXARecovery
from tools.simulation import bank
from tools.simulation.run import simulate
from txmq.xa.two_phase.resource_ports import Ended
from txmq.xid import Xid

SEEDS = range(1, 201)  # about one in 20 finds it


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most XA COMMITs of owners are lost; a session that ends is met by the resolver's."""
    for name, chance in {"LOST_COMMITS": 0.8, "SLOW_ENDS": 1.0, "LOST_SIGHT": 1.0}.items():
        monkeypatch.setattr(bank, name, chance)


def test_commit_that_does_not_wait_for_the_marker_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def commit(recovery: SimulatedXARecovery, xid: Xid) -> Ended:
        return xa_resource._ended(lambda: recovery._session.xa_commit(xid))

    with monkeypatch.context() as mutated:
        mutated.setattr(SimulatedXARecovery, "commit", commit)
        # complete was sent, and the rows come with the next restart
        seed = seed_that_catches(simulate, "^Violation: (P3|P4|P5: prepared)", first=[19], then=SEEDS)
    assert simulate(seed).error is None


def test_kill_that_does_not_wait_for_the_session_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as mutated:
        mutated.setattr(xa_resource, "_GONE_TRIES", 0)
        finding = "^Violation: P5: committed in bank-. while a killed session ended"
        seed = seed_that_catches(simulate, finding, first=[28], then=SEEDS)
    assert simulate(seed).error is None
