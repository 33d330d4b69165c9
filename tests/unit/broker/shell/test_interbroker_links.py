"""Connections to other homes, over real sockets: answers come back, and no stranger at the address is asked."""

from __future__ import annotations

import asyncio
import json
import random
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from tests.logged import said
from tools.simulated.clock import SimClock, SimRandom
from txmq.addresses import TlsFiles
from txmq.broker.cluster.branch_asks import BranchAsk
from txmq.broker.cluster.cluster_view import ClusterView
from txmq.broker.cluster.interbroker_conversation import SILENCE_S_MAX
from txmq.broker.shell.interbroker_links import InterbrokerLinks
from txmq.broker.state.broker_identity import BrokerIdentity
from txmq.broker.state.principals import Principals
from txmq.registry.cluster_metadata import HomeEntry
from txmq.runtime.tls import ClientTls
from txmq.testing.certificates import CertificateAuthority

OWN, HOME = BrokerIdentity(0xC1, 0xA, "own"), 0xB
ASK = BranchAsk(7, HOME, "outcome", "t", {"branch": "b"})
GREETING = json.dumps({"home": f"{HOME:016x}", "cluster": f"{OWN.cluster:016x}"}).encode()
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Asking:
    """Stands in for the core: notes what it is told."""

    def __init__(self, address: str | None) -> None:
        self.told: asyncio.Queue[tuple[object, ...]] = asyncio.Queue()
        self.is_reached, self.is_waiting, self.has_defect = False, True, False
        view = ClusterView()
        view.homes = {HOME: HomeEntry(HOME, "other", 1, address)}
        self.principals = Principals()
        self.state = self
        self.context = SimpleNamespace(
            identity=OWN, cluster=view, now_ms=0, branch_asks=self, state=self, random=SimRandom(random.Random(1))
        )

    def branch_answered(self, ask: BranchAsk, code: int, body: bytes) -> None:
        assert self.is_reached  # it has greeted
        if self.has_defect:
            raise LookupError("half moved")
        self.told.put_nowait(("answered", ask, code, body))

    def reached(self, home: int) -> None:
        """Of ``branch_asks``."""
        self.is_reached = home == HOME

    def waits_for(self, home: int) -> bool:
        """Of ``state``."""
        assert home == HOME
        return self.is_waiting

    def failed(self, error: BaseException) -> None:
        """Of the server."""
        self.told.put_nowait(("failed", error))

    def home_lost(self, home: int) -> None:
        self.told.put_nowait(("lost", home))


async def _other_home(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers in two pieces."""
    assert (await reader.readline()).startswith(b"hello 1 ")
    writer.write(b"result 200 %d hello\r\n%b\n" % (len(GREETING) + 1, GREETING))
    assert await reader.readline() == b"outcome t branch=b 7\r\n"
    writer.write(b"result 200 10 7\r\ncommi")
    await writer.drain()
    writer.write(b"tted\n")
    await reader.read()


async def _stranger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readline()
    writer.write(b"result 200 3 hello\r\n{}\n")
    await reader.read()


async def _nested(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """JSON deeper than an interpreter's stack, in a greeting: nobody has proved anything yet."""
    await reader.readline()
    writer.write(b"result 200 15001 hello\r\n" + b"[" * 15_000 + b"\n")
    await reader.read()


async def _hanging_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readline()


async def _frozen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


@asynccontextmanager
async def _serving(serve: Serve, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """A server, by its address. At the end its conversations have ended: a cancelled task closes nothing."""
    talks: list[asyncio.Task[None] | None] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        talks.append(asyncio.current_task())
        try:
            await serve(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0, ssl=tls)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await asyncio.gather(*(one for one in talks if one is not None), return_exceptions=True)
        await asyncio.sleep(0)  # a transport closes its socket in a turn of its own


def _asked(
    serve: Serve,
    *,
    ticks: int = 0,
    has_defect: bool = False,
    tls: tuple[TlsFiles, TlsFiles] | None = None,
    loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
) -> tuple[object, ...]:
    """What the core is told first when it asks what is at the address.

    Args:
        tls: what the other side shows, and what this one trusts.
    """

    async def run() -> tuple[object, ...]:
        context = None
        if tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(tls[0].cert, tls[0].key)
        async with _serving(serve, context) as address:
            core, clock = Asking(address), SimClock()
            core.has_defect = has_defect
            ours = None if tls is None else ClientTls(tls[1])
            links = InterbrokerLinks(core, clock, lambda: None, core.failed, ours)  # type: ignore[arg-type]
            links.ask([ASK])
            for _ in range(ticks):
                clock.advance(1.0)
                links.tick()
            told = await core.told.get()
            links.close()
            return told

    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(asyncio.wait_for(run(), 30))


def test_answer_of_another_home_comes_back() -> None:
    assert _asked(_other_home) == ("answered", ASK, 200, b"committed\n")


def test_answer_that_the_core_cannot_take_in_stops_the_broker() -> None:
    what, error = _asked(_other_home, has_defect=True)
    assert what == "failed"
    assert isinstance(error, LookupError)


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_certificate_whose_names_are_no_text_ends_its_link(
    tmp_path: Path, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """The loop's own TLS reads the names before anybody asks for them."""
    odd = CertificateAuthority(tmp_path / "ca").issue("odd", hosts=["127.0.0.1", b"caf\xe9.org"])
    assert _asked(_other_home, tls=(odd, TlsFiles(odd.ca)), loop=loop) == ("lost", HOME)


@pytest.mark.parametrize("serve", [_stranger, _nested, _hanging_up])
def test_what_is_not_that_home_is_told_as_lost(serve: Serve) -> None:
    assert _asked(serve) == ("lost", HOME)


def test_home_that_stands_still_is_told_as_lost() -> None:
    assert _asked(_frozen, ticks=int(SILENCE_S_MAX) + 2) == ("lost", HOME)


@pytest.mark.parametrize("address", [None, "127.0.0.1:1", "no address"])
def test_home_that_cannot_be_reached_is_told_as_lost(address: str | None) -> None:
    async def run() -> Any:
        core = Asking(address)
        links = InterbrokerLinks(core, SimClock(), lambda: None, core.failed)  # type: ignore[arg-type]
        links.ask([ASK])
        told = await core.told.get()
        links.close()
        links.ask([ASK])  # nothing any more
        return told

    assert asyncio.run(asyncio.wait_for(run(), 30)) == ("lost", HOME)


def test_log_says_once_that_a_home_is_away_and_back(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "txmq")
    serving = [_hanging_up, _hanging_up, _other_home]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await serving.pop(0)(reader, writer)

    async def run() -> list[object]:
        async with _serving(serve) as address:
            core = Asking(address)
            links = InterbrokerLinks(core, SimClock(), lambda: None, core.failed)  # type: ignore[arg-type]
            told = []
            for _ in range(3):
                links.ask([ASK])
                told.append((await core.told.get())[0])
            links.close()
            return told

    assert asyncio.run(asyncio.wait_for(run(), 30)) == ["lost", "lost", "answered"]
    events = [(line["event"], line["home"]) for line in said(caplog)]
    home = f"{HOME:016x}"
    assert events == [("branches wait for another home", home), ("branches go on: another home is back", home)]


@pytest.mark.parametrize("is_waiting", [True, False])
def test_log_says_nothing_of_a_home_that_nothing_waits_for(
    caplog: pytest.LogCaptureFixture, *, is_waiting: bool
) -> None:
    caplog.set_level("INFO", "txmq")

    async def run() -> None:
        core = Asking(None)
        core.is_waiting = is_waiting
        links = InterbrokerLinks(core, SimClock(), lambda: None, core.failed)  # type: ignore[arg-type]
        links.ask([ASK])
        await core.told.get()
        links.tick()
        core.is_waiting = False  # an operator has given the home up
        links.tick()
        links.tick()
        links.close()

    asyncio.run(asyncio.wait_for(run(), 30))
    said_of_it = ["branches wait for another home", "no branch waits for another home any more"]
    assert [line["event"] for line in said(caplog)] == (said_of_it if is_waiting else [])
