"""The database server has the abilities that are told: a test that needs one is left out only where it is not."""

from __future__ import annotations

from contextlib import closing

import MySQLdb
import pytest

from txmq.testing.processes.database_programs import Ability
from txmq.testing.processes.mariadb import MariaDB


@pytest.mark.parametrize(
    ("ability", "statement"),
    [
        (Ability.ARIA, "CREATE TABLE t (i INT) ENGINE=Aria"),
        (Ability.BINARY_JSON, "DO JSON_STORAGE_SIZE('1')"),
        (Ability.CASCADES_IN_BINLOG, "DO @@innodb_native_foreign_keys"),
        (Ability.COMPOUND_STATEMENTS, "PREPARE p FROM 'BEGIN NOT ATOMIC DO 1; DO 2; END'"),
        (Ability.COMPRESSED_COLUMNS, "CREATE TABLE t (v TEXT COMPRESSED)"),
        (Ability.COMPRESSED_EVENTS, "DO @@log_bin_compress"),
        (Ability.DOMAINS, "DO @@gtid_domain_id"),
        (Ability.NETWORK_TYPES, "CREATE TABLE t (u UUID, six INET6, four INET4)"),
        (Ability.OLD_TEMPORAL_TYPES, "DO @@mysql56_temporal_format"),
        (Ability.REPLACED_TABLES, "CREATE OR REPLACE TABLE t (i INT)"),
        (Ability.SEQUENCES, "CREATE SEQUENCE s"),
        (Ability.TWO_PHASE_ALTER, "DO @@binlog_alter_two_phase"),
        (Ability.UCA1400, "CREATE TABLE t (v TEXT COLLATE uca1400_ai_ci)"),
        (Ability.VECTORS, "CREATE TABLE t (e VECTOR(2))"),
    ],
)
def test_a_server_has_the_abilities_that_are_told(mariadb: MariaDB, ability: Ability, statement: str) -> None:
    mariadb.make_database_anew("abilities")
    with closing(mariadb.connect(db="abilities")) as connection:
        is_there = True
        try:
            connection.query(statement)
        except MySQLdb.Error:
            is_there = False
    assert is_there == (ability in mariadb.program.abilities)


def test_a_consistent_read_has_a_place_where_that_is_told(mariadb: MariaDB) -> None:
    told = mariadb.execute("SHOW STATUS LIKE 'binlog_snapshot_file'")
    assert bool(told) == (Ability.SNAPSHOTS in mariadb.program.abilities)
