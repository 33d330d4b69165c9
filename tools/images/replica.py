"""A replica of a node, on a simulated disk of its own: the product's core, pipeline and receiver, driven by hand.

It reads the node's journal as the leader's shell does, in pieces of any size, and must come to the node's state, byte
for byte, with the same segment files and the same checkpoints.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

from tools.images.check import Player
from tools.images.follower import differences, encoded
from tools.images.node import IDENTITY_SEED, Node, Served
from tools.images.script import Script
from tools.simulated.clock import SimClock, SimRandom
from tools.simulated.disk import SimDisk
from tools.simulated.disk_model import Trace
from txmq.broker.cluster.cluster_view import ClusterView
from txmq.broker.commit.data_directory import Joins, open_store
from txmq.broker.commit.pipeline import CommitPipeline
from txmq.broker.commit.steps import Apply, Step
from txmq.broker.following_core import FollowingCore
from txmq.broker.replication.receiver import Receiver
from txmq.model import Lsn
from txmq.redo import checkpoint
from txmq.redo.journal import Journal
from txmq.redo.journal_files import list_bases
from txmq.redo.journal_reader import PIECE_SIZE_BYTES_MAX, JournalReader, Place
from txmq.redo.record_format import FILE_HEADER_SIZE, FileHeader, unpack_file_header


class Replica(Served):
    """See the module's docstring. Made again over the same disk, it goes on.

    Args:
        applies_late: partition files are written when everything else is done: a thread is at it.
    """

    def __init__(
        self, disk: SimDisk, leader: Node, *, applies_late: bool = False, clock: SimClock | None = None
    ) -> None:  # fmt: skip
        self._applies_late, self._late = applies_late, list[Step]()
        self.disk, self.settings, self.clock = disk, leader.settings, clock or SimClock()
        identity = leader.recovered.identity
        first: FileHeader | None = None
        if not list_bases(disk):
            first = unpack_file_header(_reader(leader).read(0, leader.store.journal.durable_lsn, FILE_HEADER_SIZE))
        chance = SimRandom(random.Random(IDENTITY_SEED + 1))
        joins = Joins(identity.cluster, identity.node, first)
        recovered = open_store(disk, self.clock, chance, leader.settings, joins=joins)
        self.store, self.state = recovered.store, recovered.state
        self.recovered = recovered
        self.core: FollowingCore = FollowingCore(
            recovered.identity, leader.settings, self.state, self.clock.now_ms(), chance, ClusterView()
        )
        self.pipeline = CommitPipeline(self.core, self.store, leader.settings, self.clock)
        journal = self.store.journal
        self._receiver = Receiver(journal, max(journal.found.highest_epoch, self.state.epoch))

    def is_copy_of(self, leader: Node) -> bool:
        """Ask the leader; what it sends next begins after the last whole record."""
        journal = leader.store.journal
        self._receiver.begin_anew()
        place = Place(self._receiver.next_lsn, self._receiver.chain)
        return _reader(leader).follows(place, Place(journal.next_lsn, journal.chain))

    @staticmethod
    def sent_below(journal: Journal) -> int:
        """What is sent of the leader's journal."""
        return journal.durable_lsn

    def receive(self, leader: Node, piece_size_bytes: int) -> bool:
        """Take one piece in, if there is one."""
        end_lsn = self.sent_below(leader.store.journal)
        piece = _reader(leader).read(self._receiver.next_lsn, end_lsn, piece_size_bytes)
        self.core.heard(self.clock.now_ms(), leader.store.journal.durable_lsn)
        for group in self._receiver.take(piece):
            self.core.received(group)
        return bool(piece)

    def follow(self, leader: Node, piece_size_bytes: int = PIECE_SIZE_BYTES_MAX) -> None:
        """Take in, force, fold and apply all that is forced at the leader."""
        assert self.is_copy_of(leader), "it is no copy any more"
        while self.receive(leader, piece_size_bytes):
            self.run_steps()
        self.run_steps()
        while self._late:
            self._run(self._late.pop())
            self.run_steps()

    def pump(self) -> None:
        """All that is due."""
        self.context.now_ms = self.clock.now_ms()
        self.run_steps()
        self.flush()

    def run_steps(self) -> None:
        """Every step of the pipeline that is due."""
        while (step := self.pipeline.next_step(self.clock.monotonic())) is not None:
            if self._applies_late and isinstance(step, Apply):
                self._late.append(step)
            else:
                self._run(step)

    def _run(self, step: Step) -> None:
        step.run()
        self.pipeline.done(step, self.clock.monotonic())

    def compare(self, leader: Node) -> None:
        """It has what its leader has."""
        found, wanted = _plain(encoded(self.state)), _plain(encoded(leader.state))
        assert found == wanted, f"P10: the replica has another state than its leader: {differences(found, wanted)[:5]}"
        own, others = dict(_segments(self.disk)), dict(_segments(leader.disk))
        assert own.keys() == others.keys(), f"P10: other segments: {own.keys() ^ others.keys()}"
        for path, content in own.items():
            assert content == others[path], f"P10: {path} has {len(content)} bytes, and {len(others[path])}, or others"
        for partition in leader.state.all_partitions():
            copied = self.state.partition(partition.topic_id, partition.number)
            assert copied is not None
            assert copied.high_watermark == partition.high_watermark, f"P4: readers see more, or less, of {partition}"
        for lsn in {*checkpoint.list_lsns(self.disk)} & {*checkpoint.list_lsns(leader.disk)}:
            first, second = (checkpoint.read(disk, lsn, node_id=None) for disk in (self.disk, leader.disk))
            assert first.chain == second.chain, f"P10: other records before lsn {lsn}"
            assert _plain(first.state) == _plain(second.state), f"P10: another checkpoint at lsn {lsn}"


class FollowedPlayer(Player):
    """Plays a script beside a replica, which follows after each life's begin, and when told to."""

    def __init__(
        self, script: Script, disk: SimDisk, copy: SimDisk, *, piece_size_bytes: int, applies_late: bool
    ) -> None:  # fmt: skip
        super().__init__(script, disk)
        self._copy, self._piece_size_bytes, self._applies_late = copy, piece_size_bytes, applies_late
        self.replica: Replica | None = None

    def start(self, disk: SimDisk) -> None:
        """A new life; the journal is kept from its beginning on."""
        super().start(disk)
        self.node.store.kept_from = Lsn(0)
        if self.replica is None:
            self.replica = Replica(self._copy, self.node, applies_late=self._applies_late)
        self.follow()

    def follow(self) -> None:
        """The replica takes in what there is."""
        assert self.replica is not None
        self.node.force()
        self.replica.follow(self.node, self._piece_size_bytes)


def record_replica(script: Script, *, piece_size_bytes: int, applies_late: bool = False) -> tuple[Trace, Node]:
    """Play a script beside a replica; what that did to its disk, and the leader at the end."""
    copy = SimDisk(record=True)
    assert copy.trace is not None
    player = FollowedPlayer(script, SimDisk(), copy, piece_size_bytes=piece_size_bytes, applies_late=applies_late)
    player.run()
    player.node.pump()
    player.follow()
    assert player.replica is not None
    player.replica.compare(player.node)
    return copy.trace, player.node


def _plain(state: bytes | bytearray) -> dict[str, Any]:
    """What a checkpoint holds, without what scripts change in no record (``Node.count_generations_anew``)."""
    plain: dict[str, Any] = json.loads(state)
    del plain["generation_floor"]
    return plain


def _reader(leader: Node) -> JournalReader:
    return JournalReader(leader.disk)


def _segments(disk: SimDisk) -> Iterator[tuple[str, bytes]]:
    for topic in disk.list_directory("log"):
        for partition in disk.list_directory(f"log/{topic}"):
            for name in disk.list_directory(f"log/{topic}/{partition}"):
                path = f"log/{topic}/{partition}/{name}"
                file = disk.open(path, writable=False)
                yield path, file.pread(file.size(), 0)
                file.close()
