"""The acceptance scenarios of MetaQ for transactions, and those that it fails itself.

Their name, and where it is here; a name without a file is a test of this one. Left out: ha, gregor, spring, ZooKeeper.

====================================== =================================================================================
LocalTxTenProducerTenConsumerTenGroup  test_every_group_sees_committed_local_transactions_only
XATxTenProducerTenConsumerTenGroup     test_every_group_sees_the_committed_half_of_xa_transactions
OneProducerOneConsumerTxTimeoutTest    test_a_transaction_past_its_time_is_refused_and_leaves_nothing
SimpleMessageProducerUnitTest:
  begin twice                          tests/unit/client/transaction/test_block.py::
                                       test_blocks_do_not_nest_and_the_outer_one_goes_on
  commit or rollback without begin     tests/unit/client/transaction/test_block.py::
                                       test_a_block_that_is_over_or_new_refuses_its_use
  interrupted                          tests/unit/client/transaction/test_block.py::
                                       test_an_interrupt_in_the_commit_is_not_a_rollback
  server error                         tests/unit/client/transaction/test_block.py::
                                       test_a_refused_commit_is_a_rollback_with_its_cause
  no partitions                        tests/services/metaq/test_scenarios.py::
                                       test_sending_to_a_topic_that_is_not_there_is_refused
TransactionContextUnitTest             tests/unit/client/transaction/test_xa_resource_branch.py::
                                       test_every_state_and_call_leads_somewhere_or_is_protocol_error;
                                       tests/services/transaction/test_xa_resource.py::
                                       test_after_a_restart_of_the_broker_the_manager_recovers
SimpleXAMessageProducerUnitTest        none: it intersects the partitions of several brokers
-------------------------------------- ---------------------------------------------------------------------------------
Transactions that overlap a checkpoint test_transactions_that_overlap_checkpoints_are_all_there_after_a_kill;
                                       tests/images/test_images.py::
                                       test_every_image_keeps_what_was_told_and_answers_again_alike
Commit of a recovered transaction      test_a_recovered_transaction_is_committed_behind_what_was_put_meanwhile
  after new puts
Retention before recovery              test_retention_before_a_recovery_takes_no_transaction_along
Connection drop inside a transaction   tests/unit/broker/transcripts/put_streamed.txt::
                                       stream_whose_owner_is_gone_is_rolled_back_for_good;
                                       tests/services/transaction/test_xa_resource.py::
                                       test_disconnect_rolls_back_the_unprepared_and_keeps_the_prepared
Restart within the session timeout     tests/services/consumer/test_consumers.py::
                                       test_a_broker_that_is_killed_and_restarted_is_consumed_on;
                                       tests/unit/broker/transcripts/group.txt::
                                       offsets_and_generations_survive_a_restart_and_members_go_on
Mixed sizes around the group limit     test_mixed_sizes_around_the_group_limit_stand_where_told
Filter with alternating answers        tests/services/metaq/test_scenarios.py::
                                       test_filter_delivers_what_it_accepts_and_offset_passes_rest
Order kept on disk over a restart      tests/services/producer/test_ordered_producer.py::
                                       test_kills_of_broker_and_producer_lose_repeat_and_reorder_nothing
kill -9 at every step of commit        tests/crash/test_campaign.py::test_twenty_deaths_lose_nothing;
                                       tests/crash/test_xa_campaign.py::
                                       test_ten_deaths_of_clients_broker_and_databases_tear_nothing;
                                       tests/crash/test_points.py::test_the_matrix_is_mapped_row_by_row
====================================== =================================================================================
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import txmq
from tests.services.consumer.consuming import take, values
from tests.services.metaq import test_scenarios
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess
from txmq.xa import XAFlag

ROOT = Path(__file__).resolve().parents[3]
SMALL_GROUP_BYTES = 65_536  # the least that the broker takes


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """One for all, which takes checkpoints and looks for old segments all the time."""
    settings = {
        "checkpoint_interval_ms": 100, "retention_check_interval_ms": 10, "group_size_bytes_max": SMALL_GROUP_BYTES
    }  # fmt: skip
    with BrokerProcess(tmp_path_factory.mktemp("metaq") / "broker", settings=settings) as process:
        yield process


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A name that no other test uses."""
    name: str = request.node.name.removeprefix("test_")
    return name[:150]


@pytest.fixture
def client(broker: BrokerProcess) -> Iterator[txmq.Client]:
    """A client of it."""
    with txmq.connect(broker.address, timeout=30.0) as made:
        yield made


def xid(topic: str, number: int) -> txmq.Xid:
    """A foreign manager's."""
    return txmq.Xid(4711, topic[:50].encode() + b"%d" % number, b"b")


def seen_by_groups(client: txmq.Client, topic: str, count: int) -> list[list[bytes]]:
    """What ten groups get, sorted."""
    found = []
    for number in range(10):
        with client.consumer(f"{topic}-{number}", [topic]) as consumer:
            found.append(sorted(values(take(consumer, count))))
            assert consumer.poll(timeout=0) == []
    return found


def contents(client: txmq.Client, topic: str) -> list[bytes]:
    """What readers see."""
    return values(list(client.browse(topic)))


def checkpoints(broker: BrokerProcess) -> set[str]:
    """The checkpoint files that there are."""
    return {path.name for path in (broker.data_dir / "checkpoint").iterdir()}


def await_checkpoint(broker: BrokerProcess) -> None:
    """Until another one has been taken of what is there now."""
    known = checkpoints(broker)
    eventually(lambda: bool(checkpoints(broker) - known), "a checkpoint is taken")


def test_every_name_in_the_two_tables_is_a_test() -> None:
    for module in (test_scenarios.__doc__, __doc__):
        assert module is not None
        here = "test_scenarios_transactions.py" if module is __doc__ else "test_scenarios.py"
        table = re.sub(r"::\s+", "::", module[module.index("=====") :])
        named = re.findall(r"(?:(tests/[a-z_/]+\.py)::)?\b(test_[a-z0-9_]+)\b(?!\.py)", table)
        assert len(named) > 15
        for file, name in named:
            path = ROOT / file if file else Path(__file__).with_name(here)
            assert f"def {name}(" in path.read_text("utf-8"), f"{path}::{name}"
        for file, title in re.findall(r"(tests/[a-z_/]+\.txt)::([a-z0-9_]+)", table):
            assert f"\n## {title.replace('_', ' ')}\n" in (ROOT / file).read_text("utf-8"), f"{file}::{title}"


# --- transactions ----------------------------------------------------------------------------------------------------


def test_every_group_sees_committed_local_transactions_only(client: txmq.Client, topic: str) -> None:
    client.topics.create(topic, partitions=2)

    def produce(number: int) -> None:
        producer = client.producer(timeout=30.0)
        for each in range(10):
            content = b"%d.%d" % (number, each)
            try:
                with producer.transaction():
                    producer.send(topic, content, b"one")
                    producer.send(topic, content, b"two")
                    if each % 2:
                        raise LookupError
            except LookupError:
                pass

    with ThreadPoolExecutor(10) as threads:
        list(threads.map(produce, range(10)))
    committed = sorted(2 * [b"%d.%d" % (number, each) for number in range(10) for each in range(0, 10, 2)])
    assert seen_by_groups(client, topic, len(committed)) == 10 * [committed]


def test_every_group_sees_the_committed_half_of_xa_transactions(client: txmq.Client, topic: str) -> None:
    client.topics.create(topic, partitions=2)
    resource, producer = client.xa_resource(), client.producer(timeout=30.0)

    def produce(number: int) -> None:
        for each in range(10):
            branch = xid(topic, number * 10 + each)
            resource.start(branch)
            producer.send(topic, b"%d.%d" % (number, each), b"%d" % each)
            resource.end(branch)
            resource.prepare(branch)
            (resource.rollback if each % 2 else resource.commit)(branch)

    with ThreadPoolExecutor(10) as threads:
        list(threads.map(produce, range(10)))
    committed = sorted(b"%d.%d" % (number, each) for number in range(10) for each in range(0, 10, 2))
    assert seen_by_groups(client, topic, len(committed)) == 10 * [committed]
    assert resource.recover() == []


def test_a_transaction_past_its_time_is_refused_and_leaves_nothing(client: txmq.Client, topic: str) -> None:
    client.topics.create(topic)
    producer = client.producer(timeout=30.0)

    def too_slow() -> None:
        with producer.transaction(timeout=1.0):
            producer.send(topic, b"late")
            over = client.clock.monotonic() + 1.0
            eventually(lambda: client.clock.monotonic() > over, "its time is over")

    with pytest.raises(txmq.errors.TransactionTimeoutError):
        too_slow()
    assert contents(client, topic) == []
    assert producer.send(topic, b"first").offset == 0


# --- what the original fails at --------------------------------------------------------------------------------------


def test_transactions_that_overlap_checkpoints_are_all_there_after_a_kill(
    broker: BrokerProcess, client: txmq.Client, topic: str
) -> None:
    client.topics.create(topic)
    producer, resource = client.producer(timeout=30.0), client.xa_resource()
    a, b, d = (xid(topic, number) for number in range(3))

    def begin(branch: txmq.Xid, content: bytes) -> None:
        resource.start(branch)
        for _ in range(9):  # parts stream ahead, so that the broker has them before anything is decided
            producer.send(topic, content + bytes(1 << 20))
        resource.end(branch)

    begin(a, b"A")
    begin(b, b"B")
    await_checkpoint(broker)
    resource.commit(a, XAFlag.TMONEPHASE)
    producer.send(topic, b"alone")
    await_checkpoint(broker)
    resource.prepare(b)
    begin(d, b"D")
    resource.prepare(d)
    broker.kill()
    broker.start()
    assert set(resource.recover()) == {b, d}
    resource.commit(b)
    resource.rollback(d)
    assert [content[:5].strip(b"\0") for content in contents(client, topic)] == 9 * [b"A"] + [b"alone"] + 9 * [b"B"]
    assert resource.recover() == []


def test_a_recovered_transaction_is_committed_behind_what_was_put_meanwhile(
    broker: BrokerProcess, client: txmq.Client, topic: str
) -> None:
    client.topics.create(topic)
    producer, resource = client.producer(timeout=30.0), client.xa_resource()
    resource.start(xid(topic, 1))
    producer.send(topic, b"prepared")
    resource.end(xid(topic, 1))
    resource.prepare(xid(topic, 1))
    broker.kill()
    broker.start()
    assert [producer.send(topic, b"%d" % number).offset for number in range(3)] == [0, 1, 2]
    resource.commit(xid(topic, 1))
    assert producer.send(topic, b"after").offset == 4
    expected = [b"0", b"1", b"2", b"prepared", b"after"]
    assert contents(client, topic) == expected
    broker.kill()
    broker.start()
    assert contents(client, topic) == expected


def test_retention_before_a_recovery_takes_no_transaction_along(
    broker: BrokerProcess, client: txmq.Client, topic: str
) -> None:
    client.topics.create(topic, segment_size_bytes=4096, retention_size_bytes=8192)
    producer, resource = client.producer(timeout=30.0), client.xa_resource()
    producer.send(topic, b"old")
    resource.start(xid(topic, 1))
    producer.send(topic, b"prepared")
    resource.end(xid(topic, 1))
    resource.prepare(xid(topic, 1))
    for number in range(30):
        producer.send(topic, b"%d" % number + bytes(1000))
    eventually(lambda: client.offsets(topic, 0).start > 1, "retention takes the first segment")
    broker.kill()
    broker.start()
    assert resource.recover() == [xid(topic, 1)]
    resource.commit(xid(topic, 1))
    held = client.offsets(topic, 0)
    assert values(client.fetch(topic, 0, held.end - 1)) == [b"prepared"]
    broker.kill()
    broker.start()
    assert contents(client, topic)[-1] == b"prepared"
    client.topics.delete(topic)


def test_mixed_sizes_around_the_group_limit_stand_where_told(
    broker: BrokerProcess, client: txmq.Client, topic: str
) -> None:
    client.topics.create(topic, segment_size_bytes=1 << 20)
    sizes = (0, 1, 100, SMALL_GROUP_BYTES - 200, SMALL_GROUP_BYTES, SMALL_GROUP_BYTES + 1, 300_000, 700_000)
    told: dict[int, bytes] = {}
    lock = threading.Lock()

    def produce(number: int) -> None:
        producer = client.producer(timeout=30.0)
        for each in range(16):
            content = b"%d.%d." % (number, each) + bytes(sizes[(number + each) % len(sizes)])
            offset = producer.send(topic, content, timeout=60.0).offset
            assert offset is not None
            with lock:
                assert offset not in told
                told[offset] = content

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(produce, range(8)))
    expected = [told[offset] for offset in range(len(told))]
    assert contents(client, topic) == expected
    broker.kill()
    broker.start()
    assert contents(client, topic) == expected
    assert client.producer(timeout=30.0).send(topic, b"small", timeout=60.0).offset == len(expected)
