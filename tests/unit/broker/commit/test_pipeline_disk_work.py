"""Work on the disk that the event loop must not do: what the pipeline gives to threads, and what waits for what."""

from __future__ import annotations

import errno

import pytest

from tools.images.node import Client, Node
from tools.images.requests import batch
from tools.simulated.file import Kind
from txmq.broker.commit import pipeline
from txmq.broker.commit.pipeline import APPLY_RETRY_S, CHECK_S, JOURNAL_RETRY_S, RETRY_S, UNAPPLIED_GROUPS_MAX
from txmq.broker.commit.steps import Append, Apply, Checkpoint, Prepare, Remove, Step, StepThread

from ..support import checkpoint_under_way, node, prepare, put, restarted, values


def send(client: Client, size: int = 1, partition: int = 0) -> None:
    client.send("put", "a", partition, body=batch(bytes(size)))


def run(of: Node, until: type[Step] | None = None) -> list[Step]:
    """Run what is due, up to a step of that kind, which is then under way; all of them."""
    seen = []
    while (step := of.next_step()) is not None:
        seen.append(step)
        if type(step) is until:
            break
        if of.run_part(step, step.run):
            of.step_done(step)
    return seen


def finish(of: Node, step: Step) -> None:
    """What was under way has run."""
    step.run()
    of.step_done(step)


def kinds(steps: list[Step]) -> list[type[Step]]:
    return [type(step) for step in steps]


def thread_of(kind: type[Step], steps: list[Step]) -> StepThread:
    (thread,) = {step.thread for step in steps if type(step) is kind}
    return thread


def test_group_that_begins_journal_file_is_not_appended_by_loop() -> None:
    broker = node()
    client = broker.connect()
    threads = []
    for _ in range(12):
        send(client, 4000)
        base = broker.store.journal.next_lsn // broker.settings.journal_file_size_bytes
        thread = thread_of(Append, run(broker))
        began = broker.store.journal.next_lsn // broker.settings.journal_file_size_bytes > base
        threads.append((began, thread))
    assert set(threads) == {(False, StepThread.LOOP), (True, StepThread.WRITER)}


def test_loop_waits_for_no_sync_beside_those_of_checkpoint() -> None:
    broker = node()
    producer = broker.connect()
    producer.ask("topic", "create", "a")

    def thread_of_a_put() -> StepThread:
        send(producer)
        return thread_of(Append, run(broker))

    assert thread_of_a_put() is StepThread.LOOP
    with checkpoint_under_way(broker):
        assert thread_of_a_put() is StepThread.WRITER
    assert thread_of_a_put() is StepThread.LOOP


def test_loop_writes_partition_files_only_if_no_other_must_close() -> None:
    broker = node(open_files_max=64)
    client = broker.connect()
    client.ask("topic", "create", "w", extensions={"partitions": 70})
    threads = []
    for number in range(70):
        client.send("put", "w", number, body=batch(b"1"))
        applying = run(broker, until=Apply)[-1]
        syncs = broker.disk.counts["sync"]
        finish(broker, applying)
        threads.append(applying.thread)
        assert applying.thread is StepThread.FILES or broker.disk.counts["sync"] == syncs
        run(broker)
    assert threads == [StepThread.LOOP] * 60 + [StepThread.FILES] * 10
    broker.checkpoint()
    client.send("put", "w", 0, body=batch(b"1"))
    assert thread_of(Apply, run(broker)) is StepThread.LOOP


def test_large_group_is_written_to_its_partition_files_by_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "INLINE_APPLY_SIZE_BYTES", 5000)
    broker = node()
    client = broker.connect()
    send(client, 5000)
    assert thread_of(Apply, run(broker)) is StepThread.FILES
    send(client, 1000)
    assert thread_of(Apply, run(broker)) is StepThread.LOOP


def test_groups_do_not_pile_up_before_slow_partition_files() -> None:
    broker = node()
    client = broker.connect()
    send(client)
    run(broker, until=Apply)  # which takes its time
    sealed = 0
    while sealed <= UNAPPLIED_GROUPS_MAX:
        send(client)
        if not run(broker):
            break
        sealed += 1
    assert sealed == UNAPPLIED_GROUPS_MAX


def test_files_of_a_deleted_topic_go_before_the_next_checkpoint() -> None:
    broker = node()
    client = broker.connect()
    put(client, b"1")
    broker.mark()
    client.send("topic", "delete", "a")
    seen = run(broker, until=Remove)
    assert kinds(seen) == [Append, Apply, Remove]
    assert seen[-1].thread is StepThread.HELPER
    assert broker.disk.list_directory("log") == ["1"]
    assert broker.store.journal.durable_lsn == broker.store.journal.next_lsn
    broker.pipeline.want_checkpoint()
    send_to_b = broker.connect()
    send_to_b.send("put", "b", 0, body=batch(b"2"))
    assert Checkpoint not in kinds(run(broker))
    assert restarted(broker).disk.list_directory("log") == ["2"]  # a crash here: the next start removes it


def test_a_checkpoint_goes_on_when_the_files_are_gone() -> None:
    broker = node()
    client = broker.connect()
    put(client, b"1")
    client.send("topic", "delete", "a")
    removing = run(broker, until=Remove)[-1]
    broker.pipeline.want_checkpoint()
    assert Checkpoint not in kinds(run(broker))
    lsn = broker.store.checkpoint_lsn
    finish(broker, removing)
    assert Checkpoint in kinds(run(broker))
    assert broker.store.checkpoint_lsn > lsn
    assert broker.disk.list_directory("log") == []


def test_removal_without_descriptors_is_retried_and_delays_no_stop() -> None:
    broker = node()
    client = broker.connect()
    put(client, b"1")
    broker.disk.fail_at(1, errno.EMFILE, "entry", forever=True, path_prefix="log/")
    client.send("topic", "delete", "a")
    broker.pump()
    assert broker.disk.list_directory("log") == ["1"]
    assert not broker.store.removals.is_empty
    broker.pipeline.want_checkpoint()
    broker.run_steps()
    assert broker.pipeline.is_idle
    broker.disk.clear_faults()
    broker.clock.advance(RETRY_S)
    broker.run_steps()
    assert broker.disk.list_directory("log") == []


def test_a_removal_that_fails_otherwise_ends_the_broker() -> None:
    broker = node()
    client = broker.connect()
    put(client, b"1")
    broker.disk.fail_at(1, errno.EIO, "entry", path_prefix="log/")
    client.send("topic", "delete", "a")
    with pytest.raises(OSError, match="log/1"):
        broker.pump()
    assert broker.pipeline.has_failed


def held_up_removal() -> tuple[Node, Remove]:
    """A full disk: a topic is deleted to make room, and a group that waits for space has batches of it."""
    broker = node()
    client = broker.connect()
    put(client, b"1")
    put(client, b"2", partition=1)
    broker.disk.fail_at(1, errno.ENOSPC, "write", forever=True, path_prefix="log/")
    put(client, b"3")
    client.send("topic", "delete", "a")
    removing = run(broker, until=Remove)[-1]
    assert isinstance(removing, Remove)
    return broker, removing


def all_goes(broker: Node) -> bool:
    """Whether nothing is left when there is space again."""
    broker.disk.clear_faults()
    broker.clock.advance(RETRY_S)
    broker.run_steps()
    return not broker.disk.list_directory("log") and not restarted(broker).disk.list_directory("log")


def test_file_removed_to_make_room_may_be_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    broker, removing = held_up_removal()
    remove = broker.disk.remove_directory

    def remove_directory(path: str) -> None:
        monkeypatch.undo()
        broker.clock.advance(APPLY_RETRY_S)
        assert Apply in kinds(run(broker))
        remove(path)

    monkeypatch.setattr(broker.disk, "remove_directory", remove_directory)
    finish(broker, removing)
    assert all_goes(broker)


def test_full_disk_makes_room_once_and_the_rest_waits() -> None:
    """Each attempt left a file to be removed, and each removal was a reason to try again at once."""
    broker, removing = held_up_removal()
    finish(broker, removing)
    steps: list[Step] = []
    while len(steps) < 20 and (step := broker.next_step()) is not None:
        finish(broker, step)
        steps.append(step)
    assert kinds(steps) == [Apply]
    assert all_goes(broker)


def test_writer_may_lose_its_directory_to_the_removal(monkeypatch: pytest.MonkeyPatch) -> None:
    broker, removing = held_up_removal()
    for name in broker.disk.list_directory("log/1/0"):
        broker.store.files.unlink(f"log/1/0/{name}")
    broker.disk.remove_directory("log/1/0")
    add = broker.disk.add_directories

    def add_directories(path: str) -> list[str]:
        monkeypatch.undo()
        made = add(path)
        finish(broker, removing)
        return made

    monkeypatch.setattr(broker.disk, "add_directories", add_directories)
    broker.clock.advance(APPLY_RETRY_S)
    assert Apply in kinds(run(broker))
    assert all_goes(broker)


def test_the_next_journal_file_is_prepared_beside_the_load() -> None:
    broker = node()
    client = broker.connect()
    assert not broker.store.journal.is_next_ready
    send(client)
    assert Prepare not in kinds(run(broker))  # not at once
    broker.clock.advance(CHECK_S)
    send(client)
    preparing = run(broker, until=Prepare)[-1]
    assert (type(preparing), preparing.thread) == (Prepare, StepThread.HELPER)
    for _ in range(12):  # the load goes on meanwhile, over several files
        send(client, 4000)
        assert Apply in kinds(run(broker))
    finish(broker, preparing)
    assert broker.store.journal.is_next_ready
    found = values(broker)
    assert (len(found), values(restarted(broker))) == (14, found)


def test_a_file_that_cannot_be_prepared_is_tried_again_later() -> None:
    broker = node()
    run(broker)
    faults: list[tuple[int, Kind]] = [(errno.EMFILE, "open"), (errno.ENOSPC, "write")]
    for number, kind in faults:
        broker.clock.advance(RETRY_S)
        broker.disk.fail_at(1, number, kind, forever=True, path_prefix="journal/spare")
        assert Prepare in kinds(run(broker))
        assert not broker.store.journal.is_next_ready
        broker.clock.advance(CHECK_S)
        assert Prepare not in kinds(run(broker))
        broker.disk.clear_faults()
    broker.clock.advance(RETRY_S)
    run(broker)
    assert broker.store.journal.is_next_ready
    assert put(broker.connect(), b"1").code == 200


def test_a_broker_that_stops_prepares_nothing() -> None:
    broker = node()
    broker.clock.advance(CHECK_S)
    broker.pipeline.is_stopping = True
    send(broker.connect())
    assert Prepare not in kinds(run(broker))


@pytest.mark.parametrize("taken", ["before", "then"])
def test_no_checkpoint_while_full_disk_holds_groups_up(taken: str) -> None:
    broker = node()
    client = broker.connect()
    put(client, b"1")
    send(client, 5000)
    step = run(broker, until=Apply)[-1]
    if taken == "before":
        broker.pipeline.want_checkpoint()
        assert kinds(run(broker)) == [Append]  # of the group that it is taken of; it waits for the apply
    broker.disk.set_free_bytes(0)
    finish(broker, step)
    assert Checkpoint not in kinds(run(broker))
    broker.disk.set_free_bytes(1 << 20)  # and nothing is tried again before APPLY_RETRY_S
    broker.pipeline.want_checkpoint()
    assert Checkpoint not in kinds(run(broker))
    assert values(restarted(broker)) == [b"1", bytes(5000)]


def test_journal_that_lacks_descriptors_waits_and_new_messages_are_refused() -> None:
    broker = node()
    client, other = broker.session(), broker.connect()
    prepare(client, broker.txid(1, 1), ("a", 1, batch(b"held")))
    broker.disk.fail_at(1, errno.EMFILE, "open", forever=True, path_prefix="journal/")
    sent: list[bytes] = []
    for _ in range(8):
        sent.append(client.send("put", "a", 0, body=batch(bytes(1000 if sent else 9000))))
        run(broker)
        broker.clock.advance(JOURNAL_RETRY_S)
    assert broker.store.is_full(1 << 40)
    broker.flush()
    assert len(client.received) < len(sent)
    broker.context.disk_full = True  # as the shell does
    refused = other.send("put", "a", 0, body=batch(b"new"))
    broker.flush()
    assert other.received[refused].error == "disk-full"
    decided = other.send("commit", broker.txid(1, 1), body=b"")  # waits, too
    run(broker)
    assert decided not in other.received
    broker.disk.clear_faults()
    broker.clock.advance(JOURNAL_RETRY_S)
    run(broker)
    assert not broker.store.is_full(1 << 40)
    broker.flush()
    assert [client.received[opaque].code for opaque in sent] == [200] * len(sent)
    assert other.received[decided].code == 200
    after = restarted(broker)
    assert (len(values(after)), values(after, partition=1)) == (len(sent), [b"held"])


def test_checkpoint_whose_journal_cannot_be_released_is_repeated() -> None:
    broker = node()
    client = broker.connect()
    for _ in range(2):
        for _ in range(8):
            put(client, bytes(4000))
        broker.checkpoint()
    for _ in range(8):
        put(client, bytes(4000))
    files = len(broker.disk.list_directory("journal"))
    broker.disk.fail_at(1, errno.EMFILE, "entry", forever=True, path_prefix="journal/")
    broker.checkpoint()
    assert len(broker.disk.list_directory("journal")) == files
    broker.disk.clear_faults()
    broker.clock.advance(JOURNAL_RETRY_S)
    run(broker)
    assert len(broker.disk.list_directory("journal")) < files
    assert len(values(restarted(broker))) == 24


def test_stopping_broker_does_not_wait_for_descriptors() -> None:
    broker = node()
    client = broker.connect()
    broker.disk.fail_at(1, errno.EMFILE, "open", forever=True, path_prefix="journal/")
    for _ in range(2):
        client.send("put", "a", 0, body=batch(bytes(9000)))
        run(broker)
    broker.pipeline.is_stopping = True
    broker.clock.advance(JOURNAL_RETRY_S)
    with pytest.raises(OSError, match="open files"):
        run(broker)
    assert broker.pipeline.has_failed
