"""The programs of docs/how-to/sqlalchemy.md run as they stand."""

from __future__ import annotations

import inspect
import re
import sqlite3
import subprocess
import sys
from contextlib import closing, suppress
from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import MetaData, create_engine

import txmq
from examples import sqlalchemy_orders
from examples.order_service_fastapi import take
from txmq.sqlalchemy import Outbox
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess

PAGE = (Path(__file__).resolve().parents[2] / "docs/how-to/sqlalchemy.md").read_text("utf-8")
FIRST, MIGRATION, SQLMODEL, CORE, LAST_RESOURCE, CONSUMER = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
TIMEOUT_S = 300
DATABASE, ADDRESS = "/tmp/shop.db", "txmq://127.0.0.1:8123"
ENVIRONMENT = """
from alembic import context
from sqlalchemy import MetaData, create_engine
from txmq.sqlalchemy import Outbox

metadata = MetaData()
Outbox(metadata)
with create_engine(context.config.get_main_option("sqlalchemy.url")).connect() as connection:
    context.configure(connection=connection, target_metadata=metadata)
    with context.begin_transaction():
        context.run_migrations()
"""


def run(program: str, *changed: tuple[str, str]) -> str:
    """What a program prints, in an interpreter that takes a warning for an error."""
    for written, here in changed:
        assert written in program
        program = program.replace(written, here)
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def waiting(path: Path) -> list[bytes]:
    with closing(sqlite3.connect(path)) as connection:
        return [value for (value,) in connection.execute("SELECT value FROM txmq_outbox ORDER BY id")]


def test_first_program_takes_its_message_to_the_broker(broker: BrokerProcess, tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    assert run(FIRST, (DATABASE, str(path)), (ADDRESS, broker.address)) == "[b'{\"created\":1}']\n"
    assert waiting(path) == []


def test_migration_makes_what_the_metadata_has(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    (tmp_path / "versions").mkdir()
    (tmp_path / "env.py").write_text(ENVIRONMENT, "utf-8")
    (tmp_path / "versions" / "0001_outbox.py").write_text(MIGRATION, "utf-8")
    config = Config()
    config.set_main_option("script_location", str(tmp_path))
    config.set_main_option("path_separator", "os")
    config.set_main_option("sqlalchemy.url", url)
    command.upgrade(config, "head")
    command.check(config)
    outbox, engine = Outbox(MetaData()), create_engine(url)
    with engine.connect() as connection:
        assert len(connection.execute(outbox.relay.select()).all()) == 1
    command.downgrade(config, "base")
    with engine.connect() as connection:
        assert not engine.dialect.has_table(connection, "txmq_outbox")
    engine.dispose()


def test_program_with_sqlmodel_sends_with_its_row(tmp_path: Path) -> None:
    run(SQLMODEL, (DATABASE, str(tmp_path / "shop.db")))
    assert waiting(tmp_path / "shop.db") == [b'{"created":1}']


def test_core_of_the_fastapi_service_is_that_of_the_example() -> None:
    assert inspect.getsource(take) == CORE


def test_block_of_a_last_resource_commits_both(broker: BrokerProcess, tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'shop.db'}")
    sqlalchemy_orders.Base.metadata.create_all(engine)
    with txmq.connect(broker.address) as client, client.producer() as producer:
        client.topics.create("orders")
        orders_db = txmq.LastResource("orders-db", connect=lambda: sqlalchemy_orders.detached(engine))
        orders_db.install(client)
        exec(LAST_RESOURCE, vars(sqlalchemy_orders) | {"engine": engine, "producer": producer, "orders_db": orders_db})
        assert [message.value for message in client.browse("orders")] == [b"created 1"]
        orders_db.close()
    with closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
        assert connection.execute("SELECT customer FROM orders_sqlalchemy").fetchall() == [("ada",)]
    engine.dispose()


def test_consumer_books_each_amount_once_though_killed(broker: BrokerProcess, tmp_path: Path) -> None:
    program = CONSUMER
    for written, here in ((DATABASE, path := str(tmp_path / "shop.db")), (ADDRESS, broker.address)):
        assert written in program
        program = program.replace(written, here)

    def total() -> int:
        with suppress(sqlite3.OperationalError), closing(sqlite3.connect(path)) as connection:
            return sum(amount for (amount,) in connection.execute("SELECT amount FROM totals"))
        return 0

    with txmq.connect(broker.address) as client, client.producer() as producer:
        client.topics.create("amounts", partitions=4)
        for wanted in (100, 200):
            producer.send_many("amounts", [(b"%d" % (number % 7), b"1") for number in range(100)])
            with subprocess.Popen([sys.executable, "-W", "error", "-c", program]) as consumer:
                try:
                    eventually(lambda least=wanted - 90: total() >= least, "it books")  # type: ignore[misc]
                    if wanted == 200:
                        eventually(lambda: total() >= 200, "all is booked")
                finally:
                    consumer.kill()
        assert total() == 200
