"""What belongs to one loop, called in another: refused by name, and nothing of it is touched."""

from __future__ import annotations

import asyncio
import inspect
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import txmq
import txmq.aio
from txmq.errors import ConfigError
from txmq.testing.processes.broker import BrokerProcess

ELSEWHERE = "belongs to another event loop"
# What looks at nothing but what is there, and what makes an object whose first call is refused.
HARMLESS = {
    "assignment", "stopped", "pending_acks", "spooled", "is_closed", "request_size_bytes_max", "txid", "outcome",
    "inner", "host", "topics", "groups", "transactions", "transaction", "name", "settings", "require_task",
    "connection", "savepoint", "HalfMessage.pending", "Consumer.log_of",
}  # fmt: skip
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "ack": ("message",), "append": (None, "t", b"v", None, None, None, None), "consumer": ("g", ["t"]),
    "half": ("t", b"v"), "ordered_producer": (txmq.KeyHashSelector(), "spool"), "reject": ("message",),
    "run": (print,), "send": ("t", b"v"), "send_async": ("t", b"v"), "send_many": ("t", [(b"k", b"v")]),
}  # fmt: skip


class Owner:
    """One of each kind, in the loop that they belong to; a block is open."""

    def __init__(self, client: txmq.aio.Client, folder: Path) -> None:
        self.client, self.folder = client, folder
        self.resource = txmq.LastResource("shop", connect=lambda: sqlite3.connect(folder / "shop.db"))

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[list[Any]]:
        """All of them."""
        await asyncio.to_thread(self.resource.install)
        await self.client.topics.ensure("t")
        self.producer = self.client.producer(group="g", checker=never)
        self.keeping = self.client.producer(retry_store=str(self.folder / "kept"))
        await self.producer.send_many("t", [(b"k", b"%d" % number) for number in range(4)])
        self.consumer = await self.client.consumer("readers", ["t"])
        self.messages = [await anext(self.consumer), *await self.consumer.poll(1, 5.0)]
        spool = str(self.folder / "spool")
        self.ordered = await self.client.ordered_producer(txmq.KeyHashSelector(), spool)
        self.half = await self.producer.half("t", b"half", key=b"k")
        self.tx = self.producer.transaction(self.resource)
        async with self.tx:
            await self.producer.send("t", b"mine", key=b"k")
            yield [self.client, self.producer, self.keeping, self.consumer, self.ordered, self.half, self.tx]

    async def check(self) -> None:
        """All of them go on as if nobody had called."""
        assert self.tx.outcome is txmq.Outcome.COMMITTED
        await self.half.commit()
        for message in self.messages:
            await message.ack(sync=True)
        await self.consumer.poll(1, 5.0)
        await self.ordered.send("t", b"ordered", key=b"k")
        await self.keeping.send("t", b"kept", key=b"k")
        await self.tx.wait_visible()
        found = [message.value or b"" async for message in self.client.browse("t")]
        assert sorted(found) == sorted([b"0", b"1", b"2", b"3", b"mine", b"half", b"ordered", b"kept"])
        for closing in (self.ordered, self.keeping, self.producer):
            await closing.close()


async def never(_half: txmq.CheckRequest) -> txmq.Resolution:
    return txmq.Resolution.UNKNOWN


def calls_of(one: Any, message: txmq.Message) -> list[tuple[str, Callable[[], Any]]]:
    """Each public name of an object, its blocks and its iteration, as something to call."""
    found: list[tuple[str, Callable[[], Any]]] = []
    for name in dir(type(one)):
        is_special = name in ("__aexit__", "__anext__")
        full = f"{type(one).__name__}.{name}"
        if (name.startswith("_") and not is_special) or {name, full} & HARMLESS:
            continue
        arguments = (None, None, None) if name == "__aexit__" else ARGUMENTS.get(name, ())
        arguments = tuple(message if argument == "message" else argument for argument in arguments)
        if inspect.isfunction(getattr(type(one), name)) and not arguments:
            required = [
                parameter
                for parameter in list(inspect.signature(getattr(type(one), name)).parameters.values())[1:]
                if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            ]
            arguments = ("t",) * len(required)
        function = partial(call, one, name, arguments)
        found.append((full, partial(function, connect=object) if name == "relay" else function))
    return found


def call(one: Any, name: str, arguments: tuple[Any, ...], **named: Any) -> Any:
    found = getattr(one, name)
    return found(*arguments, **named) if callable(found) else found


async def awaited(work: Callable[[], Any]) -> None:
    """To the end of what it gives."""
    found = work()
    if inspect.isawaitable(found):
        await asyncio.wait_for(found, 5.0)
    elif hasattr(found, "__anext__"):
        await anext(found)


async def refused_all(objects: list[Any], message: txmq.Message) -> None:
    """Each call is refused."""
    calls = [each for one in objects for each in calls_of(one, message)]
    assert len(calls) > 30
    told = {}
    for name, work in calls:
        try:
            await awaited(work)
            told[name] = "not refused"
        except Exception as error:  # noqa: BLE001  which one is what is asked
            told[name] = str(error)
    assert {name: what for name, what in told.items() if ELSEWHERE not in what} == {}


def test_client_of_another_loop_is_refused_and_goes_on(shared_broker: BrokerProcess, tmp_path: Path) -> None:
    """In another thread; a strand that one thread has made must not get into the other one's store of them."""

    async def main() -> None:
        async with await txmq.aio.connect(shared_broker.address) as client:
            owner = Owner(client, tmp_path)
            async with owner.opened() as objects:
                # By the executor, not by to_thread: that would take the block's context along.
                in_thread = partial(asyncio.get_running_loop().run_in_executor, None)
                await in_thread(asyncio.run, refused_all(objects, owner.messages[0]))
                for each in (client.producer, owner.consumer.pause):
                    with pytest.raises(RuntimeError, match=ELSEWHERE):
                        await in_thread(each)
            await owner.check()
        owner.resource.close()

    asyncio.run(main())


def test_client_of_an_ended_loop_is_refused(shared_broker: BrokerProcess) -> None:
    async def begin() -> txmq.aio.Client:
        async with await txmq.aio.connect(shared_broker.address) as client:
            return client

    async def use(client: txmq.aio.Client) -> None:
        with pytest.raises(RuntimeError, match=ELSEWHERE):
            client.producer()
        with pytest.raises(RuntimeError, match=ELSEWHERE):
            await client.close()

    asyncio.run(use(asyncio.run(begin())))


def test_databases_are_installed_by_no_client_of_a_loop(shared_broker: BrokerProcess, tmp_path: Path) -> None:
    async def played() -> None:
        async with await txmq.aio.connect(shared_broker.address) as client:
            resource = txmq.LastResource("shop", connect=lambda: sqlite3.connect(tmp_path / "shop.db"))
            with pytest.raises(ConfigError, match=r"takes a client of txmq\.connect"):
                resource.install(client)  # type: ignore[arg-type]
        assert not (tmp_path / "shop.db").exists()

    asyncio.run(played())
