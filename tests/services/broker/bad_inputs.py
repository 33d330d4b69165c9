"""The table of bad inputs: number, what is sent on a fresh connection, what must come back.

A case is bytes and the codes of the answers in order; ``CLOSED`` at the end where the broker closes. Everything stands
for a topic ``t`` with two partitions. What cannot be said in one connection is a test of its own (``OWN_TESTS``); what
does not exist in this protocol, or is held by another test, stands in ``ELSEWHERE`` with the reason.
"""

from __future__ import annotations

from typing import NamedTuple

from txmq.log import records
from txmq.log.batch import HEADER, checksum

CLOSED = -1
TIME_MS = 1_700_000_000_000
FOREIGN_TXID = b"00000000000000aa-00000000000000bb-1-1"


def batch(values: int = 1, **fields: int) -> bytearray:
    """A sound batch, or one whose named header fields are replaced under a right CRC (``crc`` itself included)."""
    made = records.encode([(None, b"v%d" % number, (), TIME_MS) for number in range(values)])
    if not fields:
        return made
    names = (
        "base_offset", "length", "epoch", "magic", "crc", "attributes", "last_offset_delta", "first_ms", "max_ms",
        "producer", "producer_epoch", "sequence", "count",
    )  # fmt: skip
    header = dict(zip(names, HEADER.unpack_from(made), strict=True))
    HEADER.pack_into(made, 0, *(header | {name: value for name, value in fields.items() if name != "crc"}).values())
    if "crc" not in fields:
        header["crc"] = checksum(made[21:])
    HEADER.pack_into(made, 0, *(header | fields | {"crc": fields.get("crc", header["crc"])}).values())
    return made


def put(content: bytes | bytearray, length: int | None = None, opaque: bytes = b"p") -> bytes:
    """A put of these bytes, with their length or another."""
    return b"put t 0 %d %b\r\n%b" % (len(content) if length is None else length, opaque, bytes(content))


class Case(NamedTuple):
    """One bad input."""

    number: int
    name: str
    sent: bytes
    codes: tuple[int, ...]
    finishes: bool = False  # sends no more: what is unfinished is given up


CASES = (
    Case(1, "nothing at all", b"", (CLOSED,), finishes=True),
    Case(3, "a body of length 0", b"put t 0 0 p\r\n", (400,)),
    Case(4, "a length of 2^32-1", b"put t 0 4294967295 p\r\n", (413, CLOSED)),
    Case(5, "a length one over the limit", b"put t 0 16777217 p\r\n", (413, CLOSED)),
    Case(
        5, "16 MiB of JSON", b"group save g member=m 16777216 1\r\n" + b"[[]," * (4 << 20) + b"ping 2\r\n", (413, 200)
    ),
    Case(7, "a negative length", b"put t 0 -1 p\r\n", (400, CLOSED)),
    Case(8, "a length beyond what comes", put(batch(), 5000), (CLOSED,), finishes=True),
    Case(9, "a body beyond its length", put(batch(crc=1)) + b"\x00\xff\xfe\r\n" * 3, (400, 400, CLOSED)),
    Case(10, "a TLS ClientHello", bytes.fromhex("1603010200010001fc0303") + bytes(64), (400, CLOSED)),
    Case(11, "an HTTP request", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", (400, CLOSED)),
    Case(13, "an SSH banner", b"SSH-2.0-OpenSSH_9.2\r\n", (400, CLOSED)),
    Case(14, "an unknown verb", b"frobnicate t 0 1\r\nping 2\r\n", (400, 200)),
    Case(15, "an unknown protocol version", b"hello 99 me 1\r\n", (400,)),
    Case(16, "a valid line with an empty body", b"commit %b 0 1\r\n" % FOREIGN_TXID, (409,)),
    Case(17, "words behind the last", b"ping 1 2 3\r\n", (400, CLOSED)),
    Case(25, "a setting twice", b"topic create u partitions=1 partitions=2 1\r\n", (400, CLOSED)),
    Case(26, "invalid UTF-8 in a name", b"topic create \xff\xfe\xed\xa0\x80 1\r\n", (400, CLOSED)),
    Case(27, "NUL in a name", b"topic create a\x00b 1\r\n", (400, CLOSED)),
    Case(29, "the last timestamp of all", put(batch(max_ms=(1 << 63) - 1)), (400,)),
    Case(30, "a wrong CRC", put(batch(crc=1)), (400,)),
    Case(32, "a base offset of one's own", put(batch(base_offset=7)), (400,)),
    Case(34, "a batch of no records", put(batch(count=0, last_offset_delta=-1)), (400,)),
    Case(35, "a token used twice", b"hello 1 me session=new x\r\n" * 2, (400, 200, CLOSED)),
    Case(36, "an answer from a client", b"result 200 1 A\r\nx", (400, CLOSED)),
    Case(39, "two requests in one segment", b"ping 1\r\nping 2\r\n", (200, 200)),
    Case(40, "half a close behind a request", b"ping 1\r\n", (200, CLOSED), finishes=True),
    Case(47, "an unknown codec", put(batch(attributes=5)), (400,)),
    Case(50, "a path as a topic", b"topic create ../../etc/passwd 1\r\n", (400,)),
    Case(51, "two dots", b"topic create .. 1\r\n", (400,)),
    Case(52, "a dot", b"topic create . 1\r\n", (400,)),
    Case(53, "an empty name", b"topic create  1\r\n", (400, CLOSED)),
    Case(54, "a name of 10,000 characters", b"topic create " + b"a" * 10_000 + b" 1\r\n", (400, CLOSED)),
    Case(55, "a slash", b"topic create a/b 1\r\n", (400,)),
    Case(56, "a backslash", b"topic create a\\b 1\r\n", (400,)),
    Case(57, "a percent-encoded slash", b"topic create a%2Fb 1\r\n", (400,)),
    Case(59, "a trailing blank", b"topic create a  1\r\n", (400, CLOSED)),
    Case(60, "NUL in the middle", b"topic describe a\x00b 1\r\n", (400, CLOSED)),
    Case(61, "an escape sequence as a client's name", b"hello 1 \x1b[31mred 1\r\n", (400, CLOSED)),
    Case(61, "an escape sequence in a topic's name", b"topic create a\x1b[31mb 1\r\n", (400, CLOSED)),
    Case(61, "an escape sequence in a group's name", b"group describe a\x1b[31mb 0 1\r\n", (400, CLOSED)),
    Case(61, "a line break in a topic's name", b"topic create a\nb 1\r\n", (400, CLOSED)),
    Case(62, "a right-to-left override", "topic create a\u202eb 1\r\n".encode(), (400, CLOSED)),
    Case(63, "a composed letter", "topic create caf\u00e9 1\r\n".encode(), (400, CLOSED)),
    Case(65, "a reserved name", b"topic create __offsets 1\r\n", (400,)),
    Case(66, "partition -1", b"get t -1 0 100 1\r\n", (400, CLOSED)),
    Case(66, "partition 2^31-1", b"get t 2147483647 0 100 1\r\n", (404,)),
    Case(69, "a path as a group", b"group join ../offsets member=m topics=t 2 1\r\n[]", (400,)),
    Case(69, "every group as a group", b"group join * member=m topics=t 2 1\r\n[]", (400,)),
    Case(93, "a commit of a foreign transaction", b"commit %b 0 1\r\n" % FOREIGN_TXID, (409,)),
)
OWN_TESTS = {
    2: "slow", 6: "slow", 18: "truncated", 19: "flipped", 31: "records", 33: "records", 37: "pipelined", 38: "bytewise",
    41: "reset", 42: "bomb", 58: "names", 64: "names", 86: "sequences",
    87: "sequences", 88: "sequences", 90: "sequences", 92: "sequences", 94: "two_connections", 95: "delayed",
    96: "prepared", 97: "prepared", 98: "open_transactions", 99: "huge_transaction",
}  # fmt: skip
ELSEWHERE = {
    12: "tests/unit/broker/shell/test_tls_transport.py: plaintext at a door for TLS, whatever its first byte",
    24: "nothing on the wire nests",
    28: "no field on the wire is a floating-point number",
    43: "a batch has one codec and records have none, so compression cannot nest (tests/unit/log/test_records.py)",
    44: "the broker never inflates; readers refuse it (tests/unit/log)",
    45: "the broker never inflates; readers refuse it (tests/unit/log)",
    46: "the broker never inflates; readers refuse it (tests/unit/log)",
    67: "tests/services/broker/test_bad_surroundings.py",
    68: "tests/services/broker/test_bad_surroundings.py",
    89: "the wrap at 2^31 needs 2^31 messages here: tests/unit/broker/state/test_producer_sequences.py",
    131: "tests/services/broker/test_bad_surroundings.py",
}
ASKED = {*range(1, 20), *range(24, 48), *range(50, 70), 86, 87, 88, 89, *range(93, 100), 131}
