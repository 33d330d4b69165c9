"""``client.settle`` of ``txmq.aio``: what a dead owner left in doubt is finished by a task of the loop."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import txmq
import txmq.aio
from txmq.testing.processes.broker import BrokerProcess

from .shops import SQLiteShop

WAIT_S, SCENARIO_S = 60.0, 300.0  # a busy machine takes minutes for what is done in seconds
OWNER = """
import sqlite3, sys, txmq
db = txmq.LastResource("shop", connect=lambda: sqlite3.connect(sys.argv[2]))
producer = txmq.connect(sys.argv[1]).producer()
with producer.transaction(db) as tx:
    tx.connection(db).execute("INSERT INTO orders (value) VALUES (?)", (b"left",))
    producer.send("settled", b"left")
"""


def test_transaction_of_a_dead_owner_is_settled(shared_broker: BrokerProcess, tmp_path: Path) -> None:
    shop = SQLiteShop(tmp_path)
    shop.resource.install()

    async def main() -> None:
        async with await txmq.aio.connect(shared_broker.address) as client:
            await client.topics.create("settled")
            crash = os.environ | {"TXMQ_CRASH": "client.tx.db_committed:1"}
            command = [sys.executable, "-c", OWNER, shared_broker.address, str(shop.path)]
            ended = await asyncio.to_thread(subprocess.run, command, env=crash, check=False, timeout=WAIT_S)
            assert ended.returncode != 0
            assert shop.rows() == [b"left"]
            await client.settle(shop.resource)
            async with asyncio.timeout(SCENARIO_S):
                while [message.value async for message in client.browse("settled")] != [b"left"]:
                    await asyncio.sleep(0.01)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
    shop.resource.close()
