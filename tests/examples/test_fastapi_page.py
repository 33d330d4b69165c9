"""docs/how-to/fastapi.md, pasted whole; and its last resource where requests are cancelled in the middle."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from itertools import count
from pathlib import Path
from typing import Any

import httpx
from fastapi import Depends, FastAPI

import txmq
from tests.examples.pasting import PastedPage
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess

AGAIN = """
for number in 42 43; do curl -s -w '%{{http_code}}\\n' -X PUT localhost:{port}/orders/$number \\
    -H 'content-type: application/json' -d '{{"customer": "ben"}}'; done
"""


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


def values(broker: BrokerProcess) -> list[str]:
    with txmq.connect(broker.address) as client:
        return sorted((message.value or b"").decode() for message in client.browse("orders"))


def at_once(page: PastedPage) -> dict[str, Any]:
    """The names of the program with a last resource."""
    names: dict[str, Any] = {"__name__": "shop_at_once"}
    exec(page.files()["shop_at_once.py"], names)
    return names


def rows(page: PastedPage) -> list[int]:
    with closing(sqlite3.connect(page.folder / "fastapi_at_once.db")) as connection:
        return [number for (number,) in connection.execute("SELECT number FROM orders_at_once ORDER BY number")]


def test_service_of_the_page_sends_what_it_commits(tmp_path: Path, broker: BrokerProcess) -> None:
    page = PastedPage("docs/how-to/fastapi.md", tmp_path, broker)
    page.write()
    begin, go_on, now = page.blocks("sh")
    shown = page.run(begin, go_on, AGAIN.format(port=page.ports["8000"]), now)
    assert re.findall(r"(?m)(409|201)$", shown) == ["409", "201"]
    assert '{"order":42,"customer":"ada"}' in shown
    assert '{"outcome":"committed","txid":"' in shown
    with txmq.connect(broker.address) as client, closing(sqlite3.connect(tmp_path / "fastapi_shop.db")) as connection:
        eventually(lambda: connection.execute("SELECT 1 FROM txmq_outbox").fetchall() == [], "nothing waits")
        assert sorted(message.key or b"" for message in client.browse("orders")) == [b"ada", b"ada", b"ben"]


def test_last_resource_of_the_page_tells_what_became_of_orders(tmp_path: Path, broker: BrokerProcess) -> None:
    page = PastedPage("docs/how-to/fastapi.md", tmp_path, broker)

    async def main() -> None:
        async with running(at_once(page)["app"]) as web:
            answers = await asyncio.gather(*(put(web, number % 12) for number in range(24)))
            assert sorted(answer.status_code for answer in answers) == [201] * 12 + [409] * 12
            txid = next(answer.json()["txid"] for answer in answers if answer.status_code == 201)
            assert (await web.get(f"/transactions/{txid}")).json() == {"outcome": "committed"}
            await asyncio.to_thread(broker.kill)
            away = await put(web, 12)
            assert (away.status_code, away.headers["retry-after"]) == (503, "1")
            await asyncio.to_thread(broker.start)
            assert (await put(web, 12)).status_code == 201

    asyncio.run(main())
    assert rows(page) == list(range(13))
    assert values(broker) == sorted(f"{number} of ada" for number in range(13))


def test_service_ending_with_requests_in_flight_leaves_nothing_torn(tmp_path: Path, broker: BrokerProcess) -> None:
    """As uvicorn does after ``--timeout-graceful-shutdown``: requests are cancelled, and the lifespan ends at once."""
    page = PastedPage("docs/how-to/fastapi.md", tmp_path, broker)
    answered: set[int] = set()

    async def caller(web: httpx.AsyncClient, numbers: Iterator[int]) -> None:
        for number in numbers:
            if (await put(web, number)).status_code == 201:
                answered.add(number)

    async def main(numbers: Iterator[int], enough: int) -> None:
        async with running(at_once(page)["app"]) as web:
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
    found = rows(page)
    eventually(lambda: values(broker) == sorted(f"{number} of ada" for number in found), "rows and messages agree")
    assert answered <= set(found)
    with txmq.connect(broker.address) as client:
        assert client.transactions.list() == []  # the end of the client has waited for all


def test_block_in_a_dependency_commits_both(tmp_path: Path, broker: BrokerProcess) -> None:
    page = PastedPage("docs/how-to/fastapi.md", tmp_path, broker)
    names = at_once(page)
    (dependency,) = (block for block in page.blocks("python") if not block.startswith("# ") and "Depends" in block)
    path, app = tmp_path / "fastapi_at_once.db", FastAPI()
    with txmq.connect(broker.address) as client, client.producer() as producer:
        client.topics.create("orders")
        orders_db = txmq.LastResource("orders-db", connect=lambda: sqlite3.connect(path, check_same_thread=False))
        names["prepare"](orders_db)
        exec(dependency, {"app": app, "producer": producer, "orders_db": orders_db, "Depends": Depends})

        async def main() -> None:
            async with running(app) as web:
                assert (await web.post("/orders?number=7")).status_code == 200

        asyncio.run(main())
        orders_db.close()
    assert (rows(page), values(broker)) == ([7], ["created"])
