"""What is done to a broker's files, limits and process (cases 2 67 68 120 129 131 149 150)."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.stopped import until_stopped
from txmq.broker.core import REQUESTS_A_TURN
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerFailedError, BrokerProcess

from .bad_inputs import batch, put
from .watch import FLOOD_DELAY_S_MAX, Watch
from .wire import Wire

LIMIT = 64
DESCRIPTORS_OF_THE_TEST = 200  # kept back of what this process may open


class Limited(BrokerProcess):
    """A broker that may have 64 descriptors, and cannot raise that."""

    def _command(self) -> list[str]:
        return ["sh", "-c", f'ulimit -n {LIMIT} && exec "$@"', "sh", *super()._command()]


def _stopped_with_a_segment(broker: BrokerProcess) -> Path:
    with Wire(broker) as wire:
        assert wire.ask(b"topic create t 1\r\n")[0] == 200
        assert wire.ask(put(batch()))[0] == 200
    broker.stop()
    [segment] = (broker.data_dir / "log").rglob("*.log")
    return segment


# --- limits ----------------------------------------------------------------------------------------------------------


def test_with_64_descriptors_strangers_are_refused_and_nobody_else_notices(tmp_path: Path) -> None:
    """150: more connections than descriptors; those that are in go on, segments are opened, and it recovers."""
    with Limited(tmp_path / "broker") as broker, Wire(broker) as first:
        assert first.ask(b"topic create many partitions=40 1\r\n")[0] == 200
        with ExitStack() as strangers:
            wires = [strangers.enter_context(Wire(broker)) for _ in range(80)]
            for wire in wires:
                wire.send(b"ping 1\r\n")
            codes = [wire.hear(1).codes for wire in wires]
            assert {tuple(code) for code in codes} <= {(200,), (503,), ()}  # served, refused, or closed without a word
            assert codes.count([200]) < LIMIT
            for partition in range(40):  # each opens a file
                assert first.ask(b"put many %d raw 1 1\r\nx" % partition)[0] == 200
        eventually(lambda: _is_served(broker), "a client is let in, now that descriptors are free")
        assert '"error"' not in broker.logs()
        assert broker.stop() == 0
        broker.start()
        assert [_get(broker, partition) for partition in range(40)] == [200] * 40


def _is_served(broker: BrokerProcess) -> bool:
    with Wire(broker) as wire:
        wire.send(b"ping 1\r\n")
        return wire.hear(1).codes == [200]


def _get(broker: BrokerProcess, partition: int) -> int:
    with Wire(broker) as wire:
        return wire.ask(b"get many %d 0 1000 1\r\n" % partition)[0]


def _command(data: Path) -> list[str]:
    return [sys.executable, "-m", "txmq.cli.main", "broker", "--data", str(data), "--listen", "127.0.0.1:0"]


def test_messages_that_no_file_takes_are_refused_before_memory_grows(tmp_path: Path) -> None:
    """Descriptors run out for segments; the journal has its file, so nothing else would tell."""
    message = bytes(500_000)
    put_one = b"put t 0 raw %d 1\r\n" % len(message) + message
    settings = {"journal_file_size_bytes": 64 << 20}
    with BrokerProcess(tmp_path / "broker", settings=settings) as broker, Wire(broker) as wire:
        assert wire.ask(b"topic create t 1\r\n")[0] == 200
        pid = broker.pid
        assert pid is not None
        allowed = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        opened = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (opened, allowed[1]))
        codes: list[int] = []
        while 507 not in codes and len(codes) < 100:
            codes.append(wire.ask(put_one)[0])
        assert codes == [200] * (len(codes) - 1) + [507]
        eventually(lambda: "partition files cannot be written" in broker.logs(), broker.logs)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, allowed)
        eventually(lambda: wire.ask(put_one)[0] == 200, "messages are taken again")
        end = b" %d\n" % len(codes)
        eventually(lambda: wire.ask(b"offset t 0 latest 1\r\n")[1].endswith(end), "all are visible")
        eventually(lambda: "partition files are written again" in broker.logs(), broker.logs)


def test_journal_without_descriptors_waits_for_its_next_file(tmp_path: Path) -> None:
    """It needs one in its directory; what comes meanwhile is refused, and nothing ends."""
    put_one = b"put t 0 raw 400000 %d\r\n" + bytes(400_000)
    settings = {
        "journal_file_size_bytes": 2 << 20, "group_size_bytes_max": 1 << 16,
        "request_size_bytes_max": 1 << 20, "batch_size_bytes_max": 1 << 20,
    }  # fmt: skip
    with ExitStack() as stack:
        broker = stack.enter_context(BrokerProcess(tmp_path / "broker", settings=settings))
        waiting, other = stack.enter_context(Wire(broker)), stack.enter_context(Wire(broker))
        assert waiting.ask(b"topic create t 1\r\n")[0] == 200
        assert waiting.ask(put_one % 1)[0] == 200  # its segment is open
        pid = broker.pid
        assert pid is not None
        allowed = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        opened = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (opened, allowed[1]))
        for number in range(8):
            waiting.send(put_one % number)
        eventually(lambda: "cannot begin its next file" in broker.logs(), broker.logs)
        assert other.ask(b"put t 0 raw 1 1\r\nx")[0] == 507
        resource.prlimit(pid, resource.RLIMIT_NOFILE, allowed)
        codes = waiting.hear(8).codes
        eventually(lambda: other.ask(b"put t 0 raw 1 1\r\nx")[0] == 200, "messages are taken again")
        assert codes[0] == 200
        assert set(codes) <= {200, 507}
        broker.kill()
        broker.start()
        with Wire(broker) as wire:
            assert wire.ask(b"offset t 0 latest 1\r\n")[1].endswith(b" %d\n" % (codes.count(200) + 2))


def test_insufficient_descriptors_are_reported_at_the_start(tmp_path: Path) -> None:
    started = subprocess.run(
        ["sh", "-c", 'ulimit -n 40 && exec "$@"', "sh", *_command(tmp_path / "b")], capture_output=True, check=False
    )
    assert started.returncode == 2
    assert b"ulimit -n is 40" in started.stderr
    assert not (tmp_path / "b").exists()


def test_thousands_of_slow_connections_are_closed_while_others_are_served(watch: Watch) -> None:
    """2: as many as descriptors allow, up to 5,000; each has sent half a request or nothing."""

    def work() -> None:
        with ExitStack() as slow:
            wires = [slow.enter_context(Wire(watch.broker)) for _ in range(_slow_count())]
            for number, wire in enumerate(wires):
                wire.send(b"pin"[: number % 4])
            assert all(wire.is_closed_by_broker() for wire in wires)

    work()  # what an allocator keeps of so many is baseline; it keeps some more in later rounds
    watch.rebase()
    growth_bytes_max = 11 << 20  # 5,000 connections that stay cost 12
    watch.under_rule(work, growth_bytes_max=growth_bytes_max, delay_s_max=FLOOD_DELAY_S_MAX)


@pytest.mark.parametrize("verb", [b"meta *", b"stats json", b"topic list *", b"stats offsets", b"help *"])
def test_short_lines_with_long_answers_hold_up_nobody(watch: Watch, verb: bytes) -> None:
    """37: thousands in one read; nobody reads the answers, or somebody does: then all come, in order."""
    with Wire(watch.broker) as wire:
        for number in range(100):
            assert wire.ask(b"topic create long-%d partitions=4 1\r\n" % number)[0] == 200

    def work() -> None:
        with Wire(watch.broker) as wire:
            wire.send(b"".join(b"%b %x\r\n" % (verb, number) for number in range(1, 3001)))
            with Wire(watch.broker) as other:
                other.send(b"".join(b"%b %x\r\n" % (verb, number) for number in range(1, 101)) + b"ping e\r\n")
                heard = other.hear(101)
                assert heard.codes == [200] * 101
                assert [opaque for _, opaque, _ in heard.answers[:100]] == [b"%x" % number for number in range(1, 101)]

    work()  # the buffers of so many answers are part of the baseline
    watch.rebase()
    watch.under_rule(work, delay_s_max=FLOOD_DELAY_S_MAX)


_PUT = b"put t 0 raw 1 1\r\nx"
_LONG = (b"meta *", b"stats json", b"topic list *", b"help *")


@pytest.mark.parametrize(
    ("piece", "handled_max"),
    [
        pytest.param(_PUT + b"version 1\r\n", REQUESTS_A_TURN // 2, id="version"),
        *(pytest.param(_PUT + verb + b" 1\r\n", 1, id=verb.decode()) for verb in _LONG),
    ],
)
def test_behind_a_flood_others_wait_for_one_turn_of_it(broker: BrokerProcess, piece: bytes, handled_max: int) -> None:
    """37: counted, not timed: the broker finds the flood and what others ask together, and takes a turn of each.

    The flood puts messages: what the others are told of the topic's end counts those that were put before them.
    """
    pid = broker.pid
    assert pid is not None
    with ExitStack() as opened:
        wire, *others = [opened.enter_context(Wire(broker)) for _ in range(5)]
        assert wire.ask(b"topic create t storage=memory 1\r\n")[0] == 200
        assert [other.ask(b"ping 1\r\n")[0] for other in others] == [200] * 4
        os.kill(pid, signal.SIGSTOP)
        try:
            until_stopped(pid)
            wire.socket.setblocking(False)
            wire.socket.send(piece * 20_000)  # as much as the system takes
            for other in others:
                other.send(b"offset t 0 latest 1\r\n")
        finally:
            os.kill(pid, signal.SIGCONT)
        ends = [int(other.hear(1).answers[0][2].split()[2]) for other in others]
        assert 0 < max(ends) <= handled_max, ends


def _slow_count() -> int:
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(100, min(5000, soft - DESCRIPTORS_OF_THE_TEST))


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Watch]:
    """A broker of its own, under rule R0."""
    with BrokerProcess(tmp_path / "watched", settings={"handshake_timeout_ms": 2000}) as process:
        yield Watch(process)


# --- signals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_twice_is_one_clean_stop(broker: BrokerProcess, number: signal.Signals) -> None:
    """149: what is under way is answered, the second signal changes nothing."""
    with Wire(broker) as wire:
        assert wire.ask(b"topic create t 1\r\n")[0] == 200
        wire.send(put(batch()))
        pid = broker.pid
        assert pid is not None
        os.kill(pid, number)
        os.kill(pid, number)
        answered = wire.hear(1).codes
        assert broker.wait(30) == 0
    assert '"clean": true' in broker.logs().splitlines()[-1]
    with Wire(broker.start()) as wire:
        end = int(wire.ask(b"offset t 0 latest 1\r\n")[1].split()[2])
        assert end == len(answered) or (answered == [] and end <= 1) or answered == [503]


def test_a_broker_that_was_stopped_for_a_while_goes_on(broker: BrokerProcess) -> None:
    """149: SIGSTOP and SIGCONT; what was sent meanwhile is answered, once."""
    with Wire(broker) as wire:
        assert wire.ask(b"topic create t 1\r\n")[0] == 200
        pid = broker.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        wire.send(put(batch()))
        until_stopped(pid)
        os.kill(pid, signal.SIGCONT)
        assert wire.hear(1).codes == [200]
        assert wire.ask(b"offset t 0 latest 1\r\n")[1] == b"1 0 1\n"


def test_members_with_heartbeats_queued_at_stopped_broker_keep_their_partitions(
    broker: BrokerProcess,
) -> None:
    """It stands still for longer than their session timeout: it reads what came meanwhile before it judges anybody."""
    timeout_ms, members = 4000, 8  # so long a busy machine may take from the last heartbeats to the pause
    with ExitStack() as opened:
        asking, *wires = [opened.enter_context(Wire(broker)) for _ in range(1 + members)]
        assert asking.ask(b"topic create t partitions=%d 1\r\n" % members)[0] == 200
        for number, wire in enumerate(wires):
            line = b"group join g member=m%d topics=t timeout=%d 0 1\r\n" % (number, timeout_ms)
            assert wire.ask(line)[0] == 200
        for _ in range(members):  # until everybody has released what the others are to have
            for number, wire in enumerate(wires):
                _beat(wire, number)
        before = _owned(asking)
        assert {owner for _, owner, _ in before} == {f"m{number}" for number in range(members)}
        broker.pause()
        for number, wire in enumerate(wires):
            wire.send(b"group heartbeat g member=m%d 0 h\r\n" % number)
        stopped_at = time.monotonic()
        eventually(lambda: time.monotonic() - stopped_at > 1.25 * timeout_ms / 1000, "every session timeout has passed")
        broker.resume()
        assert [wire.hear(1).codes for wire in wires] == [[200]] * members
        assert _owned(asking) == before


def _beat(wire: Wire, number: int) -> None:
    """One heartbeat, and a second one that releases what the first was told to."""
    revoked: list[list[object]] = []
    for _ in range(2):
        body = json.dumps(revoked).encode()
        code, view = wire.ask(b"group heartbeat g member=m%d %d h\r\n%b" % (number, len(body), body))
        assert code == 200
        revoked = json.loads(view)["revoked"]


def _owned(wire: Wire) -> list[tuple[int, str, int]]:
    """Partition, owner and generation of each."""
    rows = json.loads(wire.ask(b"group describe g 0 d\r\n")[1])["partitions"]
    return [(row["partition"], row["owner"], row["generation"]) for row in rows]


# --- files -----------------------------------------------------------------------------------------------------------


def test_symlink(broker: BrokerProcess, tmp_path: Path) -> None:
    """67: a symbolic link in a segment's place is not followed: readers and writers are told, it is untouched."""
    segment = _stopped_with_a_segment(broker)
    target = tmp_path / "target"
    target.write_bytes(segment.read_bytes())
    segment.unlink()
    segment.symlink_to(target)
    broker.start()
    with Wire(broker) as wire:
        assert wire.ask(b"get t 0 0 1000 1\r\n")[0] == 500
        before = target.read_bytes()
        wire.send(put(batch()))
        wire.hear(1)
    assert target.read_bytes() == before


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _sealed(path: Path) -> None:
    path.chmod(0)


PLANTS: list[Callable[[Path], None]] = [_fifo, _directory, _sealed]


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_what_is_not_a_readable_file_in_a_segments_place(broker: BrokerProcess, plant: Callable[[Path], None]) -> None:
    """68, 129: no wait for a FIFO's other end; the reader is told with the path, other topics are served."""
    segment = _stopped_with_a_segment(broker)
    plant(segment)
    broker.start()
    with Wire(broker) as wire:
        assert wire.ask(b"topic create other 1\r\n")[0] == 200
        assert wire.ask(b"put other 0 raw 1 2\r\nx")[0] == 200
        code, body = wire.ask(b"get t 0 0 1000 1\r\n")
        if plant is _sealed and os.geteuid() == 0:
            assert code == 200  # permissions do not stop root
        else:
            assert code == 500
            assert str(Path(*segment.parts[-4:])).encode() in body
        assert wire.ask(b"get other 0 0 1000 1\r\n")[0] == 200


@pytest.mark.parametrize("plant", [_fifo, _directory], ids=lambda plant: plant.__name__)
@pytest.mark.parametrize("name", ["*.redo", "*.checkpoint", "node.json"])
def test_what_is_not_a_file_in_the_journals_place(
    broker: BrokerProcess, plant: Callable[[Path], None], name: str
) -> None:
    """68: the broker does not start, at once, and names the file; nothing is made in its place."""
    _stopped_with_a_segment(broker)
    [place] = list(broker.data_dir.rglob(name))[-1:]
    plant(place)
    asked = time.monotonic()
    with pytest.raises(BrokerFailedError, match=place.name):
        broker.start()
    assert time.monotonic() - asked < 20
    assert not place.is_file()


def test_damage_in_acknowledged_data_stops_the_start_with_advice(broker: BrokerProcess) -> None:
    """120: the file, the place, that nothing was touched, and where to read on."""
    with Wire(broker) as wire:
        assert wire.ask(b"topic create t 1\r\n")[0] == 200
        for value in (b"needle", b"second", b"third!"):
            assert wire.ask(b"put t 0 raw 6 1\r\n" + value)[0] == 200
    broker.kill()
    [journal] = broker.data_dir.rglob("*.redo")
    damaged = bytearray(journal.read_bytes())
    damaged[damaged.index(b"needle")] ^= 1
    journal.write_bytes(damaged)
    with pytest.raises(
        BrokerFailedError, match=rf"{journal.name}: damaged at byte \d+.*nothing was changed.*operations.md"
    ):
        broker.start()
    assert journal.read_bytes() == damaged


def test_topic_directory(broker: BrokerProcess) -> None:
    """68: a file in the place of a partition's directory: a clear error with the path, no endless wait."""
    segment = _stopped_with_a_segment(broker)
    directory = segment.parent
    segment.unlink()
    directory.rmdir()
    directory.write_bytes(b"not a directory")
    broker.start()
    with Wire(broker) as wire:
        code, body = wire.ask(b"get t 0 0 1000 1\r\n")
    assert code == 500
    assert str(Path(*directory.parts[-3:])).encode() in body


def test_second_process(broker: BrokerProcess) -> None:
    """131: two brokers on one directory: the second refuses, the first does not notice."""
    second = subprocess.run(_command(broker.data_dir), capture_output=True, check=False)
    assert second.returncode == 1
    assert b"process %d" % (broker.pid or 0) in second.stderr
    assert b"Traceback" not in second.stderr
    with Wire(broker) as wire:
        assert wire.ask(b"ping 1\r\n")[0] == 200
