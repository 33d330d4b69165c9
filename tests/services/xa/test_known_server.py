"""A copy of a database on another MariaDB: what went to an outbox is proved in the known server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from txmq.errors import ConfigError
from txmq.runtime.os_clock import OSRandom
from txmq.testing.processes.mariadb import MariaDB
from txmq.xa import LastResource, MySQLResource
from txmq.xa.database.fingerprint import StrangeServerError
from txmq.xa.last_resource.proof import Step, prove

from .mysql_orders import new_txid

CLUSTER = "00000000000000c1"
TABLES = ("txmq_marker_identity", "txmq_marker", "txmq_marker_server", "txmq_marker_token")
OUTBOX = ("txmq_marker_outbox", "txmq_marker_outbox_keys", "txmq_marker_outbox_series", "txmq_marker_outbox_topics")
LATER_MS = 1 << 53


class Copies:
    """A database on one server, and its tables on another, as a dump brings them there."""

    def __init__(self, original: MariaDB, other: MariaDB) -> None:
        self.original, self.other = original, other
        LastResource("shop", connect=original.connect, outbox=True).install()
        with closing(original.connect()) as source, closing(other.connect()) as target:
            for table in TABLES:
                cursor, into = source.cursor(), target.cursor()
                cursor.execute(f"SHOW CREATE TABLE {table}")
                into.execute(cursor.fetchone()[1])
                cursor.execute(f"SELECT * FROM {table}")
                for row in cursor.fetchall():
                    into.execute(f"INSERT INTO {table} VALUES ({', '.join(['%s'] * len(row))})", row)
            target.commit()

    def resource(self, server: MariaDB) -> LastResource:
        """A resource whose configuration leads to one of them."""
        return LastResource("shop", connect=server.connect)

    def adopt(self, server: MariaDB) -> None:
        """An operator says that this is the known server."""
        with closing(server.connect()) as connection:
            self.resource(server).installation.install(connection, None, OSRandom(), {}, adopt=True)

    def proved(self, server: MariaDB, txid: str) -> tuple[Step, Exception | None]:
        """What one who settles finds there, of a transaction that went to an outbox."""
        with closing(self.resource(server).open_for_resolver(CLUSTER)) as resolving:
            return prove(resolving, txid, 0, LATER_MS)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MariaDB]:
    with MariaDB(tmp_path_factory.mktemp("other")) as server:
        yield server


@pytest.fixture
def copies(mariadb: MariaDB, other: MariaDB) -> Iterator[Copies]:
    yield Copies(mariadb, other)
    mariadb.execute(f"DROP TABLE {', '.join(OUTBOX)}")
    for server in (mariadb, other):
        server.execute(f"DROP TABLE {', '.join(sorted(TABLES))}")


def test_missing_row_in_a_copy_proves_nothing_until_adopted(copies: Copies) -> None:
    step, error = copies.proved(copies.other, "t1")
    assert step is Step.UNDECIDED
    assert isinstance(error, StrangeServerError)
    assert copies.proved(copies.original, "t1") == (Step.REPORT_ROLLBACK, None)
    copies.adopt(copies.other)
    assert copies.proved(copies.other, "t1") == (Step.REPORT_ROLLBACK, None)


def test_a_committed_marker_in_a_copy_proves_a_commit(copies: Copies) -> None:
    rows = "('c', 'committed', 0, 0, 0, NULL), ('r', 'rolled-back', 0, 0, 0, NULL)"
    copies.other.execute(f"INSERT INTO txmq_marker VALUES {rows}")
    assert copies.proved(copies.other, "c")[0] is Step.REPORT_COMMIT
    assert copies.proved(copies.other, "r")[0] is Step.UNDECIDED


def test_to_adopt_waits_for_no_transaction_that_is_open(copies: Copies) -> None:
    """At REPEATABLE READ a writer's marker locks the row of the identity: the server's stands beside it."""
    resource = copies.resource(copies.other)
    branch = resource.enlist(CLUSTER)
    branch.end_body()
    branch.insert_marker("open", 30.0)
    copies.adopt(copies.other)
    branch.commit()
    branch.finish()
    resource.close()
    assert copies.proved(copies.other, "open")[0] is Step.REPORT_COMMIT


def test_restarted_server_is_recognised(copies: Copies) -> None:
    copies.original.kill()
    copies.original.start()
    assert copies.proved(copies.original, "t2") == (Step.REPORT_ROLLBACK, None)


def test_tables_of_an_older_txmq_are_refused_until_reinstalled(copies: Copies) -> None:
    copies.original.execute("DROP TABLE txmq_marker_token")
    for enlist in (
        lambda: copies.resource(copies.original).enlist(CLUSTER),
        lambda: MySQLResource("shop", connect=copies.original.connect).enlist(CLUSTER, new_txid(), 30.0),
    ):
        with pytest.raises(ConfigError, match="call install"):
            enlist()
    copies.resource(copies.original).install()
    assert copies.proved(copies.original, "t3") == (Step.REPORT_ROLLBACK, None)
