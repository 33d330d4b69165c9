"""Bad inputs against a real broker, each under the rule R0 of ``watch.py``.

What R0 is, and how it is looked at, stands in ``watch``. What is done to the broker's files, limits and process is in
``test_bad_surroundings``.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator

import cramjam
import pytest

import txmq
from txmq.log import records
from txmq.testing.processes.broker import BrokerProcess

from .bad_inputs import ASKED, CASES, CLOSED, ELSEWHERE, OWN_TESTS, TIME_MS, Case, batch, put
from .watch import FLOOD_DELAY_S_MAX, Watch, flood
from .wire import Wire


@pytest.fixture(scope="module")
def watch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watch]:
    """One broker for the whole table."""
    settings = {"handshake_timeout_ms": 1500, "transactions_open_max": 50, "transaction_size_bytes_max": 1 << 20}
    with BrokerProcess(tmp_path_factory.mktemp("bad") / "broker", settings=settings) as broker:
        yield Watch(broker)


def test_every_number_of_list_has_case_or_reference() -> None:
    assert {case.number for case in CASES} | set(OWN_TESTS) | set(ELSEWHERE) >= ASKED
    named = set(OWN_TESTS.values())
    tests = {name.removeprefix("test_own_") for name in globals() if name.startswith("test_own_")}
    assert named == tests


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.number}: {case.name}")
def test_bad_input_gets_its_answer_and_costs_nobody_else_anything(watch: Watch, case: Case) -> None:
    def work() -> None:
        with Wire(watch.broker) as wire:
            wire.send(case.sent)
            if case.finishes:
                wire.finish()
            wanted = [code for code in case.codes if code != CLOSED]
            assert wire.hear(len(wanted)).codes == wanted
            if case.codes[-1] == CLOSED:
                assert wire.is_closed_by_broker()

    watch.under_rule(work)


def test_own_slow(watch: Watch) -> None:
    """A byte now and then, a body that never comes: closed at the deadline, while others are served."""

    def work() -> None:
        wires = [Wire(watch.broker) for _ in range(200)]
        for number, wire in enumerate(wires):
            wire.send(b"p" if number % 2 else b"put t 0 16777216 1\r\nx")
        for wire in wires:
            with wire:
                assert wire.is_closed_by_broker()

    watch.under_rule(work)


def test_own_truncated(watch: Watch) -> None:
    """A put cut at every byte, then the end: no answer, nothing written."""
    whole = put(batch())

    def work() -> None:
        for size in range(1, len(whole)):
            with Wire(watch.broker) as wire:
                wire.send(whole[:size])
                wire.finish()
                assert [code for code in wire.hear(1).codes if code == 200] == []

    watch.under_rule(work)


def test_own_flipped(watch: Watch) -> None:
    """Every bit of a put's batch flipped: the door refuses each; the line's bits are in tests/unit/protocol."""

    def work() -> None:
        sound = put(batch())
        start = sound.index(b"\r\n") + 2
        with Wire(watch.broker) as wire:
            for bit in range(start * 8, len(sound) * 8):
                damaged = bytearray(sound)
                damaged[bit >> 3] ^= 1 << (bit & 7)
                in_epoch = start + 12 <= bit >> 3 < start + 16  # PartitionLeaderEpoch is the broker's to write
                assert (wire.ask(bytes(damaged))[0] == 200) == in_epoch, f"bit {bit}"

    watch.under_rule(work, written=32)


def test_own_records(watch: Watch) -> None:
    """A batch whose inside contradicts its header passes the door, and is a typed error at the reader."""

    def work() -> None:
        with txmq.connect(watch.broker.address) as client, Wire(watch.broker) as wire:
            for topic, content in (
                ("counted", batch(9, count=10, last_offset_delta=9)),
                ("longer", _record_longer_than_its_batch()),
            ):
                client.topics.create(topic)
                assert wire.ask(b"put %b 0 %d 1\r\n%b" % (topic.encode(), len(content), bytes(content)))[0] == 200
                with pytest.raises(txmq.errors.InvalidBatchError):
                    client.fetch(topic, partition=0, offset=0)
                client.topics.delete(topic)

    watch.under_rule(work)


def _record_longer_than_its_batch() -> bytearray:
    made = batch()
    made[61] = 0x7E  # the record's length, a varint: 63 where 9 follow
    return _sealed(made)


def _sealed(made: bytearray) -> bytearray:
    records.set_sequence(made, -1, -1, -1)  # writes the CRC anew
    return made


def test_own_pipelined(watch: Watch) -> None:
    """200,000 requests whose answers nobody reads: the broker stops reading; memory stays bounded."""

    def work() -> None:
        flood(watch.broker)

    watch.under_rule(work, delay_s_max=FLOOD_DELAY_S_MAX)


def test_own_bytewise(watch: Watch) -> None:
    """A request in segments of one byte is a request."""

    def work() -> None:
        with Wire(watch.broker) as wire:
            for byte in put(batch()):
                wire.send(bytes([byte]))
            assert wire.hear(1).codes == [200]

    watch.under_rule(work, written=1)


def test_own_reset(watch: Watch) -> None:
    """RST in the middle of a put: no half batch."""

    def work() -> None:
        for size in (10, 30, 80):
            wire = Wire(watch.broker)
            wire.send(put(batch())[:size])
            wire.reset()

    watch.under_rule(work)


def test_own_bomb(watch: Watch) -> None:
    """32 KB that inflate to far more: the broker never inflates, the reader stops while inflating."""
    made = batch(attributes=4)[:61] + cramjam.zstd.compress(bytes(1 << 30), 1)
    struct.pack_into(">i", made, 8, len(made) - 12)
    made = _sealed(made)

    def work() -> None:
        with txmq.connect(watch.broker.address) as client, Wire(watch.broker) as wire:
            client.topics.create("bomb")
            assert len(made) < 64 << 10
            assert wire.ask(b"put bomb 0 %d 1\r\n%b" % (len(made), bytes(made)))[0] == 200
            with pytest.raises(txmq.errors.InvalidBatchError):
                client.fetch("bomb", partition=0, offset=0)
            client.topics.delete("bomb")

    watch.under_rule(work)


def test_own_names(watch: Watch) -> None:
    """Names never become paths, so a device's name and two that differ in case are names like others."""

    def work() -> None:
        with Wire(watch.broker) as wire:
            for number, name in enumerate((b"CON", b"Case", b"case")):
                assert wire.ask(b"topic create %b %d\r\n" % (name, number))[0] == 200
            ids = [
                json.loads(wire.ask(b"topic describe %b 1\r\n" % name)[1])["topic_id"] for name in (b"Case", b"case")
            ]
            assert ids[0] != ids[1]
            names = [path.name for path in (watch.broker.data_dir / "log").iterdir()]
            assert all(name.isdigit() for name in names)
            for name in (b"CON", b"Case", b"case"):
                assert wire.ask(b"topic delete %b 1\r\n" % name)[0] == 200

    watch.under_rule(work)


def _session(wire: Wire) -> tuple[int, bytes]:
    hello = json.loads(wire.ask(b"hello 1 me session=new h\r\n")[1])
    return int(hello["session"], 16), f"{hello['cluster']}-{hello['home']}-{hello['session']}".encode()


def test_own_sequences(watch: Watch) -> None:
    """Gap, repeat, repeat with other content, a past epoch, another's producer id."""

    def work() -> None:
        def numbered(sequence: int, value: bytes = b"v", epoch: int = 0, producer: int | None = None) -> bytes:
            made = records.encode([(None, value, (), TIME_MS)])
            records.set_sequence(made, session if producer is None else producer, epoch, sequence)
            return put(made)

        with Wire(watch.broker) as wire:
            session, _ = _session(wire)
            code, offset = wire.ask(numbered(0))
            assert code == 200
            assert wire.ask(numbered(0)) == (200, offset)
            assert wire.ask(numbered(0, b"other"))[0] == 409
            assert wire.ask(numbered(2))[0] == 409
            assert wire.ask(numbered(1, epoch=7))[0] == 410
            assert wire.ask(numbered(0, producer=session + 1000))[0] == 403
            assert int(wire.ask(numbered(1))[1]) == int(offset) + 1

    watch.under_rule(work, written=2)


def _part(value: bytes = b"m") -> bytes:
    made = records.encode([(None, value, (), TIME_MS)])
    return b"t 1 %d\r\n%b" % (len(made), bytes(made))


def _prepare(txid: bytes, body: bytes, opaque: bytes = b"p") -> bytes:
    return b"prepare %b last-resource resource=db uuid=%b table=t %d %b\r\n%b" % (
        txid,
        b"0" * 32,
        len(body),
        opaque,
        body,
    )


def test_own_two_connections(watch: Watch) -> None:
    """Commit and rollback at once on two connections: one wins, and both are told the same truth."""

    def work() -> None:
        with Wire(watch.broker) as owner, Wire(watch.broker) as other:
            _, prefix = _session(owner)
            for counter in range(1, 21):
                txid = b"%b-%x" % (prefix, counter)
                assert owner.ask(_prepare(txid, _part()))[0] == 200
                first, second = (owner, other) if counter % 2 else (other, owner)
                first.send(b"commit %b 0 c\r\n" % txid)
                second.send(b"rollback %b r\r\n" % txid)
                codes = [first.hear(1).codes[0], second.hear(1).codes[0]]
                assert sorted(codes) == [200, 409]
                told = other.ask(b"outcome %b o\r\n" % txid)[1].split()[0]
                assert told == (b"committed" if codes[0] == 200 else b"rolled-back")

    watch.under_rule(work)


def test_own_delayed(watch: Watch) -> None:
    """A commit that comes after its transaction was rolled back is refused, and touches no later one."""

    def work() -> None:
        with Wire(watch.broker) as wire:
            _, prefix = _session(wire)
            body = _part()
            assert wire.ask(b"outcome %b-1 fence f\r\n" % prefix) == (200, b"rolled-back\n")
            assert wire.ask(b"commit %b-1 %d c\r\n%b" % (prefix, len(body), body))[0] == 409
            code, where = wire.ask(b"commit %b-2 %d c\r\n%b" % (prefix, len(body), body))
            assert (code, wire.ask(b"commit %b-2 %d c\r\n%b" % (prefix, len(body), body))) == (200, (200, where))

    watch.under_rule(work)


def test_own_prepared(watch: Watch) -> None:
    """After prepare: no more data; the same prepare again is the same, another one is refused."""

    def work() -> None:
        with Wire(watch.broker) as wire:
            _, prefix = _session(wire)
            txid = prefix + b"-1"
            assert wire.ask(_prepare(txid, _part()))[0] == 200
            assert wire.ask(_prepare(txid, _part()))[0] == 200
            assert wire.ask(_prepare(txid, _part(b"other")))[0] == 409
            made = bytes(batch())
            assert wire.ask(b"put t 0 tx=%b %d 1\r\n%b" % (txid, len(made), made))[0] == 409
            assert wire.ask(b"rollback %b 1\r\n" % txid)[0] == 200

    watch.under_rule(work)


def test_own_open_transactions(watch: Watch) -> None:
    """More open transactions than allowed: refused with 429, and the others are as they were."""

    def work() -> None:
        with Wire(watch.broker) as wire:
            _, prefix = _session(wire)
            codes = [wire.ask(_prepare(b"%b-%x" % (prefix, counter), _part()))[0] for counter in range(1, 61)]
            assert codes == [200] * 50 + [429] * 10
            for counter in range(1, 51):
                assert wire.ask(b"rollback %b-%x 1\r\n" % (prefix, counter))[0] == 200

    watch.under_rule(work)


def test_own_huge_transaction(watch: Watch) -> None:
    """A transaction over its limit is refused part by part, before it eats the disk, and leaves nothing."""

    def work() -> None:
        with Wire(watch.broker) as wire:
            _, prefix = _session(wire)
            made = records.encode([(None, bytes(300_000), (), TIME_MS)])
            content = bytes(made)
            request = b"put t 1 tx=%b-1 %d 1\r\n%b" % (prefix, len(content), content)
            assert [wire.ask(request)[0] for _ in range(5)] == [200, 200, 200, 413, 413]
            assert wire.ask(b"rollback %b-1 1\r\n" % prefix)[0] == 200

    watch.under_rule(work)


def test_a_person_with_telnet_is_served(watch: Watch) -> None:
    with Wire(watch.broker) as wire:
        wire.send(b"stats\r\nhelp\r\nput t 0 raw 5 1\r\nhello\r\n")
        answers = {opaque: (code, body) for code, opaque, body in wire.hear(3).answers}
        assert answers[b"1"][0] == 200
        offset = int(answers[b"1"][1])
        code, batches = wire.ask(b"get t 0 %d 65536 2\r\n" % offset)
    assert (code, [message.value for message in records.decode(batches, "t", 0)]) == (200, [b"hello"])
