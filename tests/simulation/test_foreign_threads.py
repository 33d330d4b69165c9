"""Threads that another test has left run beside a simulation, and are no part of it."""

from __future__ import annotations

import threading
from typing import Any, cast

from tools.simulation.threads import SimLock, Threads, installed
from tools.simulation.world import Simulation
from txmq.client.transaction import block
from txmq.runtime import threads


def test_foreign_thread_gets_real_doors_beside_a_simulation() -> None:
    made: list[object] = []
    inside = cast("Any", block)
    with installed(Threads(Simulation(1)), {}):
        foreign = threading.Thread(target=lambda: made.append(inside.Lock()))
        foreign.start()
        foreign.join()
        made.append(inside.Lock())
    made.append(inside.Lock())
    real = type(threads.Lock())
    assert [type(one) for one in made] == [real, SimLock, real]
