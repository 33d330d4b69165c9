"""The examples on ``txmq.aio``, FastAPI's and Starlette's, answer as their pages say."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

import txmq
from examples import order_service_fastapi_aio, order_service_starlette
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.mariadb import MariaDB

ORDERS = 24


@asynccontextmanager
async def running(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    """The application as a server runs it, its beginning and end included."""
    transport = httpx.ASGITransport(app=app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://shop", timeout=60.0) as web,
    ):
        yield web


async def put(web: httpx.AsyncClient, number: int) -> httpx.Response:
    return await web.put(f"/orders/{number}", json={"customer": "ada"})


def events(broker: BrokerProcess) -> list[int]:
    with txmq.connect(broker.address) as client:
        return sorted(json.loads(message.value or b"")["order"] for message in client.browse("orders"))


def test_fastapi_takes_orders_at_once_each_once(
    broker: BrokerProcess, mariadb: MariaDB, monkeypatch: pytest.MonkeyPatch
) -> None:
    mariadb.execute("CREATE DATABASE shop_aio")
    monkeypatch.setenv("ORDERS_DB", json.dumps(mariadb.connect_arguments() | {"db": "shop_aio"}))
    monkeypatch.setenv("TXMQ_BOOTSTRAP", broker.address)

    async def main() -> None:
        async with running(order_service_fastapi_aio.create_app()) as web:
            answers = await asyncio.gather(*(put(web, number % ORDERS) for number in range(2 * ORDERS)))
            assert sorted(answer.status_code for answer in answers) == [201] * ORDERS + [409] * ORDERS
            txid = next(answer.json()["txid"] for answer in answers if answer.status_code == 201)
            assert (await web.get(f"/transactions/{txid}")).json() == {"outcome": "committed"}
            await asyncio.to_thread(broker.kill)
            away = await put(web, ORDERS)
            assert (away.status_code, away.headers["retry-after"]) == (503, "1")
            assert (await web.get(f"/transactions/{txid[:-1]}fffff")).status_code == 503  # no one of this client's
            await asyncio.to_thread(broker.start)

    asyncio.run(main())
    rows = [number for (number,) in mariadb.execute("SELECT id FROM shop_aio.orders_aio ORDER BY id")]
    assert rows == events(broker) == list(range(ORDERS))


def test_starlette_refuses_orders_while_the_broker_is_away(
    broker: BrokerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = str(tmp_path / "shop.db")
    monkeypatch.setenv("ORDERS_DB", database)
    monkeypatch.setenv("TXMQ_BOOTSTRAP", broker.address)

    async def main() -> None:
        async with running(order_service_starlette.create_app()) as web:
            assert [(await put(web, number)).status_code for number in (1, 2, 1)] == [201, 201, 409]
            await asyncio.to_thread(broker.kill)
            away = await put(web, 3)
            assert (away.status_code, away.headers["retry-after"]) == (503, "1")
            await asyncio.to_thread(broker.start)
            assert (await put(web, 3)).status_code == 201

    asyncio.run(main())
    with closing(sqlite3.connect(database)) as connection:
        rows = [number for (number,) in connection.execute("SELECT id FROM orders_starlette ORDER BY id")]
    assert rows == events(broker) == [1, 2, 3]


@pytest.mark.parametrize("service", ["fastapi", "starlette"])
def test_service_ending_with_requests_in_flight_leaves_nothing_torn(
    broker: BrokerProcess, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, service: str
) -> None:
    """As uvicorn does behind ``--timeout-graceful-shutdown``: requests are cancelled, and the lifespan ends at once."""
    monkeypatch.setenv("TXMQ_BOOTSTRAP", broker.address)
    if service == "fastapi":
        mariadb: MariaDB = request.getfixturevalue("mariadb")
        mariadb.execute("CREATE DATABASE shop_ending")
        monkeypatch.setenv("ORDERS_DB", json.dumps(mariadb.connect_arguments() | {"db": "shop_ending"}))
        create_app: Any = order_service_fastapi_aio.create_app
    else:
        monkeypatch.setenv("ORDERS_DB", str(tmp_path / "shop.db"))
        create_app = order_service_starlette.create_app
    answered: set[int] = set()

    async def caller(web: httpx.AsyncClient, numbers: Iterator[int]) -> None:
        for number in numbers:
            if (await put(web, number)).status_code == 201:
                answered.add(number)

    async def main(numbers: Iterator[int], enough: int) -> None:
        async with running(create_app()) as web:
            tasks = [asyncio.create_task(caller(web, numbers)) for _ in range(16)]
            async with asyncio.timeout(60.0):
                while len(answered) < enough:
                    await asyncio.sleep(0.001)
            for task in tasks:
                task.cancel()
        await asyncio.wait(tasks)

    numbers = count()
    for round_number in range(1, 4):
        asyncio.run(main(numbers, round_number * 20))
    if service == "fastapi":
        rows = [number for (number,) in mariadb.execute("SELECT id FROM shop_ending.orders_aio ORDER BY id")]
    else:
        with closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
            rows = [number for (number,) in connection.execute("SELECT id FROM orders_starlette ORDER BY id")]
    eventually(lambda: events(broker) == rows, "rows and messages agree")
    assert answered <= set(rows)
    with txmq.connect(broker.address) as client:
        assert client.transactions.list() == []  # the end of the client has waited for all
