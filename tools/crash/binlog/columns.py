"""Every type of column that a binlog sync carries, with values at its edges, and SQL that shows each value exactly."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from txmq.testing.processes.database_programs import Ability

NUMBER, EXACT, TEXT, MOMENT, STAMP, BYTES = "{0} + 0", "CAST({0} AS DOUBLE)", "CAST({0} AS CHAR)", "m", "s", "HEX({0})"
INTEGERS = ("0", "1", "-1")
DATETIMES = (
    "'2026-11-23 09:08:07.123456'", "'0000-00-00 00:00:00'", "'2026-02-31 23:59:59.999999'", "'2026-00-10 00:00:00'",
    "'0001-01-01 00:00:00'", "'9999-12-31 23:59:59.999999'",
)  # fmt: skip
TIMES = ("'10:11:12.123456'", "'-00:00:00.5'", "'-838:59:59.999999'", "'838:59:59.999999'", "'-01:02:03.25'", "0")
STAMPS = (
    "'2026-11-23 09:08:07.123456'", "'0000-00-00 00:00:00'", "'1970-01-01 00:00:01'", "'2038-01-19 03:14:07.999999'",
)  # fmt: skip
STRINGS = ("'a'", "''", "'  two '", "'grün'", "repeat('x', 200)")
# New ones stand at the end: campaigns deal the columns out to their tables by number.
COLUMNS: list[tuple[str, str, tuple[str, ...]]] = [
    ("tinyint", NUMBER, (*INTEGERS, "-128", "127")),
    ("tinyint unsigned", NUMBER, ("0", "255")),
    ("boolean", NUMBER, ("true", "false")),
    ("smallint", NUMBER, (*INTEGERS, "-32768", "32767")),
    ("smallint unsigned", NUMBER, ("65535",)),
    ("mediumint", NUMBER, (*INTEGERS, "-8388608", "8388607")),
    ("mediumint unsigned", NUMBER, ("16777215",)),
    ("int", NUMBER, (*INTEGERS, "-2147483648", "2147483647")),
    ("int unsigned zerofill", NUMBER, ("7", "4294967295")),
    ("bigint", NUMBER, (*INTEGERS, "-9223372036854775808", "9223372036854775807")),
    ("bigint unsigned", NUMBER, ("0", "18446744073709551615", "9223372036854775808")),
    ("bit(1)", NUMBER, ("b'1'", "b'0'")),
    ("bit(11)", NUMBER, ("b'11100000001'", "1")),
    ("bit(64)", NUMBER, ("18446744073709551615", "0")),
    ("year", NUMBER, ("1901", "2155", "0")),
    ("float", EXACT, ("0.1", "-3.4e38", "1e-40", "0")),
    ("float unsigned", EXACT, ("0.1",)),
    ("double", EXACT, ("0.1", "-1.7976931348623157e308", "5e-324", "-0.0")),
    ("double(12,3)", EXACT, ("-123456789.125",)),
    ("decimal(65,30)", TEXT, ("12345678901234567890123456789012345.123456789012345678901234567891", "-0.1", "0")),
    ("decimal(5,5)", TEXT, ("0.00001", "-0.99999", "0")),
    ("decimal(10,0)", TEXT, ("1234567890", "-1234567890", "-1", "0")),
    ("decimal(10,2) unsigned", TEXT, ("99999999.99", "0.01")),
    ("decimal(19,9)", TEXT, ("1234567890.123456789", "-1234567890.000000001", "-9.9")),
    ("decimal(18,3)", TEXT, ("-123456789012345.678", "100000000000000.001")),
    ("char(250)", TEXT, STRINGS),
    ("char(3) character set latin1", TEXT, ("'ü€'", "''")),
    ("varchar(250)", TEXT, STRINGS),
    ("varchar(250) character set latin1", TEXT, STRINGS),
    ("varchar(2500) character set utf16", TEXT, (*STRINGS, "'\U0001f600'")),
    ("varchar(9) character set utf16le", TEXT, ("'añ\U0001f600'",)),
    ("varchar(9) character set utf32", TEXT, ("'añ\U0001f600'",)),
    ("varchar(9) character set ucs2", TEXT, ("'añ€'",)),
    ("varchar(9) character set utf8mb3", TEXT, ("'añ€'",)),
    ("varchar(9) character set cp1251", TEXT, ("'Привет'",)),
    ("varchar(9) character set koi8r", TEXT, ("'Привет'",)),
    ("varchar(9) character set latin2", TEXT, ("'ąęś'",)),
    ("varchar(9) character set greek", TEXT, ("'αβγ'",)),
    ("varchar(9) character set gbk", TEXT, ("'汉字'",)),
    ("varchar(9) character set big5", TEXT, ("'漢字'", "_big5 x'a145c94a'", "_big5 x'f9d6a1c361f9db'")),
    ("varchar(9) character set sjis", TEXT, ("'日本'", "_sjis x'815f5c7eb1'")),
    ("varchar(9) character set ujis", TEXT, ("'日本'", "_ujis x'8eb18fb0a1a1c0f5a1'")),
    ("varchar(9) character set euckr", TEXT, ("'한국'",)),
    ("varchar(9) character set utf16 collate uca1400_ai_ci", TEXT, ("'añ\U0001f600'",)),
    ("varchar(9) collate utf8mb4_bin", TEXT, ("'añ\U0001f600'",)),
    ("varchar(100) compressed", TEXT, ("'short'", "repeat('z', 100)", "''")),
    ("varbinary(300) compressed", BYTES, ("repeat(x'00ff', 150)", "''")),
    ("text compressed", TEXT, ("'short'", "repeat('zü', 3000)", "''")),
    ("blob compressed", BYTES, ("repeat(x'00', 3000)",)),
    ("tinytext", TEXT, ("'añ\U0001f600'", "''")),
    ("text character set latin1", TEXT, ("'ü€'", "''")),
    ("mediumtext", TEXT, ("repeat('ab', 5000)",)),
    ("longtext", TEXT, ("repeat('ab', 40000)",)),
    ("json", TEXT, ("""'{"b": [1, 2.50, null], "a": "ü"}'""", "'[]'", "'18446744073709551615'")),
    ("binary(5)", BYTES, ("'a'", "''", "x'0000000000'", "x'6100006200'")),
    ("binary(255)", BYTES, ("x'ff00'",)),
    ("varbinary(5)", BYTES, ("'a'", "''", "x'610000'")),
    ("varbinary(500)", BYTES, ("repeat(x'00', 400)",)),
    ("tinyblob", BYTES, ("x'00ff00'", "''")),
    ("blob", BYTES, ("x'00ff00'",)),
    ("longblob", BYTES, ("repeat(x'ff', 70000)",)),
    ("geometry", BYTES, ("ST_GeomFromText('POINT(1 2)', 4326)",)),
    ("point", BYTES, ("POINT(1, 2)",)),
    ("uuid", TEXT, ("'123e4567-e89b-12d3-a456-426655440000'", "'f47ac10b-58cc-4372-a567-0e02b2c3d479'", "uuid()")),
    (
        "inet6",
        TEXT,
        (
            "'::1'",
            "'2001:db8::ff00:42:8329'",
            "'::ffff:192.0.2.1'",
            "'::'",
            "'fe80::1:0:0:0'",
            "'::192.0.2.1'",
            "'::1:2'",
            "'::1:0'",
            "'1:0:2:3:4:5:6:7'",
            "'0:1:2:0:4:5:6:7'",
            "'1:2:3:4:5:6:7:0'",
        ),
    ),
    ("inet4", TEXT, ("'192.0.2.0'", "'0.0.0.0'")),
    ("enum('a','ü','c''d')", TEXT, ("'ü'", "''", "3")),
    ("enum('a','ü') character set latin1", TEXT, ("'ü'",)),
    ("set('x','y','ü')", TEXT, ("'x,ü'", "''", "'y'")),
    ("set('ü','z') character set latin1", TEXT, ("'z,ü'",)),
    ("date", TEXT, ("'2026-11-23'", "'0000-00-00'", "'2026-02-31'", "'2026-11-00'", "'9999-12-31'", "'0001-01-01'")),
    ("time", TEXT, TIMES),
    *[(f"time({digits})", TEXT, TIMES) for digits in range(1, 7)],
    ("datetime", MOMENT, DATETIMES),
    *[(f"datetime({digits})", MOMENT, DATETIMES) for digits in range(1, 7)],
    ("timestamp null", STAMP, STAMPS),
    *[(f"timestamp({digits}) null", STAMP, STAMPS) for digits in range(1, 7)],
    # ZEROFILL is of what a SELECT shows, not of the value
    (
        "decimal(65,30) zerofill",
        "CAST(CAST({0} AS DECIMAL(65,30)) AS CHAR)",
        ("12345678901234567890123456789012345.5", "0"),
    ),
    ("decimal(5,0) zerofill", "CAST(CAST({0} AS DECIMAL(5)) AS CHAR)", ("7", "0", "99999")),
    ("varchar(9) character set gb2312", TEXT, ("'汉字'",)),
    ("varchar(9) character set cp932", TEXT, ("'日本'", "_cp932 x'875487908790fa58815f'")),
    ("varchar(9) character set eucjpms", TEXT, ("'日本'", "_eucjpms x'8eb1ada1a1c1f5a18ffcfe'")),
]
_OF_SOME: Final = {
    "uuid": Ability.NETWORK_TYPES, "inet": Ability.NETWORK_TYPES, "compressed": Ability.COMPRESSED_COLUMNS,
    "uca1400": Ability.UCA1400,
}  # fmt: skip
# Invalid dates are kept, not refused; times are UTC; a value that does not fit is cut.
SESSION = ("SET time_zone = '+00:00'", "SET sql_mode = 'ALLOW_INVALID_DATES'")


def can_declare(declared: str, abilities: Collection[Ability]) -> bool:
    """Whether a server has a type of column."""
    return all(ability in abilities for word, ability in _OF_SOME.items() if word in declared)
