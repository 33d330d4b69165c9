"""``tools/newer_databases.py``: what it says where a server cannot be had, and what it unpacks."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tools import newer_databases
from tools.newer_databases import CAMPAIGNS, SERVERS, main
from txmq.testing.processes.database_programs import VARIABLE


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newer_databases, "PLACE", tmp_path / "databases")


def test_where_packages_cannot_be_had_one_line_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = subprocess.CompletedProcess([], 100, "", "E: Unable to locate package\nE: more of it")
    monkeypatch.setattr(shutil, "which", lambda program: f"/usr/bin/{program}")
    monkeypatch.setattr(subprocess, "run", lambda *_words, **_how: failed)
    assert main([]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"txmq test-mysql: {server.title} of Debian {server.suite} cannot be had here: apt-get failed: "
        "E: Unable to locate package"
        for server in SERVERS
    ]


def test_without_debians_programs_nothing_is_tried(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _program: None)
    assert main(["--only", "mysqld"]) == 1
    assert "apt-get is not here" in capsys.readouterr().out


def test_tests_are_told_where_the_server_is(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[list[str], str]] = []

    def run(command: list[str], **how: Any) -> subprocess.CompletedProcess[str]:
        said.append((command[2:4], how["env"][VARIABLE]))
        return subprocess.CompletedProcess(command, int(command[2] == "tools.crash"))

    for server in SERVERS:
        server.root.mkdir(parents=True)
    monkeypatch.setattr(subprocess, "run", run)
    assert main(["--cycles", "3"]) == 1  # tests passed, the campaigns did not
    assert said == [
        (words, str(server.root))
        for server in SERVERS
        for words in (["pytest", "-q"], *(["tools.crash", campaign] for campaign in CAMPAIGNS))
    ]
    assert main(["--cycles", "0"]) == 0
