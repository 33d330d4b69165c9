"""What all tests share: a clean environment, and a real broker or MariaDB for those that ask for one."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from tests.leftovers import LASTING, Leftovers
from txmq.config import ENVIRONMENT_PREFIX
from txmq.config_sources import OTHER_PREFIXES
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.database_programs import chosen_program
from txmq.testing.processes.fork_server import ForkServer
from txmq.testing.processes.mariadb import MariaDB
from txmq.testing.processes.postgresql import PostgreSQL
from txmq.testing.processes.zookeeper import Ensemble

# Interpreters look for cycles after every 700 objects made and kept: an eighth of the unit tests' processor time.
gc.set_threshold(100_000, 20, 100)

# A shell ignores SIGINT for what it starts in the background, and so would all that the tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A loaded machine may take longer for an example than hypothesis allows by itself.
hypothesis.settings.register_profile("txmq", deadline=None)
hypothesis.settings.load_profile("txmq")

SPARK = "tests/spark/"


@pytest.fixture(autouse=True)
def without_settings_of_the_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable of the person who runs the tests must not decide how they end."""
    for name in list(os.environ):
        if name.startswith(ENVIRONMENT_PREFIX) and not name.startswith(OTHER_PREFIXES):
            monkeypatch.delenv(name)


# What the tests start hundreds of times. Its imports are half a second of processor time for each start.
FORKED = (
    "txmq.broker.shell.process", "tools.crash.worker", "tools.crash.reader", "tools.crash.xa.worker",
    "tools.crash.xa.reader", "tools.crash.groups.member", "tools.crash.groups.producer", "tools.crash.ordered.worker",
    "tools.crash.homes.worker", "tools.crash.homes.reader", "tools.crash.aio.worker", "tools.crash.aio.reader",
)  # fmt: skip
REHEARSED = (["txmq.cli.main", "broker", "--show-settings"],)


@pytest.fixture(scope="session", autouse=True)
def fork_server() -> Iterator[ForkServer]:
    """Brokers, and the children of campaigns, are forked; tests/services/broker/test_process.py starts its own."""
    with ForkServer(FORKED, REHEARSED) as server:
        yield server


# What a test server reserves on disk is written in full: by default 144 MB for each broker, 126 MB for each MariaDB.
# A message may be as large as ever.
SMALL_BROKER = {"journal_file_size_bytes": 18 << 20, "group_size_bytes_max": 1 << 20}


@pytest.fixture(scope="session", autouse=True)
def small_servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Little of the disk for each server, and only as long as its file's tests run; see ``Leftovers``."""
    BrokerProcess.defaults, MariaDB.defaults = SMALL_BROKER, chosen_program().small
    BrokerProcess.ports_file = Path(tempfile.gettempdir(), f"txmq-tests-ports-{os.getuid()}")  # of all that test here
    MariaDB.template = tmp_path_factory.mktemp(f"{LASTING}-mariadb") / "data"
    PostgreSQL.template = tmp_path_factory.mktemp(f"{LASTING}-postgresql") / "data"
    request.config.pluginmanager.register(Leftovers(tmp_path_factory.getbasetemp()))


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    """A real broker process on a free port, over an empty data directory."""
    with BrokerProcess(tmp_path / "broker") as process:
        yield process


@pytest.fixture(scope="module")
def shared_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """A real broker for all tests of a file."""
    with BrokerProcess(tmp_path_factory.mktemp("broker") / "data") as process:
        yield process


@pytest.fixture(scope="module")
def mariadb(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MariaDB]:
    """A real MariaDB with an empty database, one for each file of tests."""
    with MariaDB(tmp_path_factory.mktemp("mariadb")) as server:
        yield server


@pytest.fixture(scope="module")
def postgresql(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgreSQL]:
    """A real PostgreSQL with an empty database, one for each file of tests."""
    with PostgreSQL(tmp_path_factory.mktemp("postgresql")) as server:
        yield server


@pytest.fixture(scope="session")
def lasting_ensemble(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ensemble]:
    """The server of ``ensemble``: a second of processor time, which each file would spend anew."""
    with Ensemble(tmp_path_factory.mktemp(f"{LASTING}-zookeeper")) as servers:
        yield servers


@pytest.fixture(scope="module")
def ensemble(lasting_ensemble: Ensemble) -> Ensemble:
    """A real ZooKeeper of one server, which serves; each test has nodes of its own, under names no other file has."""
    lasting_ensemble.resume()  # a test that failed may have left it frozen, or killed
    return lasting_ensemble.start()


# What takes longest, the longest first; the rest follows, as collected. What begins last keeps one worker busy alone.
LONGEST = (
    "tests/simulation/", "tests/spark/", "tests/crash/test_spark_campaign", "tests/crash/test_xa_campaign",
    "tests/crash/test_homes_campaign",
    "tests/crash/test_group_campaign", "tests/crash/test_ordered_campaign", "tests/crash/test_campaign",
    "tests/services/broker/test_bad_surroundings", "tests/services/cli/test_cli.",
    "tests/services/consumer/test_consumers.", "tests/images/", "tests/services/producer/test_ordered_producer",
    "tests/services/xa/test_xa.", "tests/examples/",
)  # fmt: skip


def _turn(item: pytest.Item) -> int:
    return next((turn for turn, start in enumerate(LONGEST) if item.nodeid.startswith(start)), len(LONGEST))


# What is played on simulated parts, or waits for a JVM, needs the processor: a busy machine makes it longer, not wrong.
PLAYED, PLAYED_S_MAX = ("tests/simulation/", "tests/images/", "tests/spark/"), 1800


def _leave_out_what_no_server_can(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of an ability that the database has not (``needs``) are counted as deselected."""
    wanted = {item: {one for mark in item.iter_markers("needs") for one in mark.args} for item in items}
    needing = {item: abilities for item, abilities in wanted.items() if abilities}
    if not needing:
        return
    there = chosen_program().abilities
    left_out = [item for item, abilities in needing.items() if not abilities <= there]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """See ``LONGEST``, ``PLAYED`` and ``Ability``."""
    items.sort(key=_turn)
    _leave_out_what_no_server_can(config, items)
    for item in items:
        if item.nodeid.startswith(PLAYED) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(PLAYED_S_MAX))


class InTurn(LoadFileScheduling):  # type: ignore[misc]  # without types
    """``--dist loadfile``: a file is one worker's, and so is all of tests/spark, because of its JVM."""

    def _split_scope(self, nodeid: str) -> str:
        return SPARK if nodeid.startswith(SPARK) else str(super()._split_scope(nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """Ours for ``loadfile``, which by itself begins with the files of most tests, however short these are."""
    if config.getoption("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False
    return InTurn(config, log)
