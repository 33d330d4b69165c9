"""Nothing of the client waits while it holds a lock: on an event loop that would stop all of it."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import Counter
from collections.abc import Awaitable
from typing import Any, ClassVar

import pytest

import txmq
import txmq.aio
from txmq.runtime import strands
from txmq.testing.processes.broker import BrokerProcess, free_port


class WatchedLock:
    """A lock that counts itself as held by the strand that took it."""

    held: ClassVar[Counter[strands.Strand | None]] = Counter()

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def locked(self) -> bool:
        return self._lock.locked()

    def __enter__(self) -> bool:
        taken = self._lock.acquire(timeout=10.0)
        assert taken
        self.held[strands.current()] += 1
        return taken

    def __exit__(self, *_: object) -> None:
        self.held[strands.current()] -= 1
        self._lock.release()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many locks each strand held when it waited."""
    found: list[int] = []
    wait_for = strands.Strand.wait_for

    def watched(self: strands.Strand, awaited: Awaitable[Any]) -> Any:
        found.append(WatchedLock.held[self])
        return wait_for(self, awaited)

    for name, module in list(sys.modules.items()):
        if name.startswith("txmq.client.") and vars(module).get("Lock") is threading.Lock:
            monkeypatch.setattr(module, "Lock", WatchedLock)
    monkeypatch.setattr(strands.Strand, "wait_for", watched)
    return found


def test_no_strand_waits_while_it_holds_a_lock(tmp_path_factory: pytest.TempPathFactory, waits: list[int]) -> None:
    async def life(broker: BrokerProcess) -> None:
        async with await txmq.aio.connect(broker.address) as client, client.producer() as producer:
            await client.topics.create("t", partitions=2)
            await producer.send_many("t", [(b"k", bytes(1000))] * 9000)
            await asyncio.gather(*(producer.send("t", bytes(1000)) for _ in range(20)))
            async with producer.transaction() as tx:
                await producer.send("t", b"x")
            await tx.wait_visible()
            consumer = await client.consumer("g", ["t"], max_retries=0, retry_store=str(directory / "retries"))
            for message in await consumer.poll(10, timeout=60.0):
                await message.reject()
            spool, options = str(directory / "spool"), txmq.OrderedOptions(timeout=0.2)
            ordered = await client.ordered_producer(txmq.KeyHashSelector(), spool, options=options)
            await ordered.send("t", b"x")
            await asyncio.to_thread(broker.kill)
            assert (await ordered.send("t", b"x")).status is txmq.SendStatus.SPOOLED
            sends = [asyncio.create_task(producer.send("t", b"x", timeout=60.0)) for _ in range(20)]
            with pytest.raises(txmq.BrokerAwayError):
                await producer.send("t", b"x", timeout=0.1)
            await asyncio.to_thread(broker.start)
            await asyncio.gather(*sends)
            await ordered.flush(60.0)
            assert len([one async for one in client.browse("t")]) == 9043
            found = 0
            while found < 9043:
                for message in await consumer.poll(500, timeout=60.0):
                    found += 1
                    await message.ack(sync=found % 1000 == 0)

    directory = tmp_path_factory.mktemp("locks")
    with BrokerProcess(directory, listen=f"127.0.0.1:{free_port()}") as broker:
        asyncio.run(life(broker))
    assert len(waits) > 20
    assert set(waits) == {0}
    assert len(WatchedLock.held) > 1
