"""What a broker lets go of is freed at once: its collector never walks over the whole heap."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from tools.images.check import Player
from tools.images.script import Script
from tools.images.scripts import SCRIPTS
from tools.simulated.disk import SimDisk
from txmq.broker.client_connection import ClientConnection
from txmq.broker.commit.data_directory import open_store
from txmq.broker.core import Core
from txmq.broker.shell.connection import Connection
from txmq.broker.shell.server import Server
from txmq.config import BrokerSettings
from txmq.runtime.clocks import OSClock, OSRandom, SteadyClock
from txmq.runtime.os_disk import OSDisk
from txmq.runtime.os_process import collect_young_only

REQUESTS = b"ping p\r\nget nope 0 0 100 g\r\nput nope 0 1 o\r\nx"
ANSWERS = 3
ONE_LIFE = [script for script in SCRIPTS.values() if all(isinstance(step, list) or step.what for step in script.steps)]


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Nothing is collected meanwhile."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def serve(path: Path, loop_factory: Callable[[], Any], test: Callable[[Server, tuple[str, int]], Any]) -> None:
    """Run a test with a server."""
    settings = BrokerSettings(data=str(path), disk_free_bytes_min=0)
    recovered = open_store(OSDisk(str(path)), OSClock(), OSRandom(), settings, files_lock=threading.Lock())
    core = Core(recovered.identity, settings, recovered.state, OSClock().now_ms(), OSRandom())

    async def serving() -> None:
        server = Server(core, recovered.store, settings, SteadyClock(OSClock()))
        address = await server.start("127.0.0.1", 0)
        try:
            await test(server, address)
        finally:
            await server.stop()
            recovered.store.close()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(serving())


def ask(address: tuple[str, int]) -> None:
    with socket.create_connection(address, 10) as client:
        client.sendall(REQUESTS)
        answers = b""
        while answers.count(b"\r\n") < ANSWERS:
            answers += client.recv(4096) or b"closed\r\n"


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.usefixtures("uncollected")
def test_a_lost_connection_is_freed_at_once(tmp_path: Path, loop_factory: Callable[[], Any]) -> None:
    async def come_and_go(server: Server, address: tuple[str, int]) -> None:
        for _ in range(5):
            await asyncio.get_running_loop().run_in_executor(None, ask, address)
            while server.connections:
                await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert [each for each in connections() if not any(each is known for known in before)] == []

    def connections() -> list[object]:
        return [each for each in gc.get_objects() if issubclass(type(each), (Connection, ClientConnection))]

    before = connections()  # of other tests, whose brokers are kept by what pytest keeps
    serve(tmp_path, loop_factory, come_and_go)


@pytest.mark.parametrize("script", ONE_LIFE, ids=lambda script: script.name)
@pytest.mark.usefixtures("uncollected")
def test_no_request_leaves_a_cycle(script: Script) -> None:
    player = Player(script, SimDisk())
    player.start(player.disk)
    gc.collect()
    player.play()
    assert player.node.state.sessions
    assert gc.collect() == 0


def test_the_whole_heap_is_never_walked_over() -> None:
    before = gc.get_threshold()
    try:
        collect_young_only()
        young, middle, old = gc.get_threshold()
    finally:
        gc.set_threshold(*before)
    assert (young, middle) == before[:2]
    assert old > 1_000_000
