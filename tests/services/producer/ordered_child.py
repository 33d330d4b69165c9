"""A process that sends numbered messages of some keys in order, and says what became of each; it may be killed."""

from __future__ import annotations

import asyncio
import sys

import txmq
import txmq.aio

SELECTOR = txmq.KeyHashSelector()
OPTIONS = txmq.OrderedOptions(timeout=1.0)


def main(address: str, spool: str, life: str, keys: int, kind: str) -> None:
    """Send ``<life>:<number>`` under each key in turn, until the end of the process.

    A line ``<life>:<number> <key>`` on standard output says that the message is acknowledged or spooled.
    """
    if kind == "loop":
        asyncio.run(_on_loop(address, spool, life, keys))
    with (
        txmq.connect(address) as client,
        (
            client.ordered_producer(SELECTOR, spool, options=OPTIONS)
            if kind == "ordered"
            else client.producer(retry_store=spool, timeout=1.0)
        ) as producer,
    ):
        number = 0
        while True:
            for key in range(keys):
                _tell(life, number, key, producer.send("t", f"{life}:{number}".encode(), b"%d" % key))
            number += 1


async def _on_loop(address: str, spool: str, life: str, keys: int) -> None:
    """The same by a task for each key, with a retry store."""
    async with await txmq.aio.connect(address) as client, client.producer(retry_store=spool, timeout=1.0) as producer:

        async def send(key: int) -> None:
            number = 0
            while True:
                _tell(life, number, key, await producer.send("t", f"{life}:{number}".encode(), b"%d" % key))
                number += 1

        await asyncio.gather(*map(send, range(keys)))


def _tell(life: str, number: int, key: int, result: txmq.SendResult) -> None:
    print(f"{life}:{number} {key} {result.status.value}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5])
