"""Which server a test's database is, by one variable."""

from __future__ import annotations

from pathlib import Path

import pytest

from txmq.testing.processes.database_programs import (
    VARIABLE,
    MariaDBFailedError,
    MariaDBProgram,
    MySQLProgram,
    chosen_program,
)


def unpacked(root: Path, *programs: str) -> Path:
    for program in programs:
        path = root / "usr/sbin" / program
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
    return root


def test_without_the_variable_it_is_this_machines_mariadb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert isinstance(chosen_program(), MariaDBProgram)


def test_the_variable_names_the_root_of_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, programs, kind in (
        ("a", ("mysqld",), MySQLProgram),
        ("b", ("mysqld", "mariadbd"), MariaDBProgram),  # which has its old name, too
    ):
        root = unpacked(tmp_path / name, *programs)
        monkeypatch.setenv(VARIABLE, str(root))
        found = chosen_program()
        assert isinstance(found, kind)
        assert found.server == str(root / "usr/sbin" / programs[-1])


def test_a_place_without_a_server_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with pytest.raises(MariaDBFailedError, match="no server is unpacked there"):
        chosen_program()


def test_a_program_that_is_missing_names_its_root(tmp_path: Path) -> None:
    with pytest.raises(MariaDBFailedError, match=f"mariadb-install-db is not installed: not in {tmp_path}"):
        MariaDBProgram(tmp_path).install_command(tmp_path / "data", tmp_path)
