"""The launcher of a real MariaDB: it starts, dies, comes back with what was committed, and says what is wrong."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import MySQLdb
import pytest

from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.database_programs import VARIABLE, MariaDBFailedError
from txmq.testing.processes.mariadb import MariaDB


def test_committed_rows_survive_a_kill_and_uncommitted_ones_do_not(mariadb: MariaDB) -> None:
    mariadb.execute("CREATE TABLE t (id INT PRIMARY KEY) ENGINE=InnoDB")
    mariadb.execute("INSERT INTO t VALUES (1)")
    open_transaction = mariadb.connect()
    open_transaction.cursor().execute("INSERT INTO t VALUES (2)")
    arguments = mariadb.connect_arguments()
    mariadb.kill()
    assert not mariadb.is_running
    with pytest.raises(MySQLdb.OperationalError):
        open_transaction.commit()
    mariadb.start()
    assert mariadb.connect_arguments() == arguments
    assert mariadb.execute("SELECT id FROM t") == [(1,)]
    mariadb.execute("DROP TABLE t")


def test_it_is_reached_by_socket_and_by_tcp(mariadb: MariaDB) -> None:
    for tcp in (False, True):
        with closing(MySQLdb.connect(**mariadb.connect_arguments(tcp=tcp))) as connection:
            cursor = connection.cursor()
            cursor.execute("SELECT DATABASE(), @@port, @@innodb_flush_log_at_trx_commit, @@log_bin")
            assert cursor.fetchone() == ("shop", mariadb.port, 1, 0)


def test_orderly_stop_and_a_second_object_over_its_directory(tmp_path: Path) -> None:
    directory = tmp_path / ("long" * 30)  # longer than the path of a socket may be
    with MariaDB(directory, binary_log=True) as first:
        first.execute("CREATE TABLE t (id INT PRIMARY KEY)")
        with pytest.raises(MariaDBFailedError, match="running already"):
            first.start()
        first.stop()
        assert "Shutdown complete" in first.logs()
    with MariaDB(directory, binary_log=True) as second:
        assert second.execute("SELECT COUNT(*) FROM t") == [(0,)]
        assert second.execute("SELECT @@log_bin, @@sync_binlog") == [(1, 1)]
        pid = second.pid
    assert not second.is_running
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_server_that_cannot_start_is_reported_with_its_log(tmp_path: Path) -> None:
    with pytest.raises(MariaDBFailedError, match="no-such-option"):
        MariaDB(tmp_path / "m", options=["--no-such-option=1"]).start()


def test_its_directory_may_be_named_by_text(tmp_path: Path) -> None:
    assert MariaDB(str(tmp_path / "m")).directory == tmp_path / "m"
    assert BrokerProcess(str(tmp_path / "b")).data_dir == tmp_path / "b"


def test_a_missing_server_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("txmq.testing.processes.database_programs._SERVER_DIRECTORIES", ())
    with pytest.raises(MariaDBFailedError, match="apt-get install mariadb-server"):
        MariaDB(tmp_path / "m").start()


def test_a_frozen_server_answers_when_it_is_resumed(mariadb: MariaDB) -> None:
    mariadb.pause()
    try:
        with pytest.raises(MySQLdb.OperationalError):
            mariadb.connect(connect_timeout=1, read_timeout=1)
    finally:
        mariadb.resume()
    assert mariadb.execute("SELECT 1") == [(1,)]
