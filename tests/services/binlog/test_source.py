"""The reader of the binlog on a real MariaDB: transactions, statements, XA, restarts, and what stops it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.services.binlog.reading import Reading
from txmq.binlog.decoded_changes import DdlKind, TableName, TransactionPart, XaEnd, XaPrepare
from txmq.binlog.errors import SourceAwayError, SourceError
from txmq.binlog.position import Position
from txmq.testing.eventually import eventually
from txmq.testing.processes.database_programs import Ability
from txmq.testing.processes.mariadb import MariaDB
from txmq.xid import Xid

TABLE = "CREATE TABLE t (id INT PRIMARY KEY, v VARCHAR(20))"


def test_inserts_updates_and_deletes_come_in_order(reading: Reading) -> None:
    reading.run(TABLE, "INSERT INTO t VALUES (1, 'a'), (2, 'b')", "UPDATE t SET v = 'c'", "DELETE FROM t WHERE id = 1")
    assert reading.told() == [
        ("c", (1, "a")), ("c", (2, "b")),
        ("u", ((1, "a"), (1, "c"))), ("u", ((2, "b"), (2, "c"))), ("d", (1, "c")),
    ]  # fmt: skip


def test_a_transaction_is_one_part_with_its_position(reading: Reading) -> None:
    reading.run(TABLE, "BEGIN", "INSERT INTO t VALUES (1, 'a')", "UPDATE t SET v = 'b'", "COMMIT")
    _, part = reading.parts()
    assert [change.op for change in part.changes] == ["c", "u"]
    assert (part.first, part.last, part.number, part.server_id) == (True, True, 0, 1)
    assert part.after.gtids == reading.server.binlog_gtids()
    assert (part.after.file, part.after.offset) == reading.server.binlog_end()


def test_what_is_not_captured_still_moves_the_position(reading: Reading) -> None:
    reading.server.execute("CREATE TABLE shop.other (id INT PRIMARY KEY)")
    reading.server.execute("INSERT INTO shop.other VALUES (1)")
    reading.server.execute("DROP TABLE shop.other")
    assert [(part.changes, part.ddl, part.last) for part in reading.parts()] == [([], None, True)] * 3


def test_large_transaction_comes_in_parts_and_goes_on_anywhere(server: MariaDB) -> None:
    with Reading(server, rows_max=100) as reading:
        begin = reading.source.current_position()
        values = ", ".join(f"({number}, 'x')" for number in range(250))
        reading.run(TABLE, "BEGIN", f"INSERT INTO t VALUES {values}", "DELETE FROM t WHERE id < 40", "COMMIT")
        _, *parts = reading.parts()
        shape = [(part.first, part.last, part.number, len(part.changes)) for part in parts]
        assert shape == [(True, False, 0, 100), (False, False, 100, 100), (False, True, 200, 90)]
        assert [part.after.rows for part in parts] == [100, 200, 0]
        assert parts[0].after.gtids == parts[1].after.gtids != parts[2].after.gtids
        assert begin.gtids != parts[2].after.gtids
        for count, part in enumerate(parts, 1):
            again = reading.another()
            with closing(again):
                again.open(part.after)
                if count < len(parts):
                    rest = reading.parts(again)
                    assert _facts(rest) == _facts(parts[count:])
                else:
                    assert again.read(0.0) is None


def test_parts_of_a_large_xa_transaction_say_what_it_is(server: MariaDB) -> None:
    with Reading(server, rows_max=100) as reading:
        reading.run(TABLE)
        for first, end in ((0, "XA PREPARE 'large'"), (500, "XA COMMIT 'large' ONE PHASE")):
            values = ", ".join(f"({number}, 'x')" for number in range(first, first + 250))
            reading.run("XA START 'large'", f"INSERT INTO t VALUES {values}", "XA END 'large'", end)
            if not first:
                reading.run("XA ROLLBACK 'large'")
        xid = Xid(1, b"large", b"")
        told = [(part.xa, part.last, len(part.changes)) for part in reading.parts()[1:]]
    assert told == [
        (XaPrepare(xid), False, 100), (XaPrepare(xid), False, 100), (XaPrepare(xid), True, 50),
        (XaEnd(xid, committed=False), True, 0), (None, False, 100), (None, False, 100), (None, True, 50),
    ]  # fmt: skip


def _facts(parts: list[TransactionPart]) -> list[Any]:
    return [(part.gtid, part.first, part.last, part.number, part.changes, part.after) for part in parts]


def test_position_within_another_transaction_is_refused(reading: Reading) -> None:
    position = reading.begin()
    reading.run(TABLE)
    reading.source.open(replace(position, file="", rows=5, partial="0-1-99999"))
    with pytest.raises(SourceError, match="comes where 0-1-99999 was expected"):
        reading.parts()


def test_fewer_changes_than_were_published_are_refused(reading: Reading) -> None:
    reading.run(TABLE)
    position = reading.begin()
    reading.run("INSERT INTO t VALUES (1, 'a')")
    (part,) = reading.parts()
    reading.source.open(replace(position, file="", rows=5, partial=part.gtid))
    with pytest.raises(SourceError, match="4 changes less than were published"):
        reading.parts()


def test_rows_of_an_xa_transaction_stand_at_its_prepare(reading: Reading) -> None:
    xids = {"X'FF00',X'01',7": Xid(7, b"\xff\x00", b"\x01"), "'y'": Xid(1, b"y", b""), "'o'": Xid(1, b"o", b"")}
    reading.run(TABLE)
    for number, (xid, end) in enumerate(zip(xids, ("COMMIT", "ROLLBACK", "ONE PHASE"), strict=True)):
        last = [f"XA COMMIT {xid} ONE PHASE"] if end == "ONE PHASE" else [f"XA PREPARE {xid}", f"XA {end} {xid}"]
        reading.run(f"XA START {xid}", f"INSERT INTO t VALUES ({number}, 'x')", f"XA END {xid}", *last)
    binary, plain, _ = xids.values()
    told = [(part.xa, len(part.changes)) for part in reading.parts()[1:]]
    assert told == [
        (XaPrepare(binary), 1), (XaEnd(binary, committed=True), 0),
        (XaPrepare(plain), 1), (XaEnd(plain, committed=False), 0), (None, 1),
    ]  # fmt: skip


@pytest.mark.needs(Ability.MIXED_TRANSACTIONS)
def test_rolled_back_to_a_savepoint_is_not_told(reading: Reading) -> None:
    reading.run(
        TABLE, "CREATE TABLE plain (id INT PRIMARY KEY) ENGINE=MyISAM",
        "BEGIN", "INSERT INTO t VALUES (1, 'a')", "SAVEPOINT s", "INSERT INTO t VALUES (2, 'b')",
        "INSERT INTO plain VALUES (9)", "ROLLBACK TO s", "INSERT INTO t VALUES (3, 'c')", "COMMIT",
        "BEGIN", "INSERT INTO t VALUES (4, 'd')", "INSERT INTO plain VALUES (10)", "ROLLBACK",
    )  # fmt: skip
    assert [row for _, row in reading.told()] == [(9,), (1, "a"), (3, "c"), (10,)]


def test_statements_are_told_with_their_tables(reading: Reading) -> None:
    abilities = reading.server.program.abilities
    has_sequences, may_replace = Ability.SEQUENCES in abilities, Ability.REPLACED_TABLES in abilities
    reading.run(
        TABLE,
        f"{'CREATE OR REPLACE' if may_replace else 'CREATE'} TABLE u (id INT PRIMARY KEY) SELECT 1 AS id",
        "ALTER TABLE t ADD COLUMN w INT, ADD KEY (v)",
        "ALTER TABLE t DROP COLUMN w",
        "TRUNCATE u",
        "RENAME TABLE u TO w",
        "CREATE VIEW view_of_t AS SELECT * FROM t",
        "RENAME TABLE view_of_t TO view_of_all",
        *(["CREATE SEQUENCE numbers", "SELECT NEXTVAL(numbers)"] if has_sequences else []),
        "DROP TABLE t, w",
    )
    parts = reading.parts()

    def name(table: str) -> TableName:
        return TableName(reading.database, table)

    told = [(part.ddl.kind, part.ddl.tables, part.ddl.additive) for part in parts if part.ddl is not None]
    assert told == [
        (DdlKind.CREATE, (name("t"),), True), (DdlKind.CREATE, (name("u"),), not may_replace),
        (DdlKind.ALTER, (name("t"),), True), (DdlKind.ALTER, (name("t"),), False),
        (DdlKind.TRUNCATE, (name("u"),), False), (DdlKind.RENAME, (name("u"), name("w")), False),
        (DdlKind.DROP, (name("t"), name("w")), False),
    ]  # fmt: skip
    assert [change.after for part in parts for change in part.changes] == [(1,)]


@pytest.mark.needs(Ability.TWO_PHASE_ALTER)
def test_alter_in_two_phases_is_told_once(reading: Reading) -> None:
    reading.run(
        TABLE,
        "SET SESSION binlog_alter_two_phase = 1",
        "ALTER TABLE t ADD COLUMN w INT",
        "INSERT INTO t VALUES (1, 'a', 2)",
    )
    parts = reading.parts()
    assert [part.ddl.kind for part in parts if part.ddl is not None] == [DdlKind.CREATE, DdlKind.ALTER]
    assert parts[-1].changes[0].after == (1, "a", 2)


def test_columns_are_those_of_the_change_not_of_now(reading: Reading) -> None:
    reading.run(
        TABLE, "INSERT INTO t VALUES (1, 'a')", "ALTER TABLE t ADD COLUMN w INT FIRST",
        "INSERT INTO t VALUES (7, 2, 'b')", "ALTER TABLE t DROP COLUMN v", "INSERT INTO t VALUES (8, 3)",
    )  # fmt: skip
    changes = reading.changes()
    named = [
        dict(zip([column.name for column in change.schema.columns], change.after or (), strict=True))
        for change in changes
    ]
    assert named == [{"id": 1, "v": "a"}, {"w": 7, "id": 2, "v": "b"}, {"w": 8, "id": 3}]
    assert len({change.schema.tag for change in changes}) == 3


@pytest.mark.needs(Ability.COMPRESSED_EVENTS)
def test_compressed_events_are_read(reading: Reading) -> None:
    reading.server.execute("SET GLOBAL log_bin_compress = 1, GLOBAL log_bin_compress_min_len = 10")
    try:
        values = ", ".join(f"({number}, 'zzzzzzzzzz')" for number in range(20))
        inserts = f"INSERT INTO t VALUES {values}"
        reading.run(f"{TABLE} COMMENT '{'a' * 50}'", inserts, "UPDATE t SET v = 'y'", "DELETE FROM t")
    finally:
        reading.server.execute("SET GLOBAL log_bin_compress = 0")
    create, *rows = reading.parts()
    assert create.ddl is not None
    assert [[change.op for change in part.changes] for part in rows] == [[op] * 20 for op in "cud"]


@pytest.mark.needs(Ability.KEY_FILES)
def test_encrypted_files_are_read(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"1;{'0123456789abcdef' * 2}\n", "ascii")
    options = ["--plugin-load-add=file_key_management", f"--file-key-management-filename={keys}", "--encrypt-binlog=1"]
    with MariaDB(tmp_path / "db", binary_log=True, options=options) as server, Reading(server) as reading:
        reading.run(TABLE, "INSERT INTO t VALUES (1, 'plain as day')")
        assert reading.told() == [("c", (1, "plain as day"))]
        name, _ = server.binlog_end()
        (file,) = (tmp_path / "db").rglob(name)
        assert b"plain as day" not in file.read_bytes()


def test_files_with_and_without_checksums_are_read(reading: Reading) -> None:
    reading.run(TABLE)
    for number, checksum in enumerate(["NONE", "CRC32", "NONE", "CRC32"]):
        reading.server.execute(f"SET GLOBAL binlog_checksum = {checksum}")
        reading.run(f"INSERT INTO t VALUES ({number}, 'x')")
    again = reading.another()
    assert [row for _, row in reading.told()] == [(number, "x") for number in range(4)]
    reading.server.execute("SET GLOBAL binlog_checksum = NONE")
    try:
        with closing(again):
            position = again.current_position()
            again.open(position)
            reading.run("INSERT INTO t VALUES (9, 'y')")
            assert [change.after for part in reading.parts(again) for change in part.changes] == [(9, "y")]
    finally:
        reading.server.execute("SET GLOBAL binlog_checksum = CRC32")


@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO t VALUES (2, 's')",
        "UPDATE t SET v = 's'",
        "DELETE FROM t WHERE id = 1",
        "REPLACE t VALUES (1, 's')",
    ],
)
def test_rows_changed_by_a_statement_stop_the_reader(reading: Reading, statement: str) -> None:
    begin = reading.begin()
    reading.run(TABLE, "INSERT INTO t VALUES (1, 'a')", "SET SESSION binlog_format = STATEMENT", statement)
    with pytest.raises(
        SourceError, match=f"changes rows by a statement .*{statement[:6]}.*binlog_format=ROW"
    ) as stopped:
        reading.parts()
    reading.run("INSERT INTO t VALUES (9, 'z')")
    assert told_without(reading, begin, stopped.value) == [(1, "a"), (9, "z")]


PARTITIONED = "CREATE TABLE t (id INT PRIMARY KEY) PARTITION BY RANGE (id) (PARTITION p VALUES LESS THAN (10))"


def converted(made: list[str], how: str) -> Any:
    return pytest.param(made, f"ALTER TABLE t CONVERT {how}", marks=pytest.mark.needs(Ability.CONVERTED_PARTITIONS))


@pytest.mark.parametrize(
    ("made", "statement"),
    [
        ([PARTITIONED, "CREATE TABLE u (id INT PRIMARY KEY)"], "ALTER TABLE t EXCHANGE PARTITION p WITH TABLE u"),
        converted([f"{PARTITIONED[:-1]}, PARTITION q VALUES LESS THAN (20))"], "PARTITION q TO TABLE u"),
        converted([PARTITIONED, "CREATE TABLE u (id INT PRIMARY KEY)"], "TABLE u TO PARTITION q VALUES LESS THAN (20)"),
        (["CREATE TABLE t (id INT PRIMARY KEY)"], "ALTER TABLE t DISCARD TABLESPACE"),
    ],
)  # fmt: skip
def test_rows_that_a_statement_moves_stop_the_reader(reading: Reading, made: list[str], statement: str) -> None:
    reading.run(*made)
    begin = reading.begin()
    reading.run(statement, "CREATE TABLE v (id INT PRIMARY KEY)", "INSERT INTO v VALUES (9)")
    shown = re.escape(f"by a statement ({statement!r}), without row events: start")
    with pytest.raises(SourceError, match=shown) as stopped:
        reading.parts()
    assert told_without(reading, begin, stopped.value) == [(9,)]
    with closing(reading.another(captures=lambda table: table.name == "v")) as source:
        source.open(begin)
        assert [change.after for part in reading.parts(source) for change in part.changes] == [(9,)]


def told_without(reading: Reading, begin: Position, error: SourceError) -> list[Any]:
    """The rows after a position, if the transaction is passed over that stopped the reader, as its error says."""
    (gtid,) = re.findall(r"start once with --skip (\S+) and --snapshot", str(error))
    with closing(reading.another(skipped=frozenset({gtid}))) as source:
        source.open(begin)
        return [change.after for part in reading.parts(source) for change in part.changes if change.op == "c"]


def test_load_data_as_a_statement_stops_the_reader(reading: Reading, tmp_path: Any) -> None:
    rows = tmp_path / "rows"
    rows.write_text("5\tfive\n", "utf-8")
    reading.run(TABLE, f"LOAD DATA INFILE '{rows}' INTO TABLE t")
    assert reading.told() == [("c", (5, "five"))]
    begin = reading.begin()
    reading.run("DELETE FROM t", "SET SESSION binlog_format = STATEMENT", f"LOAD DATA INFILE '{rows}' INTO TABLE t")
    with pytest.raises(SourceError, match=r"by a statement \('LOAD DATA'\)") as stopped:
        reading.parts()
    reading.run("INSERT INTO t VALUES (9, 'z')")
    assert told_without(reading, begin, stopped.value) == [(9, "z")]


GH_OST = (  # its documents: "Cheat sheet", "Cut-over"
    "CREATE /* gh-ost */ TABLE `{d}`.`_t_ghc` (id BIGINT AUTO_INCREMENT PRIMARY KEY, last_update TIMESTAMP NOT NULL "
    "DEFAULT NOW(), hint VARCHAR(64) NOT NULL, value VARCHAR(4096) NOT NULL, UNIQUE KEY (hint))",
    "CREATE /* gh-ost */ TABLE `{d}`.`_t_gho` LIKE `{d}`.`t`", "ALTER /* gh-ost */ TABLE `{d}`.`_t_gho` ADD w INT",
    "INSERT /* gh-ost */ INTO `{d}`.`_t_ghc` (hint, value) VALUES ('heartbeat', '1') ON DUPLICATE KEY UPDATE value = 2",
    "INSERT /* gh-ost `{d}`.`t` */ IGNORE INTO `{d}`.`_t_gho` (id, v) (SELECT id, v FROM `{d}`.`t` LOCK IN SHARE MODE)",
    "UPDATE t SET v = 'during' WHERE id = 1", "REPLACE /* gh-ost */ INTO `{d}`.`_t_gho` (id, v) VALUES (1, 'during')",
    "CREATE /* gh-ost */ TABLE `{d}`.`_t_del` (id INT AUTO_INCREMENT PRIMARY KEY) COMMENT='ghost-cut-over-sentry'",
    "DROP /* gh-ost */ TABLE IF EXISTS `{d}`.`_t_del`",
    "RENAME /* gh-ost */ TABLE `{d}`.`t` TO `{d}`.`_t_del`, `{d}`.`_t_gho` TO `{d}`.`t`",
    "DROP /* gh-ost */ TABLE IF EXISTS `{d}`.`_t_ghc`", "DROP /* gh-ost */ TABLE IF EXISTS `{d}`.`_t_del`",
)  # fmt: skip
PT_OSC = (  # what pt-online-schema-change 3.2.1 left in the binlog of a MariaDB 10.11
    "CREATE TABLE `{d}`.`_t_new` (`id` int(11) NOT NULL, `v` varchar(20) DEFAULT NULL, PRIMARY KEY (`id`)) "
    "ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_general_ci",
    "ALTER TABLE `{d}`.`_t_new` ADD COLUMN w INT",
    "CREATE TRIGGER `pt_osc_{d}_t_del` AFTER DELETE ON `{d}`.`t` FOR EACH ROW "
    "DELETE IGNORE FROM `{d}`.`_t_new` WHERE `{d}`.`_t_new`.`id` <=> OLD.`id`",
    "CREATE TRIGGER `pt_osc_{d}_t_upd` AFTER UPDATE ON `{d}`.`t` FOR EACH ROW BEGIN DELETE IGNORE FROM `{d}`.`_t_new` "
    "WHERE !(OLD.`id` <=> NEW.`id`) AND `{d}`.`_t_new`.`id` <=> OLD.`id`;REPLACE INTO `{d}`.`_t_new` (`id`, `v`) "
    "VALUES (NEW.`id`, NEW.`v`);END",
    "CREATE TRIGGER `pt_osc_{d}_t_ins` AFTER INSERT ON `{d}`.`t` FOR EACH ROW "
    "REPLACE INTO `{d}`.`_t_new` (`id`, `v`) VALUES (NEW.`id`, NEW.`v`)",
    "UPDATE t SET v = 'during' WHERE id = 1",
    "INSERT LOW_PRIORITY IGNORE INTO `{d}`.`_t_new` (`id`, `v`) SELECT `id`, `v` FROM `{d}`.`t` LOCK IN SHARE MODE "
    "/*pt-online-schema-change 4711 copy table*/",
    "ANALYZE TABLE `{d}`.`_t_new` /* pt-online-schema-change */",
    "RENAME TABLE `{d}`.`t` TO `{d}`.`_t_old`, `{d}`.`_t_new` TO `{d}`.`t`",
    "DROP TABLE IF EXISTS `_t_old`",
    *(f"DROP TRIGGER IF EXISTS `{{d}}`.`pt_osc_{{d}}_t_{kind}`" for kind in ("del", "upd", "ins")),
)


@pytest.mark.parametrize("statements", [GH_OST, PT_OSC], ids=["gh-ost", "pt-online-schema-change"])
def test_an_online_alter_is_one_swap_of_tables(reading: Reading, statements: Sequence[str]) -> None:
    reading.run(
        TABLE, "INSERT INTO t VALUES (1, 'a')", *(statement.format(d=reading.database) for statement in statements),
        "INSERT INTO t VALUES (2, 'b', 2)",
    )  # fmt: skip
    parts = reading.parts()
    told = [(part.ddl.kind, part.ddl.tables, part.ddl.foreign) for part in parts if part.ddl is not None]
    table = (TableName(reading.database, "t"),)
    assert told == [(DdlKind.CREATE, table, frozenset()), (DdlKind.SWAP, table, frozenset())]
    assert [change.after for part in parts for change in part.changes] == [(1, "a"), (1, "during"), (2, "b", 2)]


def test_an_online_alter_in_two_renames_tells_both(reading: Reading) -> None:
    reading.run(TABLE, "CREATE TABLE _t_gho LIKE t", "RENAME TABLE t TO _t_del", "RENAME TABLE _t_gho TO t")
    renames = [part.ddl for part in reading.parts() if part.ddl is not None and part.ddl.kind is DdlKind.RENAME]
    table, *shadows = (TableName(reading.database, name) for name in ("t", "_t_del", "_t_gho"))
    assert [(ddl.captured, ddl.foreign) for ddl in renames] == [((table,), frozenset({shadow})) for shadow in shadows]


def test_generated_columns_are_known_after_their_table_was_renamed(reading: Reading) -> None:
    """Found: MariaDB 11.8 leaves them out, and the reader asked for the table by its name of now."""
    reading.run(
        "CREATE TABLE t (id INT PRIMARY KEY, twice INT AS (id * 2) VIRTUAL)", "INSERT INTO t (id) VALUES (1)",
        "UPDATE t SET id = 2", "ALTER TABLE t CHANGE twice again INT AS (id * 2) VIRTUAL", "DELETE FROM t",
        "RENAME TABLE t TO u", "INSERT INTO u (id) VALUES (3)", "UPDATE u SET id = 4",
    )  # fmt: skip
    told = [
        (change.op, change.before and change.before[0], change.after and change.after[0])
        for change in reading.changes()
    ]
    assert told == [("c", None, 1), ("u", 1, 2), ("d", 2, None), ("c", None, 3), ("u", 3, 4)]


def test_lost_connection_is_told_and_nothing_is_read_twice(reading: Reading) -> None:
    reading.run(TABLE, "INSERT INTO t VALUES (1, 'a')")
    last = reading.parts()[-1]
    dumps = "SELECT id FROM information_schema.processlist WHERE command LIKE 'Binlog Dump%'"
    for (number,) in reading.server.execute(dumps):
        reading.server.execute(f"KILL {number}")
    reading.run("INSERT INTO t VALUES (2, 'b')")
    with pytest.raises(SourceAwayError):
        reading.parts()
    reading.source.open(last.after)
    assert reading.told() == [("c", (2, "b"))]


@pytest.mark.parametrize(
    ("variable", "value"),
    [("binlog_format", "MIXED"), ("binlog_row_image", "MINIMAL"), ("binlog_row_metadata", "MINIMAL")],
)
def test_server_that_does_not_show_each_change_is_refused(reading: Reading, variable: str, value: str) -> None:
    ((before,),) = reading.server.execute(f"SELECT @@GLOBAL.{variable}")
    reading.server.execute(f"SET GLOBAL {variable} = {value}")
    try:
        with pytest.raises(SourceError, match=f"{variable} is {value}.*SET GLOBAL {variable}={before}"):
            reading.begin()
    finally:
        reading.server.execute(f"SET GLOBAL {variable} = {before}")


@pytest.mark.needs(Ability.DOMAINS)
def test_replica_whose_binlog_has_its_own_changes_only_is_refused(reading: Reading) -> None:
    server = reading.server
    server.execute("CREATE USER blind")
    server.execute("GRANT REPLICATION SLAVE, BINLOG MONITOR, SELECT ON *.* TO blind")
    blind = reading.another(user="blind")
    blind.current_position()
    server.execute("CHANGE MASTER TO master_host = '127.0.0.1'")
    ((end,),) = server.execute("SELECT @@gtid_binlog_pos")
    server.execute(f"SET GLOBAL gtid_slave_pos = '{end},7-9-1'")
    try:
        for source in (reading.source, blind):
            with pytest.raises(SourceError, match=r"is a replica, and its binlog lacks .*log_slave_updates=ON"):
                source.current_position()
    finally:
        server.execute("RESET SLAVE ALL")
    reading.source.current_position()


@pytest.mark.needs(Ability.REPLICA_UPDATES)
def test_replica_of_mysql_that_keeps_nothing_is_refused(tmp_path: Path) -> None:
    options = ["--log-replica-updates=OFF"]
    with MariaDB(tmp_path, binary_log=True, options=options) as server, Reading(server) as reading:
        server.execute("CHANGE REPLICATION SOURCE TO source_host = '127.0.0.1'")
        with pytest.raises(SourceError, match=r"is a replica, and its binlog lacks .*log_replica_updates=ON"):
            reading.source.current_position()


def test_binlog_that_leaves_out_a_database_is_refused(tmp_path: Path) -> None:
    options = ["--binlog-ignore-db=attic"]
    with (
        MariaDB(tmp_path, binary_log=True, options=options) as server,
        pytest.raises(SourceError, match="binlog-ignore-db is attic: the binlog leaves out changes"),
        Reading(server),
    ):
        pass


def test_a_server_id_that_is_taken_is_refused(reading: Reading) -> None:
    with pytest.raises(SourceError, match="server id 1 is that of the server itself"):
        reading.another(server_id=1).current_position()
    with pytest.raises(SourceError, match=r"that of the replica txmq-binlog-test"):
        reading.another(name="other").current_position()
    with pytest.raises(SourceError, match="a server id is from 1"):
        reading.another(server_id=0)


@pytest.mark.needs(Ability.HIDDEN_CASCADES)
def test_foreign_keys_that_act_without_row_events_are_refused(reading: Reading) -> None:
    reading.run(TABLE, "CREATE TABLE child (id INT PRIMARY KEY, t INT REFERENCES t (id) ON DELETE CASCADE)")
    with pytest.raises(SourceError, match=r"foreign keys with CASCADE.*child"):
        reading.parts()
    with pytest.raises(SourceError, match=r"foreign keys with CASCADE.*child"):
        reading.begin()
    with closing(reading.another(cascades="pass")) as passing:
        passing.open(passing.current_position())


@pytest.mark.needs(Ability.CASCADES_IN_BINLOG)
def test_foreign_keys_that_act_with_row_events_are_read(reading: Reading) -> None:
    reading.run(
        TABLE, "CREATE TABLE child (id INT PRIMARY KEY, t INT REFERENCES t (id) ON DELETE CASCADE)",
        "INSERT INTO t VALUES (1, 'a')", "INSERT INTO child VALUES (7, 1)", "DELETE FROM t",
    )  # fmt: skip
    assert sorted(reading.told()[2:]) == [("d", (1, "a")), ("d", (7, 1))]


def test_position_before_what_was_purged_is_refused(reading: Reading) -> None:
    old = reading.begin()
    reading.run(TABLE)
    reading.server.execute("FLUSH BINARY LOGS")
    reading.source.close()
    file = reading.source.current_position().file

    def is_purged() -> bool:
        """The server keeps a file until it has noticed that its reader is gone."""
        reading.server.execute(f"PURGE BINARY LOGS TO '{file}'")
        return reading.source.oldest_position().gtid_set.covers(old.gtid_set)

    eventually(is_purged, "the file is purged")
    reading.source.open(reading.source.oldest_position())
    with pytest.raises(SourceError, match="begin anew with a snapshot"):
        _open_and_read(reading, old)


def test_position_that_the_server_never_had_is_refused(reading: Reading) -> None:
    begun = reading.begin()
    later = re.sub(r"\d+\Z", "99999999", begun.gtids)
    with pytest.raises(SourceError, match="does not send its binlog"):
        _open_and_read(reading, Position(begun.flavor, later))


def _open_and_read(reading: Reading, position: Position) -> None:
    reading.source.open(position)
    reading.source.read(10.0)


@pytest.mark.needs(Ability.DOMAINS)
def test_a_binlog_that_was_reset_is_refused(reading: Reading) -> None:
    reading.run(TABLE)
    reading.server.execute("FLUSH BINARY LOGS")
    position = reading.begin()
    reading.source.close()
    reading.server.execute("RESET MASTER")
    while not reading.source.current_position().gtid_set.covers(position.gtid_set):
        reading.server.execute("FLUSH BINARY LOGS")
        reading.run("INSERT INTO t VALUES (1, 'a')", "DELETE FROM t")
    with pytest.raises(SourceError, match="was reset"):
        reading.source.open(position)
    reading.source.open(reading.source.current_position())
    newest = reading.source.current_position()
    later = replace(newest, file=newest.file.replace("0", "9"))
    with pytest.raises(SourceError, match="was reset"):
        reading.source.open(later)


@pytest.mark.needs(Ability.DOMAINS)
def test_another_server_must_prove_its_history(reading: Reading) -> None:
    reading.run(TABLE)
    position = replace(reading.begin(), server="mariadb elsewhere")
    with pytest.raises(SourceError, match="this is another server"):
        reading.source.open(position)
    with closing(reading.another(accept_server=True)) as accepting:
        accepting.open(position)
    reading.run("SET SESSION server_id = 5, gtid_domain_id = 7", "INSERT INTO t VALUES (1, 'a')")  # as a replica writes
    reading.source.open(replace(position, gtids="7-5-1"))
    with pytest.raises(SourceError, match="position is one of mysql"):
        reading.source.open(Position("mysql", ""))


def test_a_password_that_is_wrong_is_final(reading: Reading) -> None:
    with pytest.raises(SourceError, match="Access denied"):
        reading.another(user="nobody", password="wrong").current_position()


def test_a_server_that_is_gone_may_come_back(reading: Reading) -> None:
    with pytest.raises(SourceAwayError):
        reading.another(port=1).current_position()
