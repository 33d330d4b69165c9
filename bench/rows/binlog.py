"""Binlog sync: the reader against mysql-replication's own with nothing downstream, and from MariaDB to topics."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from itertools import count
from typing import Any

import txmq
from bench.model import Bound, Measure, NotInstalledError, Row, Surroundings
from txmq.binlog.config import read_settings
from txmq.errors import ConfigError
from txmq.runtime.threads import Signal, start_daemon
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.database_programs import MariaDBFailedError
from txmq.testing.processes.mariadb import MariaDB

ROWS_READ, PER_TRANSACTION = 100_000, 10
TABLE = "CREATE TABLE t (id BIGINT PRIMARY KEY, number INT, name VARCHAR(60), price DECIMAL(10,2), at DATETIME(3))"
UNSYNCED = ("--sync-binlog=0", "--innodb-flush-log-at-trx-commit=0")  # what is measured reads what is written already
REPLICA_ID, END_S = 4711, 30.0


def fill(server: MariaDB, rows: int) -> None:
    """Insert rows into the table, ten a transaction."""
    with closing(server.connect()) as connection, closing(connection.cursor()) as cursor:
        for first in range(0, rows, PER_TRANSACTION):
            values = ", ".join(
                f"({number}, 7, 'customer number {number}', 9.50, '2026-11-23 09:05:00.123')"
                for number in range(first, first + PER_TRANSACTION)
            )
            cursor.execute(f"INSERT INTO t VALUES {values}")
            connection.commit()


def _read(settings: Any, rows: int) -> float:
    """Rows a second of our reader, with nothing downstream."""
    from txmq.binlog.source import BinlogSource
    from txmq.binlog.source.options import source_options

    with closing(BinlogSource(source_options(settings))) as source:
        source.open(source.oldest_position())
        started, left = time.perf_counter(), rows
        while left > 0:
            part = source.read(1.0)
            left -= 0 if part is None else len(part.changes)
        return rows / (time.perf_counter() - started)


def _read_by_library(server: MariaDB, rows: int) -> float:
    """The same of mysql-replication."""
    from pymysqlreplication import BinLogStreamReader
    from pymysqlreplication.row_event import WriteRowsEvent

    where = server.connect_arguments(tcp=True)
    stream = BinLogStreamReader(
        connection_settings={"host": where["host"], "port": where["port"], "user": "root", "passwd": ""},
        server_id=REPLICA_ID, is_mariadb=True, auto_position="", log_file="binlog.000001", log_pos=4,
        resume_stream=True, only_events=[WriteRowsEvent], blocking=True,
    )  # fmt: skip
    with closing(stream):
        started, left = time.perf_counter(), rows
        while left > 0:
            left -= len(stream.fetchone().rows)
        return rows / (time.perf_counter() - started)


def _publish(broker: BrokerProcess, settings: Any, rows: int) -> float:
    """Rows a second from MariaDB to topics, by reader and publisher."""
    from txmq.binlog.publish.publisher import TransactionalPublisher
    from txmq.binlog.reader import BinlogReader
    from txmq.binlog.source import BinlogSource
    from txmq.binlog.source.options import source_options

    options = source_options(settings)
    with txmq.connect(broker.address) as client:
        reader = BinlogReader(lambda: BinlogSource(options), client.clock, settings.source.start)
        publisher = TransactionalPublisher(client, settings, lambda: reader.is_stopped)
        started, topic = time.perf_counter(), f"{settings.name}.shop.t"
        ended = Signal()

        def run() -> None:
            reader.run(publisher)
            ended.set()

        start_daemon("binlog-bench", run)

        def published() -> int:
            if topic not in [one.name for one in client.topics.list()]:
                return 0
            return sum(client.offsets(topic, number).end for number in range(settings.publish.partitions))

        eventually(lambda: published() >= rows, "all rows are published")
        taken = time.perf_counter() - started
        reader.stop()
        ended.wait(END_S)
        return rows / taken


@contextmanager
def _binlog(surroundings: Surroundings) -> Iterator[Measure]:
    rows, numbers = surroundings.count(ROWS_READ), count(1)
    with ExitStack() as opened:
        try:
            made = MariaDB(surroundings.directory / "mariadb", binary_log=True, options=UNSYNCED)
            server = opened.enter_context(made)
        except (MariaDBFailedError, ConfigError) as error:
            raise NotInstalledError(str(error)) from error
        broker = opened.enter_context(BrokerProcess(surroundings.directory / "data"))
        server.execute(TABLE)
        fill(server, rows)

        def measure() -> dict[str, float]:
            settings = read_settings(
                f'name = "s{next(numbers)}"\nbootstrap = "{broker.address}"\n'
                f'[source]\nport = {server.port}\nuser = "root"\ntables = ["shop.*"]\nstart = "earliest"\n',
                {},
            )
            figures = {"read": _read(settings, rows), "read by mysql-replication": _read_by_library(server, rows)}
            figures["share"] = 100 * figures["read"] / figures["read by mysql-replication"]
            return figures | {"publish": _publish(broker, settings, rows)}

        yield measure


ROWS = (
    Row(
        "binlog", f"binlog of MariaDB: {ROWS_READ:,} rows, {PER_TRANSACTION} a transaction", _binlog,
        {"read": "rows/s", "read by mysql-replication": "rows/s", "share": "%", "publish": "rows/s"},
        (Bound("share", 70, "%"), Bound("publish", 8_000, "rows/s")),
        repeats=3,
    ),
)  # fmt: skip
