"""A shop's database rebuilt in a second one, while everything that takes part is killed.

    python examples/binlog_sync/demo.py        # or: make demo-binlog

Two MariaDB servers, a broker, ``txmq binlog run`` and ``txmq binlog apply``. A shop writes orders, changes and deletes
them, rolls back, and alters a table; some of its transactions are XA. Reader, applier, broker and both databases are
killed in turn. Two XA transactions are prepared when the reader is killed: one is committed later, one rolled back. At
the end the comparison shows whether both databases have the same rows.

Needs MariaDB (``apt-get install mariadb-server``) and ``pip install '.[binlog]'``.
"""

from __future__ import annotations

import argparse
import logging
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import txmq
from txmq.binlog.config import read_settings
from txmq.binlog.status import newest_published
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.mariadb import MariaDB

DESCRIPTION = __doc__.splitlines()[0]
WAIT_S = 60.0
CONFIG = """
name = "shop"
bootstrap = "{bootstrap}"
[source]
port = {source}
user = "root"
tables = ["shop.*"]
silence_ms_max = 2000
[publish]
partitions = 4
session_timeout_ms = 1000
[apply]
port = {target}
user = "root"
session_timeout_ms = 1000
"""


class Shop:
    """Writes to the source, in transactions, until it is stopped; goes on when the database is back."""

    def __init__(self, source: MariaDB) -> None:
        self._source, self._number = source, 0
        self._random = random.Random(1)  # noqa: S311 - a shop, no secret
        self.committed = 0
        self.xa_share = 0.2  # of the transactions
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def stop(self) -> None:
        """Write no more."""
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ends.is_set():
            try:
                with closing(self._source.connect(connect_timeout=1)) as connection:
                    while not self._ends.is_set():
                        self._write(connection)
            except Exception:  # noqa: BLE001  the database was killed
                time.sleep(0.05)

    def _write(self, connection: Any) -> None:
        self._number += 1
        is_xa, is_kept = self._random.random() < self.xa_share, self._random.random() < 0.9
        with closing(connection.cursor()) as cursor:
            if is_xa:
                cursor.execute(f"XA START 'shop-{self._number}'")
            for _ in range(self._random.randrange(1, 6)):
                cursor.execute(*self._change())
            if is_xa:
                for verb in ("END", "PREPARE", "COMMIT" if is_kept else "ROLLBACK"):
                    cursor.execute(f"XA {verb} 'shop-{self._number}'")
        if not is_xa:
            connection.commit() if is_kept else connection.rollback()
        self.committed += is_kept

    def _change(self) -> tuple[str, tuple[Any, ...]]:
        item, price = self._random.randrange(200), self._random.randrange(10_000)
        return self._random.choice(
            (
                ("INSERT INTO orders (item, price) VALUES (%s, %s), (%s, %s)", (item, price, item + 1, price)),
                ("UPDATE orders SET price = %s WHERE item = %s", (price, item)),
                ("DELETE FROM orders WHERE item = %s LIMIT 1", (item,)),
                ("INSERT INTO stock VALUES (%s, %s) ON DUPLICATE KEY UPDATE pieces = pieces + 1", (item, price)),
                ("UPDATE stock SET item = item + 1000 WHERE item = %s", (item,)),
                ("INSERT INTO journal VALUES (%s)", (f"change {self._number}",)),
            )
        )


class Command:
    """A command of ``txmq binlog``, as a process that can be killed."""

    def __init__(self, name: str, config: Path) -> None:
        self.name = name
        self.words = [sys.executable, "-m", "txmq.cli.main", "binlog", name, "--config", str(config)]
        self._log = config.with_name(f"{name}.log")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self.words, stdout=log, stderr=log)  # noqa: S603 - our own command

    def kill(self) -> None:
        """SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def require_alive(self) -> None:
        """End the demo with the last line of the log, if the process has ended by itself."""
        if self._process is not None and self._process.poll() is not None:
            raise SystemExit(f"txmq binlog {self.name} ended: {self._log.read_text()[-2000:]}")


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a while."""
    end = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > end:
            raise SystemExit(f"{what}: not within {WAIT_S:.0f} seconds")
        time.sleep(0.05)


class Play:
    """What happens, in turn."""

    def __init__(self, directory: Path, opened: ExitStack, seconds: float) -> None:
        self.seconds = seconds
        self.source = opened.enter_context(MariaDB(directory / "source", binary_log=True))
        self.target = opened.enter_context(MariaDB(directory / "target"))
        self.broker = opened.enter_context(BrokerProcess(directory / "broker"))
        self.client = opened.enter_context(txmq.connect(self.broker.address))
        config = directory / "binlog.toml"
        ports = {"source": self.source.port, "target": self.target.port}
        config.write_text(CONFIG.format(bootstrap=self.broker.address, **ports))
        self.settings = read_settings(config.read_text(), {})
        self.reader, self.applier, self.compare = (Command(name, config) for name in ("run", "apply", "compare"))
        for command in (self.reader, self.applier):
            opened.callback(command.kill)
        self.shop = Shop(self.source)

    def run(self) -> None:
        """All of it, but for the comparison."""
        self.reader.start()
        self.applier.start()
        wait_until(lambda: self._published() is not None, "the reader begins")
        for table in (
            "orders (id INT AUTO_INCREMENT PRIMARY KEY, item INT, price INT, KEY (item))",
            "stock (item INT PRIMARY KEY, pieces INT)", "journal (text VARCHAR(40))",
        ):  # fmt: skip
            self.source.execute(f"CREATE TABLE {table}")
        self.shop.start()
        try:
            self._watch("everything runs")
            self._prepare("'kept'", "INSERT INTO stock VALUES (10000, 1)")
            self._prepare("'dropped'", "INSERT INTO stock VALUES (10001, 1)")
            self._kill("the reader", self.reader.kill, self.reader.start)
            self.source.execute("XA COMMIT 'kept'")
            self.source.execute("XA ROLLBACK 'dropped'")
            self._watch("of two XA transactions that were prepared before the kill one is committed, one rolled back")
            self._kill("the applier", self.applier.kill, self.applier.start)
            self.source.execute("ALTER TABLE orders ADD COLUMN note VARCHAR(20) DEFAULT 'none'")
            self._watch("a column is added")
            self._kill("the broker", self.broker.kill, self.broker.start)
            self.shop.xa_share = 0.0  # MariaDB may forget what is prepared if it is killed itself
            self._kill("the target", self.target.kill, self.target.start)
            self._kill("the source", self.source.kill, self.source.start)
        finally:
            self.shop.stop()
        ((end,),) = self.source.execute("SELECT @@gtid_binlog_pos")
        wait_until(lambda: self._published() == end, "the reader is level")

    def _prepare(self, xid: str, change: str) -> None:
        with closing(self.source.connect()) as connection, closing(connection.cursor()) as cursor:
            for statement in (f"XA START {xid}", change, f"XA END {xid}", f"XA PREPARE {xid}"):
                cursor.execute(statement)

    def _kill(self, what: str, kill: Callable[[], object], start: Callable[[], object]) -> None:
        kill()
        self._watch(f"{what} is killed (kill -9)")
        start()
        self._watch(f"{what} is started again")

    def _watch(self, what: str) -> None:
        before = self.shop.committed
        time.sleep(self.seconds)
        print(f"  {what}: {self.shop.committed - before} transactions of the shop", flush=True)

    def _published(self) -> str | None:
        self.reader.require_alive()
        self.applier.require_alive()
        try:
            return newest_published(self.client, self.settings).position.gtids
        except txmq.errors.TxmqError:
            return None

    def is_equal(self) -> bool:
        """Compare both databases; the applier may need a while for what is left."""
        words = [*self.compare.words, "--settle", str(WAIT_S)]
        return subprocess.run(words, check=False).returncode == 0  # noqa: S603 - our own command


def main() -> int:
    """Play it in a temporary directory; 0 if both databases are the same at the end."""
    parser = argparse.ArgumentParser(description=DESCRIPTION)
    parser.add_argument("--seconds", type=float, default=3.0, help="how long each state is watched")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, ExitStack() as opened:
        print("starting two databases and a broker ...", flush=True)
        play = Play(Path(directory), opened, chosen.seconds)
        play.run()
        print(f"{play.shop.committed} transactions; comparing both databases:", flush=True)
        is_equal = play.is_equal()
        print("both databases are the same" if is_equal else "the databases differ", flush=True)
        return 0 if is_equal else 1


if __name__ == "__main__":
    logging.getLogger("txmq").setLevel(logging.CRITICAL)
    sys.exit(main())
