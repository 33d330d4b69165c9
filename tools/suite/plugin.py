"""The plug-in of pytest that ``python -m tools.suite`` gives each stage: ``-p tools.suite.plugin``.

It appends failures to a file (a line of JSON each), and to another when each test began and ended, notes what an error
says of a broken promise while the values that were compared are still there, and shuffles the files of tests if asked
to.
"""

from __future__ import annotations

import json
import random
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tools.suite.promises import broken_promise, difference_of


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of ours."""
    group = parser.getgroup("suite")
    group.addoption("--failures", type=Path, metavar="FILE", help="append each failure, a line of JSON")
    group.addoption("--times", type=Path, metavar="FILE", help="append when each test ran, and where, a line of JSON")
    group.addoption("--order", type=int, metavar="SEED", help="run the files of tests in an order drawn from SEED")


def pytest_configure(config: pytest.Config) -> None:
    """Processes of xdist report to the first one, which writes."""
    config.pluginmanager.register(Promises())
    if hasattr(config, "workerinput"):
        return
    if config.option.failures is not None:
        config.pluginmanager.register(Recorder(config.option.failures))
    if config.option.times is not None:
        config.pluginmanager.register(Clock(config.option.times))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of one file stay together, in their order."""
    if config.option.order is not None:
        files = sorted({item.nodeid.partition("::")[0] for item in items})
        random.Random(config.option.order).shuffle(files)
        turn = {name: number for number, name in enumerate(files)}
        items.sort(key=lambda item: turn[item.nodeid.partition("::")[0]])


class Promises:
    """Adds what an error says of a broken promise to the report, as ``promise``."""

    def __init__(self) -> None:
        self._difference = ""

    def pytest_runtest_logstart(self) -> None:
        """Another test begins."""
        self._difference = ""

    def pytest_assertrepr_compare(self, op: str, left: object, right: object) -> None:
        """An assertion that compares has failed."""
        self._difference = difference_of(left, right) if op == "==" else ""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        """The values are gone when the report is read by another process."""
        report = yield
        if call.excinfo is not None and report.failed:
            report.promise = broken_promise(call.excinfo.value, self._difference)
        return report


class Recorder:
    """Writes failures as they come: a run that is killed has told of them."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A phase of a test has ended."""
        if report.failed:
            said = {
                "test": report.nodeid, "phase": report.when, "text": report.longreprtext,
                "promise": getattr(report, "promise", ""),
            }  # fmt: skip
            _append(self._path, said)


class Clock:
    """Writes when each test began and ended: what takes long, and which worker has nothing left to do."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._began: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A phase of a test has ended."""
        began = self._began.setdefault(report.nodeid, report.start)
        if report.when == "teardown":
            worker = getattr(report, "worker_id", "")
            _append(self._path, {"test": report.nodeid, "worker": worker, "began": began, "ended": report.stop})


def _append(path: Path, said: Mapping[str, object]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(said) + "\n")
