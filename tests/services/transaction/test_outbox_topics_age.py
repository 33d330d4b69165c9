"""Topics that grow under a last resource whose blocks use its outbox always: by their age, where they have one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from threading import Event, Thread
from typing import Any

import pytest

from tests.services.transaction.test_outbox import Shop
from tests.services.transaction.test_outbox_always import any_shop, mysql_shop, postgresql_shop, sqlite_shop
from txmq import RolledBackError
from txmq.errors import TransactionError
from txmq.testing.eventually import eventually
from txmq.testing.processes.mariadb import MariaDB
from txmq.xa.database.marker_table import MarkerTable
from txmq.xa.database.outbox_tables import OutboxTables
from txmq.xa.last_resource.branch import Branch

__all__ = ["any_shop", "mysql_shop", "postgresql_shop", "sqlite_shop"]


def test_grown_topic_rolls_the_block_back(any_shop: Shop) -> None:
    """Another process has told the database; this block's message names a partition of before."""
    shop = any_shop
    shop.check()
    shop.order()
    with told_elsewhere(shop) as other:
        other.commit()
    with pytest.raises(RolledBackError, match="orders has other partitions by now") as refused:
        shop.order()
    assert refused.value.retriable
    shop.check()
    assert shop.values() == [1, 2]


@contextmanager
def told_elsewhere(shop: Shop) -> Iterator[Any]:
    """The connection of a process that has told the database that the topic has grown, not yet for good."""
    with closing(shop.connect()) as connection:
        table = MarkerTable.on(connection, "txmq_marker", None)
        topics = OutboxTables.beside(table).topics
        if table.dialect.begin:
            connection.cursor().execute(table.dialect.begin)
        connection.cursor().execute("UPDATE sold SET pieces = pieces")
        known = topics.newest(connection)["orders"]
        topics.tell(connection, [("orders", known._replace(partitions=known.partitions + 1))])
        yield connection


def test_block_behind_the_row_of_who_tells_is_rolled_back(mysql_shop: Shop) -> None:
    """It began before the topic has grown, and had to wait for the other's row."""
    mysql_shop.order()
    failed = list[BaseException]()

    def order() -> None:
        with pytest.raises(RolledBackError) as refused:
            mysql_shop.order(in_body=has_row.set)
        failed.append(refused.value)

    has_row = Event()
    with told_elsewhere(mysql_shop) as other:
        thread = Thread(target=order)
        thread.start()
        waiting = "SHOW GLOBAL STATUS LIKE 'Innodb_row_lock_current_waits'"  # innodb_trx, looked at often, is old
        eventually(lambda: mysql_shop.run(waiting) != [("Innodb_row_lock_current_waits", "0")], "it waits for the row")
        assert not has_row.is_set()
        other.commit()
        thread.join()
    assert "orders has other partitions by now" in str(failed[0])
    mysql_shop.check()


def test_growth_that_was_taken_back_refuses_no_block(mysql_shop: Shop) -> None:
    """The server does not take back what it counted: the rows have an age that the topics do not have, for a while."""
    mysql_shop.order()
    age = age_of(mysql_shop)
    with told_elsewhere(mysql_shop) as other:
        other.rollback()
    for _ in range(4):
        mysql_shop.order()
    mysql_shop.check()
    assert age_of(mysql_shop) > age
    assert places_of(mysql_shop) == age_of(mysql_shop)


def test_server_that_has_lost_its_counter_refuses_no_block(mysql_shop: Shop) -> None:
    """As behind a restore. What the topics' age says is the rows' age again soon."""
    mysql_shop.order()
    mysql_shop.check()
    mysql_shop.run("ALTER TABLE txmq_marker_outbox AUTO_INCREMENT = 1")
    assert places_of(mysql_shop) == 0
    for _ in range(4):
        mysql_shop.order()
    mysql_shop.check()
    assert places_of(mysql_shop) == age_of(mysql_shop)


def test_server_that_is_killed_behind_a_growth_refuses_the_block(mysql_shop: Shop, mariadb: MariaDB) -> None:
    """No row is left of which it could tell where it had counted to."""
    mysql_shop.order()
    mysql_shop.check()
    with told_elsewhere(mysql_shop) as other:
        other.commit()
        mariadb.kill()
    mariadb.start()
    refused = list[TransactionError]()

    def is_refused() -> bool:
        with pytest.raises(TransactionError) as found:
            mysql_shop.order()
        refused.append(found.value)
        return "orders has other partitions by now" in str(found.value)

    eventually(is_refused, "the connections of before are gone")
    mysql_shop.check()


def test_tables_of_before_get_an_age_from_the_first_block(mysql_shop: Shop) -> None:
    mysql_shop.run("DELETE FROM txmq_marker_outbox_topics WHERE name = ''")
    process = mysql_shop.process()
    for _ in range(3):
        mysql_shop.order(process)
    mysql_shop.check()
    assert places_of(mysql_shop) == age_of(mysql_shop)


def age_of(shop: Shop) -> int:
    ((age,),) = shop.run("SELECT partitions FROM txmq_marker_outbox_topics WHERE name = ''")
    return int(age)


def places_of(shop: Shop) -> int:
    """The age of the next row."""
    ((first,),) = shop.run(
        "SELECT auto_increment FROM information_schema.tables "
        "WHERE table_schema = DATABASE() AND table_name = 'txmq_marker_outbox'"
    )
    return int(first) >> 42


def test_block_goes_in_one_packet_with_commit(mysql_shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless something else than its age was told since."""
    for _ in range(2):
        mysql_shop.order()
    sent = list[Branch]()
    monkeypatch.setattr(Branch, "_put", lambda branch, _: sent.append(branch))
    mysql_shop.order()
    assert not sent
