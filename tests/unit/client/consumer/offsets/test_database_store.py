"""Which connections a ``DatabaseOffsetStore`` takes; on real databases: tests/services/consumer."""

from __future__ import annotations

import sqlite3

import aiosqlite
import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

import txmq
from txmq.errors import ConfigError

STORE = txmq.DatabaseOffsetStore(lambda: sqlite3.connect(":memory:"))


def test_asynchronous_connection_needs_consumer_of_aio() -> None:
    with pytest.raises(ConfigError, match=r"aiosqlite is an asynchronous driver: a consumer of txmq\.aio"):
        STORE.connection_of(aiosqlite.connect(":memory:"))


def test_session_is_refused_with_the_store_that_takes_it() -> None:
    engine = create_engine("sqlite://")
    for given in (Session(engine), engine):
        with pytest.raises(ConfigError, match=r"offset_store = txmq\.sqlalchemy\.DatabaseOffsetStore"):
            STORE.connection_of(given)
    pooled = engine.raw_connection()
    assert STORE.connection_of(pooled) is pooled
    pooled.close()
    engine.dispose()
