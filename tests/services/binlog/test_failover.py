"""Another master: a replica takes the place of the server that was read, found by GTID. Its binlog is encrypted."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from tests.services.binlog.reading import Reading
from txmq.binlog.errors import SourceError
from txmq.testing.eventually import eventually
from txmq.testing.processes.database_programs import Ability
from txmq.testing.processes.mariadb import MariaDB


def encrypted(directory: Path) -> tuple[str, ...]:
    """Options of a replica whose binlog is encrypted."""
    keys = directory / "keys"
    keys.write_text(f"1;{'0f' * 32}\n", "ascii")
    return (
        "--server-id=2", "--log-slave-updates=1", "--plugin-load-add=file_key_management",
        f"--file-key-management-filename={keys}", "--encrypt-binlog=1",
    )  # fmt: skip


@pytest.mark.needs(Ability.DOMAINS, Ability.KEY_FILES)
def test_a_replica_is_read_on_where_its_master_ended(server: MariaDB, tmp_path: Path) -> None:
    with (
        Reading(server) as reading,
        MariaDB(tmp_path / "replica", binary_log=True, options=encrypted(tmp_path)) as replica,
        closing(reading.another(port=replica.port)) as source,
    ):
        at = server.execute("SELECT @@gtid_binlog_pos")[0][0]
        for statement in (
            "RESET MASTER",
            f"CREATE DATABASE {reading.database} CHARACTER SET utf8mb4",
            "RESET MASTER",  # both servers are the same now
            f"SET GLOBAL gtid_slave_pos = '{at}'",
            f"CHANGE MASTER TO MASTER_HOST = '127.0.0.1', MASTER_PORT = {server.port}, MASTER_USER = 'root', "
            "MASTER_USE_GTID = slave_pos",
        ):
            replica.execute(statement)
        reading.run("CREATE TABLE t (id INT PRIMARY KEY, v VARCHAR(20))", "INSERT INTO t VALUES (1, 'a')")
        published = reading.parts()[-1].after
        with pytest.raises(SourceError, match="this is another server"):
            source.open(published)  # it has not replicated what is published
        replica.execute("START SLAVE")
        reading.run("INSERT INTO t VALUES (2, 'b')")
        end = server.execute("SELECT @@gtid_binlog_pos")[0][0]
        eventually(lambda: replica.execute("SELECT @@gtid_slave_pos")[0][0] == end, lambda: _state(replica))
        replica.execute("STOP SLAVE")
        replica.execute(f"INSERT INTO {reading.database}.t VALUES (3, 'c')")
        source.open(published)
        changes = [change for part in reading.parts(source) for change in part.changes]
        assert [change.after for change in changes] == [(2, "b"), (3, "c")]


def _state(replica: MariaDB) -> str:
    return str(replica.execute("SHOW SLAVE STATUS"))
