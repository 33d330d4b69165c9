"""The order services of ``examples/``, each with its database, its broker and its relay, and what befalls them.

All four speak the same HTTP and keep the same tables, so one scenario serves all: requests, customers who order on
until they are answered for good, kills, and the comparison of rows and messages.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import psycopg

import txmq
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess, free_port
from txmq.testing.processes.mariadb import MariaDB
from txmq.testing.processes.postgresql import PostgreSQL

ROOT = Path(__file__).resolve().parents[2]
ARTICLES = ["tea", "none", "cup"]  # the second one does not exist
REQUEST_S = 2
TIMEOUT_S = 60.0
PYTHON = [sys.executable, "-m"]
Told = list[tuple[int, int | str]]  # the order, and which of its customer it is; or an article of it


class Program:
    """A program with all processes that it starts; what they write goes to a file."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        self._command, self._environment, self._log = command, environment, log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, cwd=ROOT, env=self._environment, stdout=log, stderr=log, start_new_session=True
            )

    def kill(self) -> None:
        """SIGKILL to all of them."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(TIMEOUT_S)

    def require_running(self) -> None:
        assert self._process is not None
        assert self._process.poll() is None, self._log.read_text()


@dataclass(frozen=True)
class Place:
    """Where a service is started."""

    name: str
    folder: Path
    broker: BrokerProcess
    port: int
    mariadb: MariaDB
    postgresql: PostgreSQL

    @property
    def database(self) -> str:
        return f"orders_{self.name}"

    def environment(self, orders_db: str, **more: str) -> dict[str, str]:
        own = {"ORDERS_DB": orders_db, "TXMQ_BOOTSTRAP": self.broker.address, "REQUEST_S": str(REQUEST_S)}
        kept = {"PYTHONPATH": str(ROOT), "HOME": str(self.folder)}  # gunicorn has a socket there
        return os.environ | kept | own | more

    def program(self, command: list[str], environment: dict[str, str]) -> Program:
        return Program(command, environment, self.folder / "log")

    def on_postgresql(self) -> Callable[[], Any]:
        """Make the database; what connects to it."""
        with psycopg.connect(self.postgresql.conninfo(), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {self.database}")  # type: ignore[arg-type,unused-ignore]
        return lambda: psycopg.connect(self.postgresql.conninfo(self.database))


@dataclass
class OrderService:
    """One of the four, under way."""

    place: Place
    server: PostgreSQL | MariaDB
    connect: Callable[[], Any]
    web: Program
    relay: Program | None = None  # None: the web's own process has it
    prepare: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.place.port}"

    def start_web(self) -> None:
        self.web.start()
        eventually(self._serves, "the service answers")

    def start(self) -> None:
        """All but broker and database."""
        self.start_web()
        if self.relay is not None:
            self.relay.start()

    def kill(self) -> None:
        """As ``start``."""
        self.web.kill()
        if self.relay is not None:
            self.relay.kill()

    def _serves(self) -> bool:
        self.web.require_running()
        try:
            return self.ask(0, "nobody").status_code == 404
        except httpx.TransportError:
            return False

    def ask(self, number: int, customer: str = "ada", articles: list[str] = ARTICLES) -> httpx.Response:
        """One request."""
        body = {"customer": customer, "articles": articles}
        return httpx.put(f"{self.url}/orders/{number}", json=body, timeout=TIMEOUT_S)

    def put(self, number: int, customer: str = "ada", articles: list[str] = ARTICLES) -> int:
        """A request, again while the database is too slow for it; its status."""
        statuses = list[int]()

        def is_answered() -> bool:
            answer = self.ask(number, customer, articles)
            assert answer.status_code != 201 or answer.json() == {"missing": ["none"]}
            statuses.append(answer.status_code)
            return answer.status_code != 503

        eventually(is_answered, "an answer for good")
        return statuses[-1]

    @contextmanager
    def locked(self, customer: str) -> Iterator[None]:
        """A customer's row is another's for as long as the block."""
        with closing(self.connect()) as connection, closing(connection.cursor()) as cursor:
            cursor.execute("SELECT name FROM shop_customers WHERE name = %s FOR UPDATE", (customer,))
            yield
            connection.rollback()

    def end_the_lease(self) -> None:
        """Of a relay that was killed; instead of waiting for it."""
        with closing(self.connect()) as connection, closing(connection.cursor()) as cursor:
            cursor.execute("UPDATE txmq_outbox_relay SET until_ms = 0")
            connection.commit()

    def rows(self) -> dict[str, Told]:
        """By customer, what its messages must be: each order, in the order of its row's lock, and its articles."""
        with closing(self.connect()) as connection, closing(connection.cursor()) as cursor:
            cursor.execute("SELECT number, article FROM shop_lines")
            lines = set(cursor.fetchall())
            cursor.execute("SELECT customer, nth, number FROM shop_orders ORDER BY customer, nth")
            found = dict[str, Told]()
            for customer, nth, number in cursor.fetchall():
                articles = [article for article in ARTICLES if (number, article) in lines]
                found.setdefault(customer, []).extend([(number, nth), *((number, article) for article in articles)])
        return found

    def told(self) -> dict[str, Told]:
        """By customer, what a reader sees, in its order."""
        found = dict[str, Told]()
        with txmq.connect(self.place.broker.address) as client:
            for message in client.browse("orders"):
                event = json.loads(message.value or b"")
                what = event["nth"] if "nth" in event else event["article"]
                found.setdefault((message.key or b"").decode(), []).append((event["order"], what))
        return found

    def compare(self) -> set[int]:
        """Rows == messages, once and in order; the numbers of the orders."""
        rows = self.rows()
        wanted = sum(map(len, rows.values()))
        eventually(lambda: sum(map(len, self.told().values())) >= wanted, "all is told")
        assert self.told() == rows
        for of_one in rows.values():
            orders = [nth for _, nth in of_one if isinstance(nth, int)]
            assert orders == list(range(1, len(orders) + 1))
        return {number for of_one in rows.values() for number, _ in of_one}


class Customers:
    """Several who order at once, each order until it is answered for good. Usable as a block."""

    NAMES = ("ada", "ada", "ben", "cleo")

    def __init__(self, service: OrderService, first: int) -> None:
        self._service, self._numbers, self._ended = service, count(first), Event()
        self.accepted, self.wrong = set[int](), list[str]()
        self._threads = [Thread(target=self._order_on, args=(name,)) for name in self.NAMES]

    def __enter__(self) -> Customers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def go_on(self, more: int = 8) -> None:
        """Wait until so many orders more are accepted."""
        wanted = len(self.accepted) + more
        eventually(lambda: len(self.accepted) >= wanted or self.wrong, "orders are accepted")
        assert self.wrong == []

    def _order_on(self, customer: str) -> None:
        with httpx.Client(base_url=self._service.url, timeout=TIMEOUT_S) as web:
            while not self._ended.is_set() and not self.wrong:
                self._order(web, customer, next(self._numbers))

    def _order(self, web: httpx.Client, customer: str, number: int) -> None:
        body = {"customer": customer, "articles": ARTICLES}
        while not self._ended.is_set():
            try:
                answer = web.put(f"/orders/{number}", json=body)
            except httpx.TransportError:  # the service was killed, or is not there yet
                self._ended.wait(0.01)
                continue
            if answer.status_code in (201, 409):
                self.accepted.add(number)
                return
            if answer.status_code != 503:
                self.wrong.append(f"{answer.status_code}: {answer.text}")
                return


def fastapi(place: Place) -> OrderService:
    """AsyncSession on asyncpg, by uvicorn; its relay runs in a thread next to the loop."""
    connect = place.on_postgresql()
    url = f"postgresql://postgres@127.0.0.1:{place.postgresql.port}/{place.database}"
    command = [*PYTHON, "uvicorn", "--port", str(place.port), "--factory", "examples.order_service_fastapi:create_app"]
    return OrderService(place, place.postgresql, connect, place.program(command, place.environment(url)))


def plain_psycopg(place: Place) -> OrderService:
    """Threads of the standard library; its relay is another one."""
    connect = place.on_postgresql()
    conninfo = place.postgresql.conninfo(place.database)
    command = [sys.executable, "examples/order_service_psycopg.py", conninfo, str(place.port), place.broker.address]
    return OrderService(place, place.postgresql, connect, place.program(command, place.environment("")))


def django(place: Place) -> OrderService:
    """ATOMIC_REQUESTS; its relay is ``manage.py txmq_relay``."""
    connect = place.on_postgresql()
    where = {"HOST": "127.0.0.1", "PORT": place.postgresql.port, "USER": "postgres", "NAME": place.database}
    settings = "examples.order_service_django.settings"
    environment = place.environment(json.dumps(where), DJANGO_SETTINGS_MODULE=settings)
    command = [*PYTHON, "django"]
    web = place.program([*command, "runserver", "--noreload", str(place.port)], environment)
    relay = place.program([*command, "txmq_relay"], environment)
    _run([*command, "migrate", "--run-syncdb", "-v0"], environment)
    return OrderService(place, place.postgresql, connect, web, relay)


def flask(place: Place) -> OrderService:
    """Flask-SQLAlchemy on MariaDB, by workers that gunicorn forks from the loaded application; a relay by itself."""
    place.mariadb.make_database_anew(place.database)
    where = place.mariadb.connect_arguments() | {"db": place.database}
    url = f"mysql+mysqldb://root@/{place.database}?unix_socket={where['unix_socket']}&charset=utf8mb4"
    environment = place.environment(url)
    config = place.folder / "outbox.toml"
    given = ", ".join(f"{name} = {json.dumps(value)}" for name, value in where.items())
    config.write_text(
        f'bootstrap = "{place.broker.address}"\n[[outbox]]\nname = "orders-db"\ndriver = "MySQLdb"\n'
        f"connect = {{ {given} }}\n"
    )
    served = ["--preload", "--workers", "2", "--threads", "4", "--bind", f"127.0.0.1:{place.port}"]
    web = place.program([*PYTHON, "gunicorn", *served, "examples.order_service_flask:create_app()"], environment)
    relay = place.program([*PYTHON, "txmq.cli.main", "outbox", "run", "--config", str(config)], environment)
    _run([*PYTHON, "flask", "--app", "examples.order_service_flask", "init-db"], environment)
    return OrderService(place, place.mariadb, lambda: place.mariadb.connect(db=place.database), web, relay)


def _run(command: list[str], environment: dict[str, str]) -> None:
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert ended.returncode == 0, ended.stderr


SERVICES = {"django": django, "fastapi": fastapi, "flask": flask, "psycopg": plain_psycopg}


@contextmanager
def running(name: str, folder: Path, mariadb: MariaDB, postgresql: PostgreSQL) -> Iterator[OrderService]:
    """One of them with a broker of its own, started; killed at the block's end."""
    with BrokerProcess(folder / "broker") as broker:
        with txmq.connect(broker.address) as client:
            client.topics.create("orders", partitions=2)
        service = SERVICES[name](Place(name, folder, broker, free_port(), mariadb, postgresql))
        try:
            service.start()
            yield service
        finally:
            service.kill()
