"""``txmq`` on an event loop: asyncio's, or uvloop's.

The names, parameters, errors and promises are those of ``txmq``; what waits there is a coroutine here::

    async with await txmq.aio.connect("txmq://127.0.0.1:8123") as client:
        producer = client.producer()
        await producer.send("orders", b"created", key=b"42")

Needs the package greenlet (the extra ``aio``). How it works: ``txmq/runtime/strands.py``.
"""

from __future__ import annotations

from txmq.aio.client import Client, Groups, Topics, Transactions, connect
from txmq.aio.consumer import Consumer, Message
from txmq.aio.half_message import HalfMessage
from txmq.aio.outbox import Outbox, Relay
from txmq.aio.producer import OrderedMessageProducer, Producer
from txmq.aio.transaction import Transaction

__all__ = [
    "Client",
    "Consumer",
    "Groups",
    "HalfMessage",
    "Message",
    "OrderedMessageProducer",
    "Outbox",
    "Producer",
    "Relay",
    "Topics",
    "Transaction",
    "Transactions",
    "connect",
]
