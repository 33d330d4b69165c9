"""Golden bytes: what is written today is read tomorrow, and by every Kafka tool; compiled or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from txmq.log import batch, records

from .support import PURE

VECTORS = Path(__file__).parents[2] / "vectors"
RECORDS: dict[str, Any] = json.loads((VECTORS / "batch_records.json").read_text("utf-8"))
COMPRESSED: dict[str, Any] = json.loads((VECTORS / "batch_compressed.json").read_text("utf-8"))
# One record, key "k", null value, header "h" without a value, put together by hand after the Kafka protocol guide.
BY_HAND = bytes.fromhex(
    "0000000000000000" "0000003c" "ffffffff" "02" "00000000" "0000" "00000000" "0000018bcfe56800" "0000018bcfe56800"
    "ffffffffffffffff" "ffff" "ffffffff" "00000001"
    "14" "00" "00" "00" "02" "6b" "01" "02" "02" "68" "01"
)  # fmt: skip


def unhex(text: str | None) -> bytes | None:
    return None if text is None else bytes.fromhex(text)


@pytest.fixture(params=["compiled", "pure"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name: str = request.param
    if name == "pure":
        monkeypatch.setattr(records, "_Builder", PURE.DefaultRecordBatchBuilder)
        monkeypatch.setattr(records, "_Batch", PURE.DefaultRecordBatch)
    else:
        assert records._Builder is not PURE.DefaultRecordBatchBuilder, "the compiled codec is not installed"
    return name


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("vector", RECORDS["vectors"], ids=lambda vector: vector["name"])
def test_records_become_these_bytes(vector: dict[str, Any]) -> None:
    given = [
        (unhex(key), unhex(value), [(name, bytes.fromhex(content)) for name, content in headers], timestamp_ms)
        for key, value, headers, timestamp_ms in vector["records"]
    ]
    options = {
        name: vector[name] for name in vector.keys() & {"txid", "producer_id", "producer_epoch", "base_sequence"}
    }
    made = records.encode(given, **options)
    assert made.hex() == vector["batch"]
    crc = batch.check(made)[5]
    batch.stamp(made, RECORDS["topic_id"], RECORDS["partition"], RECORDS["base_offset"], crc)
    assert made.hex() == vector["placed"]


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("vector", RECORDS["vectors"], ids=lambda vector: vector["name"])
def test_these_bytes_become_records(vector: dict[str, Any]) -> None:
    found = records.decode(
        bytes.fromhex(vector["placed"]), "t", RECORDS["partition"], topic_id=RECORDS["topic_id"],
        expected_offset=RECORDS["base_offset"],
    )  # fmt: skip
    assert len(found) == len(vector["records"])
    for number, (message, (key, value, headers, timestamp_ms)) in enumerate(zip(found, vector["records"], strict=True)):
        assert (message.topic, message.partition, message.offset) == ("t", 3, 1000 + number)
        assert (message.key, message.value, message.timestamp_ms) == (unhex(key), unhex(value), timestamp_ms)
        given = {name: bytes.fromhex(content) for name, content in headers}
        tag = given.pop("tag", None)
        assert (message.headers, message.tag) == (given, None if tag is None else tag.decode())
        assert message.txid == vector.get("txid")


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("vector", COMPRESSED["vectors"], ids=lambda vector: vector["name"])
def test_streams_of_other_writers_are_read(vector: dict[str, Any]) -> None:
    stored = bytearray.fromhex(vector["batch"])
    assert batch.check(stored)[0] == 3
    found = records.decode(stored, "t", 0)
    assert [(m.key, m.value, m.timestamp_ms) for m in found] == [
        (unhex(k), unhex(v), t) for k, v, t in COMPRESSED["records"]
    ]


@pytest.mark.usefixtures("implementation")
def test_a_batch_put_together_by_hand_is_read() -> None:
    stored = bytearray(BY_HAND)
    stored[17:21] = crc32c_bit_by_bit(bytes(stored[21:])).to_bytes(4, "big")
    assert batch.check(stored)[:2] == (1, 0x18BCFE56800)
    (message,) = records.decode(stored, "t", 0)
    assert (message.key, message.value, message.headers, message.offset) == (b"k", None, {"h": b""}, 0)


def crc32c_bit_by_bit(content: bytes) -> int:
    value = 0xFFFFFFFF
    for byte in content:
        value ^= byte
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF
