"""The play of ``txmq demo-audit``: an order service works, an audit, five faults, an audit.

The service is the one that ``txmq demo`` kills; here no process is killed. What is planted is planted with the means
of an outsider: SQL on the database, a plain producer on the topic.
"""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import txmq
from txmq.cli.demo.run import DemoFailedError
from txmq.cli.demo.service import AUDIT, ORDERS, PAYMENTS, open_resource
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.spark import environment, open_session

if TYPE_CHECKING:
    from txmq.spark.audit.audit import AuditResult

ORDERS_TAKEN = 400
WAIT_S = 60.0
SETTLE_MS = 1_000
MEMORY = "1g"
FORGED, SLIPPED_IN = "forged-1", "slipped-in-1"
MATCH = "reference = json:$.reference"


@dataclass(frozen=True, slots=True)
class Fault:
    """One planted fault, what the audit must call it, and whether it did."""

    done: str
    kind: str
    identity: str
    is_found: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of the last screen."""

    rows: int
    messages: int
    is_clean_before: bool
    faults: tuple[Fault, ...]
    others: int
    page: Path

    @property
    def holds(self) -> bool:
        """Whether the audit found exactly what was planted."""
        return self.is_clean_before and all(fault.is_found for fault in self.faults) and self.others == 0

    def as_fields(self) -> dict[str, object]:
        """As one JSON object."""
        found = {fault.done: fault.is_found for fault in self.faults}
        return {
            "holds": self.holds, "rows": self.rows, "messages": self.messages, "clean_before": self.is_clean_before,
            "found": found, "others": self.others, "page": str(self.page),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Play:
    """One run; the reports go to ``directory``, everything else vanishes."""

    directory: Path
    say: Callable[[str], None]
    orders: int = ORDERS_TAKEN

    def run(self, session: Any = None) -> Report:
        """Work, audit, plant, audit.

        Args:
            session: Spark's; default: one is started, and stopped at the end.

        Raises:
            DemoFailedError: the service does not work.
            SparkMissingError: Spark or Java is not there; says what to install.
        """
        environment(is_quick_start=False)  # says in one line what is missing, before anything is started
        with ExitStack() as stack:
            work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="txmq-demo-audit-")))
            broker = stack.enter_context(BrokerProcess(work / "broker"))
            client = stack.enter_context(txmq.connect(broker.address))
            database = work / "orders.db"
            self._work(client, broker.address, database)
            spark = session or stack.enter_context(open_session(self.directory, "local[2]", MEMORY, is_short=True))
            self.say("the first audit (Spark warms up)")
            before = self._audit(spark, client, broker.address, database, "before")
            faults = self._plant(client, database)
            self.say("the second audit")
            after = self._audit(spark, client, broker.address, database, "after")
            return self._report(before, after, faults)

    def _work(self, client: txmq.Client, address: str, database: Path) -> None:
        with closing(sqlite3.connect(database)) as connection, connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute(
                "CREATE TABLE orders (id INTEGER PRIMARY KEY AUTOINCREMENT, reference TEXT UNIQUE NOT NULL, "
                "customer TEXT NOT NULL, created TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ', 'now')))"
            )
        for topic in (ORDERS, PAYMENTS, AUDIT):
            client.topics.create(topic, partitions=4)
        open_resource(str(database)).install(client)
        self.say("an order service takes orders: rows in SQLite, messages in txmq")
        with _service(address, database) as service:
            eventually(
                lambda: _count(database) >= self.orders or service.poll() is not None,
                f"the service takes {self.orders} orders", WAIT_S, DemoFailedError,
            )  # fmt: skip
            if _count(database) < self.orders:
                raise DemoFailedError(f"the service ended by itself; see {database.with_suffix('.log')}")
        self.say(f"it took {_count(database)} orders")

    def _audit(self, spark: Any, client: txmq.Client, address: str, database: Path, name: str) -> AuditResult:
        from txmq.spark.audit.report import save, summary_of, verdict
        from txmq.spark.audit.rows import open_rows
        from txmq.spark.audit.spec import AuditSpec, RowTime, parse_terms
        from txmq.spark.audit.topic import TopicAudit

        rows = open_rows(spark, f"sqlite:///{database}", "orders")
        spec = AuditSpec(ORDERS, parse_terms([MATCH]), order="id", row_time=RowTime("created"), settle_ms=SETTLE_MS)
        time.sleep(SETTLE_MS / 1000)  # the newest order has to be older than the margin to be judged
        result = TopicAudit(spark, client, address, rows, spec).run()
        facts = {"table": "orders", "database": "sqlite", "bootstrap": address}
        self.say(verdict(save(result, summary_of(result, facts), self.directory / name)))
        return result

    def _plant(self, client: txmq.Client, database: Path) -> list[Fault]:
        """Five faults, each at another customer's orders, so that none hides another."""
        with closing(sqlite3.connect(database)) as connection, connection:
            deleted = _orders_of(connection, "ada")[5][1]
            connection.execute("DELETE FROM orders WHERE reference = ?", (deleted,))
            connection.execute(
                "INSERT INTO orders (reference, customer, created) SELECT ?, 'ben', MAX(created) FROM orders",
                (SLIPPED_IN,),
            )
            (first, _), (second, swapped) = _orders_of(connection, "cleo")[7:9]
            for old, new in ((first, -1), (second, first), (-1, second)):
                connection.execute("UPDATE orders SET id = ? WHERE id = ?", (new, old))
            doubled = _orders_of(connection, "dan")[3][1]
        with client.producer() as producer:
            for reference, customer in ((FORGED, b"eva"), (doubled, b"dan")):
                producer.send(ORDERS, f'{{"reference": "{reference}"}}'.encode(), key=customer)
        self.say("a row deleted, one slipped in; a message forged, one sent twice; two orders swapped")
        return [
            Fault("a row deleted", "phantom", deleted),
            Fault("a row slipped in", "missing", SLIPPED_IN),
            Fault("a message forged", "phantom", FORGED),
            Fault("a message sent twice", "duplicate", doubled),
            Fault("two orders swapped", "out-of-order", swapped),
        ]

    def _report(self, before: AuditResult, after: AuditResult, faults: list[Fault]) -> Report:
        from txmq.spark.audit.report import PAGE

        found = {(row["kind"], row["identity"]) for row in after.findings.select("kind", "identity").collect()}
        checked = [Fault(f.done, f.kind, f.identity, (f.kind, f.identity) in found) for f in faults]
        others = sum(after.counts.values()) - sum(fault.is_found for fault in checked)
        page = self.directory / "after" / PAGE
        return Report(after.totals.rows, after.totals.messages, before.is_clean, tuple(checked), others, page)


@contextmanager
def _service(address: str, database: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The order service; stopped in order at the end."""
    command = [sys.executable, "-m", "txmq.cli.demo.service", address, str(database), "1"]
    log = database.with_suffix(".log")
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)  # noqa: S603
    try:
        yield process
        process.terminate()
        process.wait(WAIT_S)
    finally:
        process.kill()
        process.wait()


def _count(database: Path) -> int:
    with closing(sqlite3.connect(database)) as connection:
        return int(connection.execute("SELECT COUNT(*) FROM orders").fetchone()[0])


def _orders_of(connection: sqlite3.Connection, customer: str) -> list[tuple[int, str]]:
    return connection.execute("SELECT id, reference FROM orders WHERE customer = ? ORDER BY id", (customer,)).fetchall()
