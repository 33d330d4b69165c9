"""Values drawn at random, of every type and in every character set: as the server's own SELECT shows them.

A snapshot reads half of the rows, the stream has the others and changes, and the applier makes a copy. The events, and
the copy, are held against a SELECT of the source. ``make drawn`` draws more rows, each of which has a value in every
column, or others (``TXMQ_DRAWN_ROWS``, ``TXMQ_DRAWN_SEED``).
"""

from __future__ import annotations

import json
import os
import random
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import txmq
from tests.services.binlog.replica import Replica
from tests.services.binlog.test_json import drawn_document
from tools.crash.binlog.columns import BYTES, EXACT, MOMENT, NUMBER, SESSION, STAMP, TEXT
from txmq.binlog.apply.target import json_as_text
from txmq.binlog.event_json import read_event
from txmq.binlog.source.charsets import _codes
from txmq.testing.processes import fork_server
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.database_programs import Ability
from txmq.testing.processes.fork_server import ForkServer
from txmq.testing.processes.mariadb import MariaDB

ROWS, SEED = int(os.environ.get("TXMQ_DRAWN_ROWS", "300")), int(os.environ.get("TXMQ_DRAWN_SEED", "33"))
ROWS_PER_INSERT = 40  # below transaction_rows_max of the replica: an insert is one transaction of it
WAIT_S = 300.0
Draw = Callable[[random.Random], str]
UNICODE = {"utf8mb4": "utf-8", "utf8mb3": "utf-8", "ucs2": "utf-16-be", "utf16": "utf-16-be", "utf16le": "utf-16-le",
           "utf32": "utf-32-be"}  # fmt: skip


class Drawn(NamedTuple):
    """A column: how it is declared, SQL that shows its value exactly, and what draws a value as SQL."""

    declared: str
    form: str
    draw: Draw


def whole(low: int, high: int) -> Draw:
    return lambda drawn: str(drawn.choice((low, high, 0, drawn.randint(low, high), drawn.randint(0, min(high, 9)))))


def decimal(precision: int, scale: int, *, signed: bool = True) -> Draw:
    def draw(drawn: random.Random) -> str:
        number = drawn.randrange(10 ** drawn.randrange(1, precision + 1))
        sign = drawn.choice(("", "-")) if signed else ""
        text = f"{number:0{scale + 1}d}"
        return f"{sign}{text[: len(text) - scale]}.{text[len(text) - scale :]}" if scale else f"{sign}{text}"

    return draw


def floating(code: str) -> Draw:
    def draw(drawn: random.Random) -> str:
        while True:
            (number,) = struct.unpack(f"<{code}", drawn.randbytes(struct.calcsize(code)))
            if abs(number) < {"f": 3.4e38, "d": 1.7e308}[code]:  # no NaN either
                return f"{number!r}e0" if "e" not in repr(number) else repr(number)

    return draw


def raw(size_max: int) -> Draw:
    return lambda drawn: f"X'{drawn.randbytes(drawn.randrange(size_max + 1)).hex()}'"


def clock(*, hours_max: int) -> Draw:
    def draw(drawn: random.Random) -> str:
        sign = drawn.choice(("", "-")) if hours_max > 24 else ""
        hours = drawn.randrange(hours_max)
        return f"'{sign}{hours:02d}:{drawn.randrange(60):02d}:{drawn.randrange(60):02d}.{drawn.randrange(10**6):06d}'"

    return draw


def day(drawn: random.Random) -> str:
    if drawn.random() < 0.05:
        return "0000-00-00"
    return f"{drawn.randrange(1, 10_000):04d}-{drawn.randrange(1, 13):02d}-{drawn.randrange(1, 32):02d}"


def moment(drawn: random.Random) -> str:
    found = day(drawn)
    time = "00:00:00" if found == "0000-00-00" else clock(hours_max=24)(drawn).strip("'")
    return f"'{found} {time}'"


def stamp(drawn: random.Random) -> str:
    found = datetime.fromtimestamp(drawn.randrange(1, (1 << 31) - 2), UTC) + timedelta(
        microseconds=drawn.randrange(10**6)
    )
    return f"'{found:%Y-%m-%d %H:%M:%S.%f}'"


def document(drawn: random.Random, depth: int = 0) -> Any:
    kind = drawn.randrange(8 if depth < 3 else 6)
    if kind == 6:
        return [document(drawn, depth + 1) for _ in range(drawn.randrange(4))]
    if kind == 7:
        return {f"k{drawn.randrange(9)} ü": document(drawn, depth + 1) for _ in range(drawn.randrange(4))}
    return (None, True, drawn.randrange(-(1 << 63), 1 << 64), drawn.random() * 1e9, 'a"\\\n😀', "")[kind]


def inet6(drawn: random.Random) -> str:
    return "'" + ":".join(f"{drawn.choice((0, 0, drawn.randrange(1 << 16))):x}" for _ in range(8)) + "'"


def text(introducer: str, characters: Sequence[bytes], length_max: int, drawn: random.Random) -> str:
    """Characters of a set as its bytes."""
    found = b"".join(drawn.choice(characters) for _ in range(drawn.randrange(length_max + 1)))
    return f"_{introducer} X'{found.hex()}'"


def unicode_characters(name: str, drawn: random.Random) -> list[bytes]:
    top = 0x10000 if name in ("utf8mb3", "ucs2") else 0x110000
    points = [drawn.randrange(1 << drawn.randrange(5, top.bit_length())) % top for _ in range(4000)]
    return [chr(point).encode(UNICODE[name]) for point in points if not 0xD800 <= point < 0xE000]


def texts(server: MariaDB, drawn: random.Random) -> Iterator[Drawn]:
    """A column in each character set of the server."""
    for name, bytes_max in server.execute(
        "SELECT character_set_name, maxlen FROM information_schema.character_sets "
        "WHERE character_set_name <> 'binary' ORDER BY 1"
    ):
        characters = (
            unicode_characters(name, drawn) if name in UNICODE else [*_codes(str(name), int(bytes_max), server.execute)]
        )
        yield Drawn(f"varchar(12) character set {name}", TEXT, partial(text, str(name), characters, 12))
    yield Drawn("char(9)", TEXT, partial(text, "utf8mb4", unicode_characters("utf8mb4", drawn), 9))
    yield Drawn("mediumtext", TEXT, partial(text, "utf8mb4", unicode_characters("utf8mb4", drawn), 400))
    yield Drawn("enum('a','ü','c''d') character set latin1", TEXT, lambda drawn: str(drawn.randrange(1, 4)))
    yield Drawn("set('x','y','ü','日') ", TEXT, lambda drawn: str(drawn.randrange(16)))


def columns(server: MariaDB, drawn: random.Random) -> list[Drawn]:
    """All that the server can have."""
    found = [
        *(
            one
            for name, bits in (("tinyint", 8), ("smallint", 16), ("mediumint", 24), ("int", 32), ("bigint", 64))
            for one in (
                Drawn(name, NUMBER, whole(-(1 << bits - 1), (1 << bits - 1) - 1)),
                Drawn(f"{name} unsigned", NUMBER, whole(0, (1 << bits) - 1)),
            )
        ),
        Drawn("int zerofill", NUMBER, whole(0, 1 << 31)),
        Drawn("bit(13)", NUMBER, whole(0, (1 << 13) - 1)), Drawn("bit(64)", NUMBER, whole(0, (1 << 64) - 1)),
        Drawn("year", NUMBER, lambda drawn: str(drawn.choice((0, drawn.randint(1901, 2155))))),
        Drawn("float", EXACT, floating("f")), Drawn("double", EXACT, floating("d")),
        *(Drawn(f"decimal({p},{s})", TEXT, decimal(p, s)) for p, s in ((65, 30), (65, 0), (5, 5), (19, 9), (18, 3))),
        Drawn("decimal(12,4) unsigned", TEXT, decimal(12, 4, signed=False)),
        Drawn("decimal(20,7) zerofill", "CAST(CAST({0} AS DECIMAL(20,7)) AS CHAR)", decimal(20, 7, signed=False)),
        Drawn("binary(7)", BYTES, raw(7)), Drawn("varbinary(300)", BYTES, raw(300)), Drawn("blob", BYTES, raw(900)),
        Drawn("date", TEXT, lambda drawn: f"'{day(drawn)}'"),
        *(Drawn(f"time({digits})", TEXT, clock(hours_max=838)) for digits in (0, 1, 3, 6)),
        *(Drawn(f"datetime({digits})", MOMENT, moment) for digits in (0, 2, 3, 6)),
        *(Drawn(f"timestamp({digits}) null", STAMP, stamp) for digits in (0, 1, 5)),
        Drawn("geometry", BYTES, lambda drawn: f"POINT({drawn.random()}, {drawn.randrange(-99, 99)})"),
        *texts(server, drawn),
    ]  # fmt: skip
    abilities = server.program.abilities
    if Ability.BINARY_JSON in abilities:
        found.append(Drawn("json", TEXT, lambda drawn: f"JSON_EXTRACT(JSON_ARRAY({drawn_document(drawn)}), '$[0]')"))
    else:
        found.append(
            Drawn("json", TEXT, lambda drawn: f"X'{json.dumps(document(drawn), ensure_ascii=False).encode().hex()}'")
        )
    if Ability.NETWORK_TYPES in abilities:
        found += [
            Drawn("uuid", TEXT, lambda drawn: f"'{drawn.randbytes(16).hex()}'"), Drawn("inet6", TEXT, inet6),
            Drawn("inet4", TEXT, lambda drawn: "'" + ".".join(str(byte) for byte in drawn.randbytes(4)) + "'"),
        ]  # fmt: skip
    if Ability.COMPRESSED_COLUMNS in abilities:
        found.append(Drawn("blob compressed", BYTES, raw(900)))
    return found


def inserts(kinds: Sequence[Drawn], ids: range, drawn: random.Random) -> Iterator[str]:
    for first in range(ids.start, ids.stop, ROWS_PER_INSERT):
        rows = []
        for id_ in range(first, min(first + ROWS_PER_INSERT, ids.stop)):
            values = ["NULL" if drawn.random() < 0.08 else kind.draw(drawn) for kind in kinds]
            rows.append(f"({id_}, {', '.join(values)})")
        yield f"INSERT INTO drawn VALUES {', '.join(rows)}"


def selected(server: MariaDB, database: str, kinds: Sequence[Drawn]) -> dict[int, tuple[Any, ...]]:
    """What a SELECT shows, by id."""
    shown = []
    for place, kind in enumerate(kinds):
        moved = f"REPLACE(CAST(c{place} AS CHAR), ' ', 'T')"
        forms = {MOMENT: moved, STAMP: f"CONCAT({moved}, 'Z')"}
        shown.append(forms.get(kind.form) or kind.form.format(f"c{place}"))
    with closing(server.connect(db=database)) as connection, closing(connection.cursor()) as cursor:
        for statement in SESSION:
            cursor.execute(statement)
        cursor.execute(f"SELECT id, {', '.join(shown)} FROM drawn")
        return {row[0]: row[1:] for row in cursor.fetchall()}


def told(client: txmq.Client, topic: str, count: int) -> tuple[dict[int, tuple[Any, ...]], set[str]]:
    """The rows that the events make, and which events there are."""
    rows: dict[int, tuple[Any, ...]] = {}
    ops = set()
    for message in client.browse(topic):
        event = read_event(message.value or b"")
        ops.add(event.op)
        if event.after is not None:
            values = [event.after[f"c{place}"] for place in range(count)]
            rows[event.after["id"]] = tuple(one.hex().upper() if isinstance(one, bytes) else one for one in values)
        elif event.before is not None:
            del rows[event.before["id"]]
    return rows, ops


@pytest.fixture(scope="module", autouse=True)
def children() -> Iterator[ForkServer]:
    """The reader of the snapshot is forked."""
    with ForkServer(("txmq.cli.main", "txmq.binlog.reader")) as made:
        yield made


def test_drawn_values_come_as_the_server_shows_them(
    server: MariaDB, shared_broker: BrokerProcess, tmp_path: Path
) -> None:
    for database in ("shop", "copy_shop"):
        server.make_database_anew(database)
    drawn, has_snapshot = random.Random(SEED), Ability.SNAPSHOTS in server.program.abilities
    kinds, half = columns(server, drawn), ROWS // 2
    declared = ", ".join(f"c{place} {kind.declared}" for place, kind in enumerate(kinds))
    with txmq.connect(shared_broker.address) as client:
        replica = Replica("drawn", server, shared_broker, client, tmp_path)
        replica.execute(
            f"CREATE TABLE drawn (id INT PRIMARY KEY, {declared}) ROW_FORMAT=DYNAMIC",
            "CREATE TABLE copy_shop.drawn LIKE shop.drawn",
        )
        if has_snapshot:
            replica.execute(*SESSION, *inserts(kinds, range(half), drawn))
            command = [sys.executable, "-m", "txmq.cli.main", "binlog", "run", "--config", str(replica.config)]
            reader = fork_server.start_logged([*command, "--snapshot", "only"], replica.log, dict(os.environ))
            assert reader.wait(WAIT_S) == 0, replica.log.read_text()
        changed = ", ".join(f"a.c{place} = b.c{place}" for place in range(len(kinds)))
        with replica.reader():
            replica.execute(
                *SESSION, *inserts(kinds, range(half if has_snapshot else 0, ROWS), drawn),
                *(
                    f"UPDATE drawn a JOIN drawn b ON b.id = a.id + 7 SET {changed} WHERE a.id = {id_}"
                    for id_ in range(0, ROWS, 10)
                ),
                "DELETE FROM drawn WHERE id % 50 = 3",
            )  # fmt: skip
        replica.apply()
        wanted = selected(server, "shop", kinds)
        events, ops = told(client, "drawn.shop.drawn", len(kinds))
    assert ops - {"begin", "end"} == ({"r"} if has_snapshot else set()) | {"c", "u", "d"}
    assert len(wanted) == ROWS - len(range(3, ROWS, 50))
    assert differing(events, wanted, kinds) == []
    # What MySQL stores of JSON is more than its text tells (a DECIMAL, a date), and a copy has what the text tells.
    plain = [kind._replace(form=json_as_text("{0}")) if kind.declared == "json" else kind for kind in kinds]
    copied = kinds if Ability.BINARY_JSON not in server.program.abilities else plain
    assert differing(selected(server, "copy_shop", copied), selected(server, "shop", copied), kinds) == []


def differing(
    found: dict[int, tuple[Any, ...]], wanted: dict[int, tuple[Any, ...]], kinds: Sequence[Drawn]
) -> list[object]:
    """The first values that are not as wanted, each with its row and column."""
    if found.keys() != wanted.keys():
        return ["other rows", *sorted(found.keys() ^ wanted.keys())[:20]]
    wrong = (
        (id_, kind.declared, value, wants)
        for id_, row in wanted.items()
        for kind, value, wants in zip(kinds, found[id_], row, strict=True)
        if (value, type(value)) != (wants, type(wants))
    )
    return [one for one, _ in zip(wrong, range(20), strict=False)]
