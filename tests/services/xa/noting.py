"""A shop on connections that note what is sent, and lose it when told to."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import MySQLdb
import MySQLdb.connections

import txmq
from tests.services.xa.mysql_shop import MySQLShop
from tools.simulated.clock import SimClock
from txmq.xa import LastResource
from txmq.xa.database.installation import DatabaseSession


class Noting(MySQLdb.connections.Connection):  # type: ignore[misc]  # the driver has no types
    """Notes what the test's thread sends (the resolver has connections too); fails after a COMMIT when told to."""

    seen: ClassVar[list[Any]] = []
    loses: ClassVar[list[str]] = []
    _left = 0  # results of the packet after the first one

    def note(self, query: Any) -> None:
        """Remember it."""
        self._left = query.count(";") if isinstance(query, str) and "COMMIT AND CHAIN;" in query else 0
        if threading.current_thread() is threading.main_thread():
            self.seen.append(query)

    def query(self, query: Any) -> None:
        self.note(query)
        super().query(query)
        if self.loses and isinstance(query, str) and query.startswith("EXECUTE"):
            raise MySQLdb.OperationalError(2013, self.loses.pop())

    def send_query(self, query: Any) -> None:
        self.note(query)
        super().send_query(query)

    def next_result(self) -> int:
        self._left -= 1
        if self.loses and self._left == 0:  # that of the statement after COMMIT
            raise MySQLdb.OperationalError(2013, self.loses.pop())
        return int(super().next_result())

    def commit(self) -> None:
        self.note("COMMIT")
        super().commit()


def noting(shop: MySQLShop, clock: SimClock, **arguments: Any) -> LastResource:
    """The same database through noting connections, by a clock turned by hand."""
    Noting.seen.clear()
    known = shop.server.connect_arguments() | {"db": shop.database} | arguments
    shop.resource = LastResource("shop", connect=partial(Noting, **known), clock=clock)
    return shop.resource


def idle(shop: MySQLShop) -> DatabaseSession:
    """The connection that the next block takes."""
    session = shop.resource._pool.take()
    assert session is not None
    shop.resource._pool.give_back(session)
    return session


@contextmanager
def nothing_prepared(shop: MySQLShop, is_refused: bool = True) -> Iterator[None]:
    """The server prepares no more statements; if ``is_refused``."""
    shop.execute(f"SET GLOBAL max_prepared_stmt_count = {0 if is_refused else 16382}")
    try:
        yield
    finally:
        shop.execute("SET GLOBAL max_prepared_stmt_count = 16382")


def sent_by_an_order(shop: MySQLShop) -> list[Any]:
    """The packets of one more transaction."""
    Noting.seen.clear()
    assert shop.order(b"a") is txmq.Outcome.COMMITTED
    return list(Noting.seen)


def forget_key(shop: MySQLShop) -> None:
    """Make the marker table as an older txmq did."""
    ((_, made),) = shop.execute("SHOW CREATE TABLE txmq_marker")
    (key,) = (word for word in made.split("`") if "_ibfk_" in word)
    shop.execute(f"ALTER TABLE txmq_marker DROP FOREIGN KEY {key}, DROP COLUMN uuid")
