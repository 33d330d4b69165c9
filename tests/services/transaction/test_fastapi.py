"""A transaction block as a dependency of FastAPI: entered, used and left in different contexts and threads."""

# ruff: noqa: B008  how FastAPI is told of a dependency

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import Depends, FastAPI, HTTPException

import txmq
from tests.services.loop_client import Connect
from tests.services.sqlite_shop import INSERT, SQLiteShop
from txmq.client.transaction.block import Transaction
from txmq.errors import TransactionStateError
from txmq.testing.processes.broker import BrokerProcess


class Service(SQLiteShop):
    """A web application; each request is one transaction."""

    def __init__(self, broker: BrokerProcess, path: Path, connect: Connect = txmq.connect) -> None:
        super().__init__(broker, path, connect)
        self.ended: list[txmq.Outcome] = []
        self.app = FastAPI()

    def unit(self) -> Iterator[Transaction]:
        """The ordinary synchronous dependency."""
        tx = None
        try:
            with self.producer.transaction(self.resource) as tx:
                yield tx
        finally:
            if tx is not None:
                self.ended.append(tx.outcome)

    async def unit_on_the_loop(self) -> AsyncIterator[Transaction]:
        """The asynchronous one."""
        with self.producer.transaction(self.resource) as tx:
            yield tx

    def lent(self) -> Iterator[Any]:
        """A dependency that hands out the connection, and no transaction."""
        with self.producer.transaction(self.resource) as tx:
            yield tx.connection(self.resource)
            self.producer.send("orders", b"from the dependency's end", key=b"k")

    def post(self, path: str) -> int:
        """One request; its status. What the endpoint raises comes out."""

        async def ask() -> int:
            transport = httpx.ASGITransport(app=self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://shop") as http:
                return (await http.post(path)).status_code

        return asyncio.run(ask())


@pytest.fixture
def service(broker: BrokerProcess, tmp_path: Path) -> Iterator[Service]:
    with Service.installed(broker, tmp_path / "shop.db") as service:
        yield service


def test_a_message_sent_by_name_is_committed_with_its_row(service: Service) -> None:
    @service.app.post("/{value}")
    def order(value: str, tx: Any = Depends(service.unit)) -> None:
        tx.connection(service.resource).execute(INSERT, (value.encode(),))
        tx.send("orders", value.encode(), key=b"k")

    @service.app.post("/async/{value}")
    async def order_on_the_loop(value: str, tx: Any = Depends(service.unit)) -> None:
        tx.connection(service.resource).execute(INSERT, (value.encode(),))
        tx.send("orders", value.encode(), key=b"k")

    assert [service.post(path) for path in ("/1", "/async/2", "/3")] == [200] * 3
    assert service.messages() == service.rows() == [b"1", b"2", b"3"]
    assert service.ended == [txmq.Outcome.COMMITTED] * 3


def test_message_naming_no_block_is_refused_at_its_row(service: Service) -> None:
    refused: list[Exception] = []

    @service.app.post("/{value}")
    def order(value: str, tx: Any = Depends(service.unit)) -> None:
        tx.connection(service.resource).execute(INSERT, (value.encode(),))
        try:
            service.producer.send("orders", value.encode(), key=b"k")
        except TransactionStateError as error:
            refused.append(error)
            raise

    with pytest.raises(TransactionStateError, match=r"tx\.send"):
        service.post("/1")
    assert (len(refused), service.messages(), service.rows()) == (1, [], [])
    assert service.ended == [txmq.Outcome.ROLLED_BACK]


def test_failed_request_leaves_nothing_and_a_free_database(service: Service) -> None:
    @service.app.post("/{value}")
    def order(value: str, tx: Any = Depends(service.unit)) -> None:
        tx.connection(service.resource).execute(INSERT, (value.encode(),))
        tx.send("orders", value.encode(), key=b"k")
        if value == "bad":
            raise ValueError(value)
        if value == "refused":
            raise HTTPException(404)

    with pytest.raises(ValueError, match="bad"):
        service.post("/bad")
    assert [service.post(path) for path in ("/refused", "/good")] == [404, 200]
    assert service.messages() == service.rows() == [b"good"]
    assert service.ended == [txmq.Outcome.ROLLED_BACK, txmq.Outcome.ROLLED_BACK, txmq.Outcome.COMMITTED]


def test_an_asynchronous_dependencys_block_is_joined(service: Service) -> None:
    @service.app.post("/async/{value}")
    async def on_the_loop(value: str, tx: Any = Depends(service.unit_on_the_loop)) -> None:
        tx.connection(service.resource).execute(INSERT, (value.encode(),))
        service.producer.send("orders", value.encode(), key=b"k")

    @service.app.post("/{value}")
    def in_a_thread(value: str, tx: Any = Depends(service.unit_on_the_loop)) -> None:
        tx.connection(service.resource).execute(INSERT, (value.encode(),))
        service.producer.send("orders", value.encode(), key=b"k")

    assert [service.post(path) for path in ("/async/1", "/2")] == [200, 200]
    assert service.messages() == service.rows() == [b"1", b"2"]


def test_connection_handed_out_without_its_block_marks_user_and_joins(
    service: Service,
) -> None:
    @service.app.post("/stray")
    def stray(connection: Any = Depends(service.lent)) -> None:
        connection.execute(INSERT, (b"1",))
        service.producer.send("orders", b"1", key=b"k")

    @service.app.post("/row")
    def row(connection: Any = Depends(service.lent)) -> None:
        connection.execute(INSERT, (b"2",))

    with pytest.raises(TransactionStateError, match=r"tx\.send"):
        service.post("/stray")
    assert (service.messages(), service.rows()) == ([], [])
    assert service.post("/row") == 200
    assert (service.messages(), service.rows()) == ([b"from the dependency's end"], [b"2"])
