"""Reads topics and high watermarks of a stopped broker from its journal, for readers of its partition files.

Theory of operation. The log lags behind the journal: partition files are written after the journal's record is forced,
and not synced before the next checkpoint. So the newest good checkpoint and the journal after it are folded into a
state as recovery does it, but nothing is written, cut or removed. The state says of every partition where it begins,
which segments it has and how long they are, and where its high watermark is (messages of a decision whose branches
have not all committed are held above it). Files may be shorter than that: then the last messages are only in the
journal, and a start of the broker writes them.

Invariants: nothing in the directory changes, but for the lock, which is held meanwhile if it can be taken.

Thread safety: one thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from txmq.broker.commit.prepared_payloads import PayloadFiles
from txmq.broker.commit.redo import Redo, RedoEffects, restore
from txmq.broker.state.state import State
from txmq.errors import CorruptRecordError, DirectoryInUseError, StorageError
from txmq.redo import checkpoint, directory_identity, inspect
from txmq.runtime.os_disk import OSDisk
from txmq.runtime.ports import Disk


@contextmanager
def locked(disk: OSDisk) -> Iterator[None]:
    """Keep a broker from starting on the directory meanwhile; a copy that cannot be written to is taken as it is.

    Raises:
        DirectoryInUseError: a broker runs on it. Other readers do not mind.
    """
    with ExitStack() as stack:
        try:
            lock = disk.lock(directory_identity.LOCK_PATH, is_shared=True)
        except OSError:
            pass
        except DirectoryInUseError as error:
            advice = "read through that broker (option bootstrap), or read a copy of the directory"
            raise DirectoryInUseError(f"{str(error).rpartition(':')[0]}: {advice}") from None
        else:
            stack.callback(lock.release)
        yield


def is_data_directory(disk: Disk) -> bool:
    """Whether it is a broker's, and not a copy of some of its segments."""
    return disk.exists(directory_identity.PATH)


class Folded(NamedTuple):
    """The state that a start of the broker would come back with.

    ``durable``: by topic id and partition, the offset up to which the checkpoint knows the files to be on disk.
    """

    state: State
    durable: dict[tuple[int, int], int]


def fold(disk: Disk) -> Folded:
    """Read checkpoint and journal.

    Raises:
        StorageError: checkpoint or journal is damaged or missing.
    """
    node = directory_identity.load(disk)
    state = State(home=0 if node is None else node.node_id)
    lsn = _restore(disk, state)
    durable = {(each.topic_id, each.number): each.next_offset for each in state.all_partitions()}
    redo = Redo(state, RedoEffects(state))
    for record in inspect.dump(disk, from_lsn=lsn):
        if record.kind == "group":
            redo.record(record.payload)
    state.publish_recovered()
    return Folded(state, durable)


def _restore(disk: Disk, state: State) -> int:
    """Take the newest good checkpoint; the LSN from which the journal goes on."""
    damage: StorageError | None = None
    for lsn in reversed(checkpoint.list_lsns(disk)):
        try:
            newest = checkpoint.read(disk, lsn, node_id=None)
        except CorruptRecordError as error:
            damage = error
            continue
        restore(state, newest, PayloadFiles(disk))
        return lsn
    if damage is not None:
        raise StorageError(f"no checkpoint can be read ({damage})") from damage
    return 0
