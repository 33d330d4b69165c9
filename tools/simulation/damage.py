"""P10: one bit flips on the disk of a broker that has come to rest; it must be found, or put right, and never served.

=============  ======================================================================================================
where          what is allowed
=============  ======================================================================================================
a segment      the check of the files names it; a broker that opens them writes it again from the journal, or reading
               fails: no reader gets other bytes
the journal    after the checkpoint that recovery starts from: recovery refuses, or finds the same state and messages
               (bytes that no record covers, and the last mark, which vouches for what stands before it)
a checkpoint   recovery falls back to the older one and finds the same state and messages; it refuses where there is
               none
=============  ======================================================================================================
"""

from __future__ import annotations

from collections.abc import Callable

from tools.images.check import comparable
from tools.images.node import Node
from tools.simulated.disk import SimDisk
from tools.simulated.disk_model import Image
from txmq.broker.state.state import State
from txmq.errors import TxmqError
from txmq.log.verify import verify_log
from txmq.model import TopicPartition
from txmq.redo import checkpoint
from txmq.redo.record_format import FILE_HEADER_SIZE, file_path

from .world import Simulation, Violation

FLIPS = 3


class Rest:
    """A broker at rest: what its disk holds, and what that means."""

    def __init__(self, world: Simulation, node: Node) -> None:
        self.world, self._settings = world, node.settings
        node.mark()  # what an idle broker does; from here on damage to any record can be told from a torn tail
        disk = node.disk
        self._image: Image = disk.model.build(disk.model.pending())
        self._expected = _contents(node)
        self._state = _state(node.state)
        self._segments = [
            (partition.segment_path(segment.base_offset), segment.size_bytes)
            for partition in node.state.all_partitions()
            for segment in partition.segments
            if segment.size_bytes
        ]
        self._checkpoints = checkpoint.list_lsns(disk)
        self._end_lsn = node.store.journal.durable_lsn
        self._journal = sorted(
            int(name.removesuffix(".redo")) for name in disk.list_directory("journal") if name.endswith(".redo")
        )

    def check(self) -> None:
        """Flip some bits, each on a disk of its own."""
        kinds: list[Callable[[], None]] = [self._segment, self._record, self._checkpoint]
        for number in range(FLIPS):
            kinds[number % len(kinds)]()

    def _flipped(self, path: str, position: int) -> tuple[SimDisk, int]:
        """A disk of its own with one bit wrong; and the byte as it was."""
        disk = SimDisk(self.world.rng, image=self._image)
        file = disk.open(path)
        (byte,) = file.pread(1, position)
        file.close()
        disk.damage(path, position, bytes([byte ^ (1 << self.world.rng.randrange(8))]))
        self.world.trace("bit flip", path, position)
        return disk, byte

    def _segment(self) -> None:
        if not self._segments:
            return
        path, size = self.world.rng.choice(self._segments)
        position = self.world.rng.randrange(size)
        disk, byte = self._flipped(path, position)
        if not verify_log(disk).findings:
            raise Violation(f"P10: a flipped bit in {path} at {position} is not found")
        node = Node(disk, self._settings, clock=self.world.clock)
        try:
            found = _contents(node)
        except TxmqError:
            self.world.meet("bit flip refused to a reader")
            return
        file = disk.open(path)
        is_right = file.pread(1, position) == bytes([byte])
        file.close()
        if found != self._expected or not is_right:
            raise Violation(f"P10: a flipped bit in {path} at {position} is served")
        self.world.meet("bit flip written over by redo")

    def _record(self) -> None:
        start = max(self._checkpoints, default=FILE_HEADER_SIZE)
        if start == self._end_lsn:
            return  # the newest checkpoint holds everything
        lsn = self.world.rng.randrange(start, self._end_lsn)
        base = max(base for base in self._journal if base <= lsn)
        if self._reopened(self._flipped(file_path(base), lsn - base)[0]):
            self.world.meet("bit flip in the journal without effect")
        else:
            self.world.meet("bit flip refused")

    def _checkpoint(self) -> None:
        if not self._checkpoints:
            return
        path = checkpoint.path_of(self._checkpoints[-1])
        file = SimDisk(image=self._image).open(path)
        position = self.world.rng.randrange(file.size())
        file.close()
        if self._reopened(self._flipped(path, position)[0]):
            self.world.meet("checkpoint fell back")
        elif len(self._checkpoints) > 1:
            raise Violation(f"P10: {path} is damaged, and the checkpoint before it is of no use")

    def _reopened(self, disk: SimDisk) -> bool:
        """Open; False where that is refused. Whatever opens must be what it was."""
        try:
            node = Node(disk, self._settings, clock=self.world.clock)
        except TxmqError as error:
            self.world.trace("refused", type(error).__name__)
            return False
        if _state(node.state) != self._state:
            raise Violation("P10: a flipped bit changed the state")
        if _contents(node) != self._expected:
            raise Violation("P10: a flipped bit changed the messages")
        return True


def _state(state: State) -> object:
    """Without the epoch, which each start raises."""
    return comparable(state)


def _contents(node: Node) -> dict[TopicPartition, list[tuple[int, bytes | None]]]:
    return {
        (partition.topic, partition.number): [(m.offset, m.value) for m in node.messages(partition)]
        for partition in node.state.all_partitions()
    }
