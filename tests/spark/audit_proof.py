"""The proof of the audit: millions of rows and messages, 50 faults of every kind, and it finds exactly those.

    python -m tests.spark.audit_proof --rows 2000000

MariaDB, broker and Spark run on this machine. Prints precision and recall of each kind, the time, and the most memory
that Spark's processes (Java, its Python workers, and the driver) held at once. Status 1 unless both are 1 everywhere.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import txmq
from tests.spark.faulty_orders import TOPIC, FaultyOrders, Planted, found_of
from txmq.spark.audit.audit import AuditResult
from txmq.spark.audit.rows import Rows, open_rows
from txmq.spark.audit.spec import AuditSpec, Kind, RowTime, parse_terms
from txmq.spark.audit.topic import TopicAudit, Wanted
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.mariadb import MariaDB
from txmq.testing.processes.spark import start_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SETTLE_MS = 2_000
SAMPLE_S = 0.25
SPEC = AuditSpec(
    TOPIC, parse_terms(["id = json:$.id"]), parse_terms(["amount = json:$.amount"]), order="version",
    row_time=RowTime("created"), row_txid="txid", settle_ms=SETTLE_MS,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Proof:
    """What was planted and found."""

    result: AuditResult
    planted: set[Planted]
    found: set[Planted]
    seconds: float

    def lines(self) -> Iterator[tuple[str, int, int, float, float]]:
        """For each kind: planted, found, precision, recall."""
        for kind in Kind:
            planted = {line for line in self.planted if line[0] == kind.value}
            found = {line for line in self.found if line[0] == kind.value}
            both = len(planted & found)
            yield kind.value, len(planted), len(found), _share(both, len(found)), _share(both, len(planted))

    @property
    def holds(self) -> bool:
        """Whether exactly what was planted was found, each once."""
        return self.planted == self.found and sum(self.result.counts.values()) == len(self.planted)


def prove(spark: SparkSession, world: FaultyOrders, rows: Rows, bootstrap: str) -> Proof:
    """Audit a world that was made.

    Everything must be older than the margin: the audit is run when that is so.
    """

    @dataclass(frozen=True, slots=True)
    class Kept(TopicAudit):
        """Reads all but the places that are hidden, as a reader that loses messages would."""

        def messages(self, topic: str, ranges: Any) -> DataFrame:
            from pyspark.sql import functions as F

            # Not super(): a slotted dataclass is another class than the one whose body this is.
            read = TopicAudit.messages(self, topic, ranges)
            hidden = [f"{partition}/{offset}" for partition, offset in world.hidden]
            return read.filter(~F.concat_ws("/", "partition", "offset").isin(hidden)) if hidden else read

    job = Kept(spark, world.client, bootstrap, rows, SPEC, print)
    job.clock.sleep(SETTLE_MS / 1000 + 0.1)
    started = time.monotonic()
    result = job.run(Wanted(from_ms=world.started_ms))
    findings = [row.asDict() for row in result.findings.collect()]
    return Proof(result, world.planted, found_of(findings), time.monotonic() - started)


def _share(part: int, of: int) -> float:
    return part / of if of else 1.0


@contextmanager
def peak_memory(excluded: set[int]) -> Iterator[list[int]]:
    """The most bytes (RSS) that this process and its descendants held, without those excluded; one value."""
    most = [0]
    done = threading.Event()

    def watch() -> None:
        while not done.wait(SAMPLE_S):
            most[0] = max(most[0], _held(os.getpid(), excluded))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield most
    finally:
        done.set()
        thread.join()


def _held(root: int, excluded: set[int]) -> int:
    parents, pages = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, IndexError):  # it has ended
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                pages[int(entry.name)] = int((entry / "statm").read_text().split()[1])
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    total, waiting = 0, [root]
    while waiting:
        pid = waiting.pop()
        if pid not in excluded:
            total += pages.get(pid, 0)
            waiting += children.get(pid, [])
    return total * os.sysconf("SC_PAGE_SIZE")


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--faults", type=int, default=50, help="of each kind")
    parser.add_argument("--memory", default="1g", help="of the Java machine")
    parser.add_argument("--report", type=Path, help="write findings, audit.json and audit.html there")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="txmq-proof-") as name:
        work = Path(name)
        with (
            BrokerProcess(work / "broker") as broker,
            MariaDB(work / "db") as database,
            txmq.connect(broker.address) as client,
        ):
            world = FaultyOrders(client, database, given.rows, given.faults)
            started = time.monotonic()
            world.make(work)
            print(f"made in {time.monotonic() - started:.0f} s")
            excluded = {broker.pid or 0, database.pid or 0}
            with peak_memory(excluded) as peak:
                proof = _proved(world, broker.address, given.memory, given.report)
    for kind, planted, found, precision, recall in proof.lines():
        print(f"{kind:13} planted {planted:4}  found {found:4}  precision {precision:.4f}  recall {recall:.4f}")
    totals = proof.result.totals
    print(
        f"{totals.rows:,} rows, {totals.messages:,} messages: {proof.seconds:.0f} s, {peak[0] / 2**20:,.0f} MiB at most"
    )
    print("holds" if proof.holds else "DOES NOT HOLD")
    return 0 if proof.holds else 1


def _proved(world: FaultyOrders, bootstrap: str, memory: str, report: Path | None) -> Proof:
    from txmq.spark.audit.report import save, summary_of

    settings = {"spark.driver.memory": memory, "spark.sql.shuffle.partitions": "4"}
    spark = start_session("audit proof", settings=settings)
    rows = open_rows(spark, url_of(world.database), "orders")
    proof = prove(spark, world, rows, bootstrap)
    if report is not None:
        facts = {"table": "orders", "database": "MariaDB", "bootstrap": bootstrap, "seconds": round(proof.seconds, 1)}
        save(proof.result, summary_of(proof.result, facts), report)
    done = replace(proof)
    spark.stop()
    return done


def url_of(database: MariaDB) -> str:
    """The database as the audit is told of it."""
    arguments = database.connect_arguments()
    return f"mysql://root@localhost/{arguments['db']}?unix_socket={arguments['unix_socket']}"


if __name__ == "__main__":
    sys.exit(main())
