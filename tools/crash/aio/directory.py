"""The aio campaign's world: that of XA, and a SQLite file as one more last resource."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from typing import Final

import txmq
from tools.crash.directory import LAST_RESOURCE, ORDERS, PARTITIONS, RESOURCE, CampaignDirectory
from tools.crash.xa.directory import LEDGER, XA_PARTITIONS, XaCampaignDirectory

AIO_PARTITIONS: Final = {**XA_PARTITIONS, ORDERS: PARTITIONS[ORDERS]}
LAST_RESOURCES: Final = (LAST_RESOURCE, LAST_RESOURCE, LEDGER, LEDGER)


class AioCampaignDirectory(XaCampaignDirectory):
    """One campaign's directory; the servers run in the process that called ``create``."""

    @property
    def partitions(self) -> Mapping[str, int]:
        return AIO_PARTITIONS

    def make_databases(self) -> None:
        CampaignDirectory.make_databases(self)
        super().make_databases()

    def resolver_resources(self) -> str:
        return CampaignDirectory.resolver_resources(self) + "\n" + super().resolver_resources()

    def install(self, client: txmq.Client) -> dict[str, str]:
        return CampaignDirectory.install(self, client) | super().install(client)

    def rows(self) -> dict[str, list[tuple[str, str]]]:
        return {**super().rows(), RESOURCE: CampaignDirectory.rows(self)[RESOURCE]}


def insert_order(connection: sqlite3.Connection, operation: str, key: str) -> None:
    """One row."""
    connection.execute("INSERT INTO orders (rowid_text, key) VALUES (?, ?)", (operation, key))
