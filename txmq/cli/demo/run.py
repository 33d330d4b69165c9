"""The demo's play: start a broker and a service, kill them again and again, settle, compare.

Theory of operation. The service says on a file what was acknowledged to it. Each round waits until both kinds of work
make progress, then lets the death of its plan happen: SIGKILL from outside at a random moment, or the process kills
itself at a named crash point (``txmq.runtime.crashpoints``), which hits the windows of the protocol for certain. The
next round starts what died. At the end the service stops in order, a resolver settles what is left, and every row
is held against every message. In a second act the broker is away, and a shop goes on: what waits in its outbox is
taken to the broker when that is back.

The proof: rows against messages, one to one and in order (``compare``). It is pure, so that it can be tested to say no.
A row's ``reference`` is unique over the whole demo and never used again, also not after a rollback; its message carries
the same reference and has the customer as its key.

Invariants:
* Every wait has a deadline and ends the demo with an error that names what did not happen.
* No process outlives ``Play.run``.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import txmq
from txmq.cli.demo.service import AUDIT, ORDERS, PAYMENTS, RESOURCE_NAME, open_resource
from txmq.cli.demo.shop import OUTBOX_NAME, SHIPMENTS, open_database
from txmq.errors import TxmqError
from txmq.outbox.outbox import Outbox
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess

WAIT_S = 20.0
RESOLVE_S = 30.0
POLL_S = 0.01
BROKER_DEATH = "broker.outbox.page_taken:2"
PROGRESS_PER_ROUND = 30  # acknowledged orders, and as many payments
SHIPMENTS_PER_RUN = 600
RANDOM_DELAY_S_MAX = 0.2


# --- the proof --------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """One row of the order table, in the order of its commit."""

    reference: str
    customer: str


class Sent(NamedTuple):
    """One message, as a reader sees it."""

    partition: int
    offset: int
    customer: str
    reference: str


@dataclass(frozen=True, slots=True)
class Reported:
    """The acknowledgements that the service got before it was killed."""

    orders: frozenset[str]  # the block of these ended without an error
    payments: frozenset[str]
    declined: frozenset[str]  # the body of these raised: neither row nor message may be there
    shipments: frozenset[str] = frozenset()  # committed in the shop's database


@dataclass(frozen=True, slots=True)
class Comparison:
    """Counts; everything after ``acknowledged`` must be 0."""

    rows: int
    messages: int
    payments: int
    acknowledged: int
    missing: int  # rows without their message
    phantoms: int  # messages without their row, or of a declined order
    duplicates: int
    lost: int  # acknowledged, and not there
    torn: int  # payments of which one topic has the message and the other has not
    misordered: int  # customers whose messages are in another order than their rows

    @property
    def holds(self) -> bool:
        """Whether rows and messages are equal, one to one and in order, and nothing acknowledged is lost."""
        wrong = self.missing, self.phantoms, self.duplicates, self.lost, self.torn, self.misordered
        return self.rows > 0 and self.payments > 0 and not any(wrong)


def compare(
    rows: Sequence[Row], orders: Sequence[Sent], payments: Sequence[Sent], audit: Sequence[Sent], reported: Reported
) -> Comparison:
    """Compare what the database holds with what readers of the topics see."""
    row_references = {row.reference for row in rows}
    order_references = {sent.reference for sent in orders}
    payment_references = {sent.reference for sent in payments}
    audit_references = {sent.reference for sent in audit}
    return Comparison(
        rows=len(rows),
        messages=len(orders),
        payments=len(payment_references),
        acknowledged=len(reported.orders) + len(reported.payments),
        missing=len(row_references - order_references),
        phantoms=len((order_references - row_references) | (reported.declined & (row_references | order_references))),
        duplicates=_duplicates(orders) + _duplicates(payments) + _duplicates(audit),
        lost=len(reported.orders - (row_references & order_references)) + len(reported.payments - payment_references),
        torn=len(payment_references ^ audit_references),
        misordered=_misordered(rows, orders),
    )


@dataclass(frozen=True, slots=True)
class HandedOver:
    """What an outbox and its relay made of the rows; everything after ``handed_over`` must be 0."""

    shipments: int
    handed_over: int
    not_handed_over: int
    invented: int  # messages without their row
    twice: int
    shipments_lost: int  # said to be committed, and not there
    customers_misordered: int

    @property
    def holds(self) -> bool:
        """Whether rows and messages are equal, one to one and in order."""
        wrong = self.not_handed_over, self.invented, self.twice, self.shipments_lost, self.customers_misordered
        return self.shipments > 0 and not any(wrong)


def compare_handed_over(rows: Sequence[Row], messages: Sequence[Sent], committed: frozenset[str]) -> HandedOver:
    """Compare what the shop's database holds with what readers of its topic see."""
    of_rows, of_messages = {row.reference for row in rows}, {sent.reference for sent in messages}
    return HandedOver(
        shipments=len(rows),
        handed_over=len(messages),
        not_handed_over=len(of_rows - of_messages),
        invented=len(of_messages - of_rows),
        twice=_duplicates(messages),
        shipments_lost=len(committed - of_rows),
        customers_misordered=_misordered(rows, messages),
    )


def _duplicates(messages: Iterable[Sent]) -> int:
    return sum(count - 1 for count in Counter(sent.reference for sent in messages).values())


def _misordered(rows: Iterable[Row], orders: Iterable[Sent]) -> int:
    """Customers whose common references come in another order, or from more than one partition."""
    wanted: dict[str, list[str]] = defaultdict(list)
    found: dict[str, list[str]] = defaultdict(list)
    partitions: dict[str, set[int]] = defaultdict(set)
    for row in rows:
        wanted[row.customer].append(row.reference)
    for sent in sorted(orders):
        found[sent.customer].append(sent.reference)
        partitions[sent.customer].add(sent.partition)
    wrong = 0
    for customer in wanted.keys() | found.keys():
        common = set(wanted[customer]) & set(found[customer])
        in_rows = [reference for reference in wanted[customer] if reference in common]
        in_log = list(dict.fromkeys(reference for reference in found[customer] if reference in common))
        wrong += in_rows != in_log or len(partitions[customer]) > 1
    return wrong


# --- the play ---------------------------------------------------------------------------------------------------------


class Death(NamedTuple):
    """One kill: the victims and the crash point; ``point`` None is SIGKILL from outside at a random moment."""

    service: bool
    broker: bool
    point: str | None
    text: str


PLAN = (
    Death(True, False, "client.tx.prepared:20", "service, messages prepared, row not committed"),
    Death(False, True, None, "broker, at a random moment"),
    Death(True, False, "client.tx.db_committed:20", "service, row committed, broker not informed"),
    Death(False, True, "journal.append.written:60", "broker, record written, not synced"),
    Death(True, True, None, "service and broker together"),
    Death(False, True, "journal.sync.done:60", "broker, record synced, no answer sent"),
    Death(True, False, "client.tx.commit_sent:20", "service, commit sent, answer not read"),
    Death(True, True, None, "service and broker together"),
)


class DemoFailedError(TxmqError):
    """Something the demo waits for did not happen."""


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of the last screen."""

    comparison: Comparison
    handed_over: HandedOver
    service_kills: int
    broker_kills: int
    in_doubt_seen: int
    in_doubt_left: int
    seconds: float

    @property
    def holds(self) -> bool:
        """Whether the promise was kept."""
        return self.comparison.holds and self.handed_over.holds and self.in_doubt_left == 0


@dataclass(slots=True)
class Play:
    """One run of the demo in ``directory``; ``say`` is told what happens."""

    directory: Path
    say: Callable[[str], None]
    rng: random.Random = field(default_factory=random.Random)
    service_kills: int = 0
    broker_kills: int = 0
    in_doubt: set[str] = field(default_factory=set)
    run_number: int = 0
    service: subprocess.Popen[bytes] | None = None

    @property
    def database(self) -> Path:
        """The order service's SQLite file."""
        return self.directory / "orders.db"

    @property
    def shop(self) -> Path:
        """The SQLite file of the shop that never speaks to the broker."""
        return self.directory / "shop.db"

    @property
    def said(self) -> Path:
        """The acknowledgements that the service got, over all its runs."""
        return self.directory / "service.out"

    def run(self, plan: tuple[Death, ...] = PLAN) -> Report:
        """Play all rounds, settle, compare.

        Raises:
            DemoFailedError: something did not happen in time.
        """
        started = time.monotonic()
        with ExitStack() as stack:
            broker = stack.enter_context(BrokerProcess(self.directory / "broker"))
            stack.callback(self._kill_service)
            self.say(f"a broker serves on {broker.address}")
            self._prepare(broker.address)
            for number, death in enumerate(plan, 1):
                self._round(broker, death)
                self.say(f"kill {number} of {len(plan)}: {death.text} ({self._progress()})")
            self._start(broker, None, None)
            self._await_progress("the service works again after the last kill")
            self._stop_service()
            self.say("the service has stopped in order; a resolver settles what the kills left in doubt")
            left = self._resolve(broker.address)
            comparison = self._compare(broker.address)
            handed_over = self._hand_over(broker)
            broker.stop()
        seconds = time.monotonic() - started
        doubts = len(self.in_doubt), left
        return Report(comparison, handed_over, self.service_kills, self.broker_kills, *doubts, seconds)

    def _prepare(self, address: str) -> None:
        with closing(sqlite3.connect(self.database)) as connection, connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute(
                "CREATE TABLE orders (id INTEGER PRIMARY KEY AUTOINCREMENT, reference TEXT UNIQUE NOT NULL, "
                "customer TEXT NOT NULL)"
            )
        with txmq.connect(address) as client:
            for topic in (ORDERS, PAYMENTS, AUDIT, SHIPMENTS):
                client.topics.create(topic, partitions=4)
            open_resource(str(self.database)).install(client)
        with closing(open_database(str(self.shop))) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute(
                "CREATE TABLE shipments (id INTEGER PRIMARY KEY AUTOINCREMENT, reference TEXT UNIQUE NOT NULL, "
                "customer TEXT NOT NULL)"
            )
            Outbox(OUTBOX_NAME).install(connection)

    def _round(self, broker: BrokerProcess, death: Death) -> None:
        self._start(broker, death.point if death.service else None, death.point if death.broker else None)
        if death.point is None:
            self._await_progress("the service makes progress")
            time.sleep(self.rng.uniform(0, RANDOM_DELAY_S_MAX))
        elif death.service:
            _await(lambda: not self._service_runs, f"the service reaches {death.point}")
        else:
            _await(lambda: not broker.is_running, f"the broker reaches {death.point}")
        if death.broker:
            broker.kill()
            self.broker_kills += 1
        if death.service:
            self._kill_service()
            self.service_kills += 1

    def _start(self, broker: BrokerProcess, service_crash: str | None, broker_crash: str | None) -> None:
        """Start each dead process; one that is to die at a crash point is stopped in order and started with the
        point."""
        if broker_crash is not None and broker.is_running:
            broker.stop()
        if not broker.is_running:
            broker.start(env={} if broker_crash is None else {"TXMQ_CRASH": broker_crash})
        if service_crash is not None and self._service_runs:
            self._stop_service()
        if not self._service_runs:
            self.in_doubt |= _list_in_doubt(broker.address)
            self._start_service(broker.address, service_crash)

    def _start_service(self, address: str, crash: str | None) -> None:
        self.run_number += 1
        self.service = _spawn(
            ("txmq.cli.demo.service", address, str(self.database), str(self.run_number)),
            self.said,
            self.directory / "service.log",
            crash,
        )

    @property
    def _service_runs(self) -> bool:
        return self.service is not None and self.service.poll() is None

    def _kill_service(self) -> None:
        if self.service is not None:
            self.service.kill()
            self.service.wait()

    def _stop_service(self) -> None:
        if self.service is None or not self._service_runs:
            raise DemoFailedError(f"the service ended by itself; see {self.directory / 'service.log'}")
        self.service.send_signal(signal.SIGTERM)
        try:
            self.service.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            raise DemoFailedError(f"the service does not stop within {WAIT_S:.0f} s of SIGTERM") from None

    def _await_progress(self, what: str) -> None:
        before = self.reported()

        def moved() -> bool:
            now = self.reported()
            least = min(len(now.orders) - len(before.orders), len(now.payments) - len(before.payments))
            return least >= PROGRESS_PER_ROUND

        _await(moved, what)

    def reported(self) -> Reported:
        """Read the service's output so far; an unfinished last line does not count."""
        words: dict[str, set[str]] = {"order": set(), "payment": set(), "declined": set()}
        text = self.said.read_text("utf-8") if self.said.exists() else ""
        for line in text[: text.rfind("\n") + 1].splitlines():
            word, _, reference = line.partition(" ")
            words.setdefault(word, set()).add(reference)
        return Reported(*(frozenset(words.get(word, ())) for word in ("order", "payment", "declined", "shipment")))

    def _progress(self) -> str:
        reported = self.reported()
        return f"{len(reported.orders)} orders and {len(reported.payments)} payments acknowledged"

    def _resolve(self, address: str) -> int:
        """Run ``txmq resolver`` until nothing is in doubt; returns what is left at the deadline."""
        config = self.directory / "resolver.toml"
        config.write_text(
            f"bootstrap = {json.dumps(address)}\n\n[[resource]]\nname = {json.dumps(RESOURCE_NAME)}\n"
            f'driver = "sqlite3"\nconnect = {{ database = {json.dumps(str(self.database))} }}\n'
        )
        log = self.directory / "resolver.log"
        process = _spawn(("txmq.cli.main", "resolver", "--config", str(config)), log, log, None)
        try:
            deadline = time.monotonic() + RESOLVE_S
            while (left := _list_in_doubt(address)) and time.monotonic() < deadline:
                time.sleep(POLL_S)
            return len(left)
        finally:
            process.kill()
            process.wait()

    def _compare(self, address: str) -> Comparison:
        with closing(sqlite3.connect(self.database)) as connection:
            found = connection.execute("SELECT reference, customer FROM orders ORDER BY id").fetchall()
        rows = [Row(*row) for row in found]
        with txmq.connect(address) as client:
            orders, payments, audit = (_read(client, topic) for topic in (ORDERS, PAYMENTS, AUDIT))
        return compare(rows, orders, payments, audit, self.reported())

    # --- the second act ----------------------------------------------------------------------------------------------

    def _hand_over(self, broker: BrokerProcess) -> HandedOver:
        """A shop takes orders while the broker is away; a relay hands them over, and the broker dies meanwhile."""
        broker.kill()
        for number in (1, 2):
            self._ship(number)
        self.service_kills += 1
        self.say(f"the broker is away, and a shop goes on: {len(self.reported().shipments)} orders wait in its outbox")
        relay = self._start_relay(broker.address)
        try:
            broker.start(env={"TXMQ_CRASH": BROKER_DEATH})
            _await(lambda: not broker.is_running, f"the broker reaches {BROKER_DEATH}")
            broker.kill()
            self.broker_kills += 2
            self.say("the broker is back, a relay hands the orders over, and the broker is killed with a page in hand")
            broker.start()
            return self._handed_over(broker.address)
        finally:
            relay.kill()
            relay.wait()

    def _ship(self, number: int) -> None:
        """Run the shop until it has made progress, and kill it."""
        before = len(self.reported().shipments)
        words = ("txmq.cli.demo.shop", str(self.shop), str(number))
        shop = _spawn(words, self.said, self.directory / "shop.log", None)
        try:
            wanted = before + SHIPMENTS_PER_RUN
            _await(lambda: len(self.reported().shipments) >= wanted, "the shop ships while the broker is away")
        finally:
            shop.kill()
            shop.wait()

    def _start_relay(self, address: str) -> subprocess.Popen[bytes]:
        config = self.directory / "outbox.toml"
        config.write_text(
            f"bootstrap = {json.dumps(address)}\n\n[[outbox]]\nname = {json.dumps(OUTBOX_NAME)}\n"
            f'driver = "sqlite3"\nconnect = {{ database = {json.dumps(str(self.shop))}, timeout = 30 }}\n'
        )
        log = self.directory / "relay.log"
        return _spawn(("txmq.cli.main", "outbox", "run", "--config", str(config)), log, log, None)

    def _handed_over(self, address: str) -> HandedOver:
        """Compare when as many messages are there as rows, or the time is over."""
        with closing(open_database(str(self.shop))) as connection:
            found = connection.execute("SELECT reference, customer FROM shipments ORDER BY id").fetchall()
        rows, deadline = [Row(*row) for row in found], time.monotonic() + WAIT_S
        with txmq.connect(address) as client:
            while len(sent := _read(client, SHIPMENTS)) < len(rows) and time.monotonic() < deadline:
                time.sleep(POLL_S)
        return compare_handed_over(rows, sent, self.reported().shipments)


def _read(client: txmq.Client, topic: str) -> list[Sent]:
    return [
        Sent(
            message.partition,
            message.offset,
            (message.key or b"").decode(),
            json.loads(message.value or b"{}").get("reference", ""),
        )
        for message in client.browse(topic)
    ]


def _list_in_doubt(address: str) -> set[str]:
    with txmq.connect(address) as client:
        return {str(item["txid"]) for item in client.transactions.list(state="in-doubt")}


def _spawn(module: tuple[str, ...], output: Path, log: Path, crash: str | None) -> subprocess.Popen[bytes]:
    """``python -m module...`` with output and log appended to files, and no ``TXMQ_*`` variable but the crash point."""
    environment = {name: text for name, text in os.environ.items() if not name.startswith("TXMQ_")}
    if crash is not None:
        environment["TXMQ_CRASH"] = crash
    with output.open("ab") as out, log.open("ab") as errors:
        return subprocess.Popen(  # noqa: S603 - our own interpreter and modules
            [sys.executable, "-m", *module],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=errors,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the demo, which ends its children
        )


def _await(condition: Callable[[], bool], what: str) -> None:
    eventually(condition, what, WAIT_S, DemoFailedError)
