"""Which connections a ``DatabaseOffsetStore`` takes; on real databases: tests/services/consumer."""

from __future__ import annotations

import sqlite3

import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

import txmq
from txmq.errors import ConfigError

STORE = txmq.DatabaseOffsetStore(lambda: sqlite3.connect(":memory:"))


class Pooled:
    """What asyncpg's pool gives; these tests run on Pythons that have no such driver."""

    __module__ = "asyncpg.pool"


def test_asynchronous_connection_needs_consumer_of_aio() -> None:
    with pytest.raises(ConfigError, match=r"asyncpg is an asynchronous driver: a consumer of txmq\.aio"):
        STORE.connection_of(Pooled())


def test_session_is_refused_with_the_store_that_takes_it() -> None:
    engine = create_engine("sqlite://")
    for given in (Session(engine), engine):
        with pytest.raises(ConfigError, match=r"offset_store = txmq\.sqlalchemy\.DatabaseOffsetStore"):
            STORE.connection_of(given)
    pooled = engine.raw_connection()
    assert STORE.connection_of(pooled) is pooled
    pooled.close()
    engine.dispose()
