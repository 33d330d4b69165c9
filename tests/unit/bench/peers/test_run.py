"""A run of peers: in turns; what is missing, declined or broken is a line with its reason, and takes nothing along."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.model import NotInstalledError, Result
from bench.peers.jars import java
from bench.peers.model import Link, Peer, Publish, Reader, Running
from bench.peers.processes import require_program
from bench.peers.run import Plan, run
from bench.peers.table import markdown
from bench.peers.works import ALONE, BY_TASKS, FLYING, TASKS, TRANSACTIONS

INSTALL = "not installed: apt-get install some-broker"
PUBLISHED: list[str] = []  # names of peers, in the order of their messages


class MemoryLink(Link):
    """Acknowledges at once; has no transactions."""

    def __init__(self, name: str) -> None:
        self.name = name

    def publish(self, value: bytes) -> None:
        if self.name == "broken":
            raise OSError("no disk")
        PUBLISHED.append(self.name)

    def publish_all(self, values: Sequence[bytes]) -> None:
        for value in values:
            self.publish(value)

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Memory(Peer):
    """A peer in memory.

    Attributes:
        missing: why it cannot be started.
    """

    missing: str = ""

    @contextmanager
    def start(self, directory: Path) -> Iterator[Running]:
        if self.missing:
            raise NotInstalledError(self.missing)
        yield Running(self.name, list)

    def connect(self, address: str) -> Link:
        return MemoryLink(address)

    def reader(self, address: str) -> Reader:
        raise NotImplementedError


ONE, TWO, BROKEN = (Memory(name, f"broker {name}", "nothing") for name in ("one", "two", "broken"))
ABSENT = Memory("absent", "broker absent", "nothing", missing=INSTALL)


def measured(directory: Path, peers: Sequence[Peer], *works: str, rounds: int = 3) -> dict[str, Result]:
    results: list[Result] = []
    run(Plan(peers, works, rounds, 0.001, directory), results, lambda _: None)
    return {result.row.name: result for result in results}


def test_peer_that_is_not_installed_fails_nothing(tmp_path: Path) -> None:
    results = measured(tmp_path, (ABSENT, ONE), ALONE.name)
    assert (results["absent-alone"].missing, results["absent-alone"].verdict) == (INSTALL, "")
    assert len(results["one-alone"].samples["rate"]) == 3
    assert INSTALL in markdown(list(results.values()), {"cores": "2", "load before": "0"}, (ABSENT, ONE))


def test_declined_work_is_a_line_with_its_reason(tmp_path: Path) -> None:
    result = measured(tmp_path, (ONE,), TRANSACTIONS.name)["one-tx"]
    assert (result.missing, result.failure, result.samples) == ("no transactions", None, {})


def test_tasks_share_a_producer_that_is_closed(tmp_path: Path) -> None:
    under_way, at_once, ended = 0, list[int](), list[str]()

    @dataclass(frozen=True)
    class Loops(Memory):
        @asynccontextmanager
        async def tasks(self, address: str) -> AsyncIterator[Publish]:
            async def publish(_: bytes) -> None:
                nonlocal under_way
                under_way += 1
                await asyncio.sleep(0)
                at_once.append(under_way)
                under_way -= 1

            yield publish
            ended.append(address)

    results = measured(tmp_path, (Loops("loops", "broker with tasks", "nothing"), ONE), BY_TASKS.name, rounds=2)
    assert len(results["loops-tasks"].samples["rate"]) == 2
    assert (max(at_once), ended) == (TASKS, ["loops"])
    assert results["one-tasks"].missing == "no client for asyncio is measured"


def test_broken_peer_takes_no_figures_of_others_along(tmp_path: Path) -> None:
    results = measured(tmp_path, (BROKEN, ONE), FLYING.name)
    assert results["broken-in-flight"].failure == "OSError: no disk"
    assert len(results["one-in-flight"].samples["rate"]) == 3


def test_peers_are_measured_in_turns(tmp_path: Path) -> None:
    PUBLISHED.clear()
    measured(tmp_path, (ONE, TWO), ALONE.name, rounds=2)
    turns = [name for number, name in enumerate(PUBLISHED) if number == 0 or PUBLISHED[number - 1] != name]
    assert turns == ["one", "two"] * 3  # warm-up, and two rounds


def test_jars_that_are_not_there_name_their_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(NotInstalledError, match=r"bench\.peers\.jars kafka"):
        java("kafka", "kafka.Kafka", [])


def test_program_is_taken_from_the_cache_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(NotInstalledError, match="apt-get install nothing"):
        require_program("no-such-server", "apt-get install nothing")
    program = tmp_path / "txmq-peers" / "bin" / "no-such-server"
    program.parent.mkdir(parents=True)
    program.touch(mode=0o755)
    assert require_program("no-such-server", "") == str(program)
