"""The journal's bytes are the golden ones, both ways."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from crc32c import crc32c

from tools.simulated.disk import SimDisk
from txmq.redo.record_format import (
    FILE_HEADER_SIZE,
    RECORD_HEADER_SIZE,
    FileHeader,
    base_of_name,
    file_path,
    is_whole,
    pack_file_header,
    pack_record,
    payload_size_max,
    record_size,
    unpack_file_header,
    unpack_record_header,
)

from .support import content, open_journal

VECTORS = Path(__file__).parents[2] / "vectors" / "redo_journal.json"


@pytest.fixture
def vectors() -> dict[str, Any]:
    """The golden file."""
    loaded: dict[str, Any] = json.loads(VECTORS.read_text())
    return loaded


def test_the_file_header_is_the_golden_one(vectors: dict[str, Any]) -> None:
    header = FileHeader(**vectors["file_header"]["fields"])
    block = bytes.fromhex(vectors["file_header"]["head_hex"]).ljust(FILE_HEADER_SIZE - 4, b"\0")
    block += bytes.fromhex(vectors["file_header"]["crc_hex"])
    assert pack_file_header(header) == block
    assert unpack_file_header(block) == header


def test_the_records_are_the_golden_ones(vectors: dict[str, Any]) -> None:
    for vector in vectors["records"]:
        fields = vector["fields"]
        payload = bytes.fromhex(fields.pop("payload_hex"))
        record, crc = pack_record(payload=payload, **fields)
        assert record.hex() == vector["record_hex"]
        header = unpack_record_header(record)
        assert (header.crc, header.lsn, header.chain, header.length) == (
            crc,
            fields["lsn"],
            fields["chain"],
            len(payload),
        )
        assert header.is_known
        assert is_whole(header, record)
        assert len(record) == record_size(len(payload))


def test_journal_that_writes_golden_payloads_writes_golden_bytes(vectors: dict[str, Any]) -> None:
    disk = SimDisk()
    journal, _ = open_journal(disk)
    expected = b""
    for vector in vectors["records"]:
        payload = bytes.fromhex(vector["fields"]["payload_hex"])
        if vector["fields"]["kind"] == 2:
            journal.mark()
        else:
            journal.append(payload)
        expected += bytes.fromhex(vector["record_hex"])
    assert content(disk, file_path(0))[FILE_HEADER_SIZE : FILE_HEADER_SIZE + len(expected)] == expected


def test_the_record_layout_is_the_documented_one() -> None:
    record, crc = pack_record(1, 7, 0x01020304, 4096, 4000, b"abc")
    prefix = struct.pack("<IIIBBHIIQQI", 0x444552C7, 3, 0xFFFFFFFC, 1, 0, 0, 7, 0x01020304, 4096, 4000, 0)
    assert crc == crc32c(prefix + b"abc")
    assert record == prefix + struct.pack("<I", crc) + b"abc" + bytes(5)
    assert prefix[:4] == b"\xc7RED"


def test_every_flipped_bit_of_a_record_is_noticed() -> None:
    record, _ = pack_record(1, 7, 9, 4096, 4000, b"abcde")
    assert is_whole(unpack_record_header(record), record)
    for position in range(len(record)):
        for bit in range(8):
            flipped = bytearray(record)
            flipped[position] ^= 1 << bit
            header = unpack_record_header(flipped)
            if header.length == 5 and header.magic == 0x444552C7 and header.length_inverted == 0xFFFFFFFA:
                assert not is_whole(header, flipped)


def test_every_flipped_bit_of_a_file_header_is_noticed() -> None:
    block = pack_file_header(FileHeader(1, 2, 3, 8192, 5, 6))
    for position in range(len(block)):
        flipped = bytearray(block)
        flipped[position] ^= 1 << position % 8
        assert unpack_file_header(bytes(flipped)) is None
    assert unpack_file_header(block[:-1]) is None
    assert unpack_file_header(bytes(FILE_HEADER_SIZE)) is None


def test_names_and_bases_belong_together() -> None:
    assert file_path(0) == "journal/00000000000000000000.redo"
    for base in (0, 67108864, (1 << 64) - 1):
        assert base_of_name(file_path(base).removeprefix("journal/")) == base
    for name in (
        "spare-1",
        "ballast",
        "0.redo",
        "0000000000000000000a.redo",
        "²0000000000000000000.redo",
        "1" * 20,
        "1" * 25,
    ):
        assert base_of_name(name) is None


def test_sizes() -> None:
    assert [record_size(length) for length in (0, 1, 8, 9)] == [48, 56, 56, 64]
    assert record_size(payload_size_max(8192)) == 8192 - FILE_HEADER_SIZE
    assert RECORD_HEADER_SIZE % 8 == 0
