"""The resolver of a client, as far as its processes go: a forked child begins anew."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import structlog

from tests.unit.xa.xa_support import XAFixture
from tools.simulated.faults import GivenReply
from txmq.client.transaction import background_resolver as module
from txmq.client.transaction.background_resolver import BackgroundResolver
from txmq.xa.resolver import Resolver


class Processes:
    """In place of the system: which process this is, and the threads that were started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = 1
        self.threads: list[Callable[[], None]] = []
        monkeypatch.setattr(module, "current_process", lambda: self.current)
        monkeypatch.setattr(module, "start_daemon", lambda _name, run: self.threads.append(run))


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Processes:
    return Processes(monkeypatch)


def test_one_thread_a_process_whatever_is_added(processes: Processes) -> None:
    world = XAFixture("ab")
    background = BackgroundResolver(world.home)
    for resource in (*world.resources, *world.resources):
        background.add(resource)
    assert len(processes.threads) == 1


def test_how_the_application_logs_is_left_alone(processes: Processes) -> None:
    structlog.reset_defaults()
    BackgroundResolver(XAFixture("a").home).add(XAFixture("a").resources[0])
    assert processes.threads
    assert not structlog.is_configured()


def test_forked_child_takes_over_resources_and_none_of_connections(processes: Processes) -> None:
    world = XAFixture("ab")
    background = BackgroundResolver(world.home)
    background.add(world.resources[0])
    of_parent: Resolver = background._resolver
    of_parent.run_once()
    processes.current = 2
    background.add(world.resources[1])
    assert len(processes.threads) == 2
    of_child = background._resolver
    assert of_child is not of_parent
    assert background._of_parents == [of_parent], "let go, it would close the parent's connections"
    of_child.run_once()
    assert [database.calls.count("open_recovery") for database in world.databases] == [2, 1]


def test_forked_child_begins_with_what_its_parent_has_added(processes: Processes) -> None:
    world = XAFixture("a")
    background = BackgroundResolver(world.home)
    background.add(world.resources[0])
    processes.current = 2
    background.add(world.resources[0])
    background.add(world.resources[0])
    assert len(processes.threads) == 2


def test_child_that_closes_does_not_wait_for_its_parents_answers(processes: Processes) -> None:
    class Parents(GivenReply):
        done = False

        def result(self, timeout: float | None = None) -> bytes:
            assert processes.current == 1, "read from the parent's connection"
            return super().result(timeout)

    world = XAFixture("a")
    background = BackgroundResolver(world.home)
    background.add(world.resources[0])
    background.completed(world.resources[0], "txid", Parents(b""))
    processes.current = 2
    background.stop()
    processes.current = 1
    background.stop()


def test_no_client_waits_while_another_asks_for_homes(monkeypatch: pytest.MonkeyPatch) -> None:
    world, was_held = XAFixture("a"), list[bool]()

    class Asking(Resolver):
        def __init__(self, *arguments: object) -> None:
            was_held.append(module._lock.locked())
            super().__init__(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "Resolver", Asking)
    module.resolver_of(world.home)
    module.stop_resolver(world.home)
    assert was_held == [False]
