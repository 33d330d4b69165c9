"""The service on AsyncSession and asyncpg: what is committed is told, each once and in order; what is not, is not."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import psycopg
import pytest

import txmq
from examples import order_service_sqlalchemy as service
from tests.examples.test_order_services_aio import running
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.postgresql import PostgreSQL

ORDERS = 12
TOLD_S = 60.0
Told = list[tuple[int, str | None]]


@pytest.fixture
def app(broker: BrokerProcess, postgresql: PostgreSQL, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("ORDERS_DB", f"postgresql://postgres@127.0.0.1:{postgresql.port}/{postgresql.database}")
    monkeypatch.setenv("TXMQ_BOOTSTRAP", broker.address)
    with txmq.connect(broker.address) as client:
        client.topics.create("orders", partitions=2)
    return service.create_app()


async def put(web: httpx.AsyncClient, number: int) -> int:
    body = {"customer": "ada", "articles": ["tea", "none", "cup"]}
    answer = await web.put(f"/orders/{number}", json=body)
    assert answer.status_code != 201 or answer.json() == {"missing": ["none"]}
    return answer.status_code


def rows(postgresql: PostgreSQL) -> Told:
    asked = (
        "SELECT number, NULL FROM orders_async UNION ALL SELECT number, article FROM order_lines "
        "ORDER BY 1, 2 NULLS FIRST"
    )
    with psycopg.connect(postgresql.conninfo()) as connection:
        return connection.execute(asked).fetchall()


def told(broker: BrokerProcess) -> Told:
    with txmq.connect(broker.address) as client:
        found = [json.loads(message.value or b"") for message in client.browse("orders")]
    return [(one["order"], one.get("article")) for one in found]


def test_orders_are_told_through_failures_of_all_parts(
    app: Any, broker: BrokerProcess, postgresql: PostgreSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with running(app) as web:
            with psycopg.connect(postgresql.conninfo()) as connection:
                connection.execute("INSERT INTO articles VALUES ('tea'), ('cup')")
            answers = await asyncio.gather(*(put(web, number % ORDERS) for number in range(2 * ORDERS)))
            assert sorted(answers) == [201] * ORDERS + [409] * ORDERS
            await asyncio.to_thread(broker.kill)
            assert await put(web, ORDERS) == 201
            await timed_out(web)
            await asyncio.to_thread(postgresql.restart)
            assert await put(web, ORDERS + 2) in (201, 503)  # a connection of the pool may be the old server's
            assert await put(web, ORDERS + 3) in (201, 503, 409)
            await asyncio.to_thread(broker.start)
            await asyncio.to_thread(arrive)

    async def timed_out(web: httpx.AsyncClient) -> None:
        """An order that waits for a row longer than it may."""
        with monkeypatch.context() as patch, psycopg.connect(postgresql.conninfo()) as connection:
            patch.setattr(service, "REQUEST_S", 0.3)
            connection.execute("INSERT INTO orders_async VALUES (%s, 'eve')", (ORDERS + 1,))
            assert await put(web, ORDERS + 1) == 503
            connection.rollback()

    def arrive() -> None:
        eventually(lambda: len(told(broker)) == len(rows(postgresql)), "all is told", TOLD_S)

    asyncio.run(main())
    assert sorted(told(broker), key=lambda one: (one[0], one[1] or "")) == rows(postgresql)
    for number in range(ORDERS + 1):
        assert [article for order, article in told(broker) if order == number] == [None, "tea", "cup"]
    assert ORDERS + 1 not in {number for number, _ in rows(postgresql)}
