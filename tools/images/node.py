"""One life of a broker on a simulated disk: core and store, driven by bytes, one step at a time.

``Node`` runs the steps of the commit pipeline one after the other, without sockets, threads and timers: a test says
when requests are committed, a checkpoint taken, an old segment retired. Every answer that is handed to a client is
noted on the disk, so that a crash image knows what had been told by then:
``("told", opaque, code, body)``, and ``("forced",)`` after each sync.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tools.images.follower import Follower, encoded
from tools.simulated.clock import SimClock, SimRandom
from tools.simulated.disk import SimDisk
from txmq.broker.cluster.cluster_view import ClusterView
from txmq.broker.commit.data_directory import Joins, PendingCheckpoint, Recovered, Store, open_store
from txmq.broker.commit.journal_schedule import WAIT_S
from txmq.broker.commit.pipeline import APPLY_RETRY_S, CommitPipeline
from txmq.broker.commit.retention import retire
from txmq.broker.commit.steps import Apply, Checkpoint, JournalStep, Part, Step
from txmq.broker.context import Context
from txmq.broker.core import Core
from txmq.broker.state.state import State
from txmq.broker.verbs import follow as follow_verb
from txmq.config import BrokerSettings
from txmq.errors import StorageError
from txmq.log import records
from txmq.log.partition import Partition
from txmq.model import Message
from txmq.protocol import requests
from txmq.protocol.answers import AnswerReader, encode_all
from txmq.protocol.requests import ByteBudget, Limits, Request, RequestReader, Violation
from txmq.redo import checkpoint
from txmq.redo.journal_reader import JournalReader
from txmq.registry.cluster_metadata import NO_ACCESS, Access, HomeEntry, TopicMap
from txmq.xid import TxId

JOURNAL_FILE_SIZE_BYTES = 16 << 10  # a few groups a file: every workload crosses files
STEPS_MAX = 100_000
IDENTITY_SEED = 1  # the same cluster and node wherever a data directory is begun


def small_settings(**changes: object) -> BrokerSettings:
    """Settings of a broker that is small in everything; ``journal_file_size_bytes`` is below what users may set."""
    values: dict[str, object] = {
        "disk_free_bytes_min": 0, "in_flight_max": 64, "group_size_bytes_max": 64 << 10,
        "request_size_bytes_max": 64 << 10, "batch_size_bytes_max": 64 << 10, "broker_name": "small",
    }  # fmt: skip
    settings = BrokerSettings(**{**values, **changes})  # type: ignore[arg-type]
    object.__setattr__(settings, "journal_file_size_bytes", JOURNAL_FILE_SIZE_BYTES)
    return settings


SMALL = small_settings()


class Answer(NamedTuple):
    """What came back."""

    code: int
    body: bytes

    @property
    def text(self) -> str:
        """The body of a ``result``."""
        return self.body.decode()

    @property
    def error(self) -> str:
        """The error's name; empty for 200."""
        return "" if self.code == 200 else self.text.split(" ", 1)[0]


class Client:
    """One connection to a node."""

    def __init__(self, node: Served) -> None:
        self.node = node
        self.client = node.core.connected("test")
        self.client.shell = self
        limits = Limits(node.settings.request_size_bytes_max, node.settings.batch_size_bytes_max)
        self._requests = RequestReader(limits, ByteBudget(1 << 30))
        self._reader = AnswerReader()
        self._next = 0
        self._queued: list[Request | Violation] = []  # read, and not taken in yet
        self.received: dict[bytes, Answer] = {}

    def send(
        self, verb: str, *arguments: str | int, extensions: Mapping[str, str | int | None] | None = None,
        body: bytes | bytearray | None = None, opaque: bytes = b"",
    ) -> bytes:  # fmt: skip
        """Send one request; the node takes it in and commits nothing yet. Returns its opaque."""
        if not opaque:
            self._next += 1
            opaque = b"q%d" % self._next
        buffers = requests.request(
            verb, *arguments, extensions=extensions, body=None if body is None else [body], opaque=opaque
        )
        self.send_bytes(b"".join(buffers))
        return opaque

    def send_bytes(self, data: bytes) -> None:
        """Send anything."""
        self._queued += self._requests.feed(data)
        self.take_in()

    def take_in(self) -> None:
        """Have the core take in what was sent, up to a request that waits for the registry."""
        self.node.context.now_ms = self.node.clock.now_ms()
        while self._queued and self.client.waiting is None:
            taken = self.node.core.receive_some(self.client, self._queued, 0)
            del self._queued[:taken]

    def ask(
        self, verb: str, *arguments: str | int, extensions: Mapping[str, str | int | None] | None = None,
        body: bytes | bytearray | None = None,
    ) -> Answer:  # fmt: skip
        """Send one request, let the node do all it has to, return the answer."""
        opaque = self.send(verb, *arguments, extensions=extensions, body=body)
        self.node.pump()
        return self.received.pop(opaque)

    def hello(self, session: str = "new") -> Answer:
        """Introduce this client; a session to be resumed may be named without its secret."""
        return self.ask("hello", 1, "tester", extensions={"session": self.node.wish(session)})

    def disconnect(self) -> None:
        """The connection is lost."""
        self.node.core.disconnected(self.client)

    def take(self) -> None:
        """Read what the core wrote."""
        data, self.client.out = encode_all(self.client.out), []
        for code, opaque, body, is_value in self._reader.feed(data):
            assert is_value or not body or body.endswith(b"\n"), body
            self.received[opaque] = Answer(code, body)
            self.node.disk.note(("told", opaque, code, body))


class Served:
    """What serves clients: a core over a store. See the module's docstring."""

    disk: SimDisk
    settings: BrokerSettings
    clock: SimClock
    recovered: Recovered
    store: Store
    state: State
    core: Core

    @property
    def context(self) -> Context:
        """What its verbs share."""
        return self.core.context

    def connect(self) -> Client:
        """A new connection."""
        return Client(self)

    def session(self, name: str = "new") -> Client:
        """A new connection with a session."""
        client = self.connect()
        answer = client.hello(name)
        assert answer.code == 200, answer
        return client

    @property
    def newest_session(self) -> int:
        """The number that was issued last."""
        return max(self.state.sessions)

    def wish(self, session: str) -> str:
        """What ``hello`` takes for a session: with the secret that its client was told."""
        if session.count(".") != 1:
            return session
        known = self.state.sessions.get(int(session.partition(".")[0], 16))
        return f"{session}.{known.secret if known is not None else '0' * 32}"

    def txid(self, session: int, counter: int) -> str:
        """A transaction id of this home."""
        identity = self.recovered.identity
        return str(TxId(identity.cluster, identity.node, session, counter))

    def pump(self) -> None:
        """Do all that there is to do."""
        raise NotImplementedError

    def flush(self) -> None:
        """Carry out the effects."""
        while True:
            for read in self.core.take_reads():
                content = read.partition.read(self.store.files, read.offset, read.size_bytes_max)
                self.core.was_read(read, content or b"")
            for lookup in self.core.take_lookups():
                self.core.was_looked_up(lookup, lookup.partition.offset_for(self.store.files, lookup.time_ms))
            for client in self.core.take_resumed():
                if isinstance(client.shell, Client):
                    client.shell.take_in()
            self._feed_followers()
            ready = self.core.take_ready()
            if not ready:
                return
            for client in ready:
                if isinstance(client.shell, Client):
                    client.shell.take()

    def _feed_followers(self) -> None:
        """Where it has replicas."""


class Node(Served):
    """See the module's docstring."""

    def __init__(
        self, disk: SimDisk, settings: BrokerSettings = SMALL, *, clock: SimClock | None = None,
        is_member: bool = False, cluster: ClusterView | None = None, cluster_id: int | None = None,
        identity_seed: int = IDENTITY_SEED, is_home: bool = False,
    ) -> None:  # fmt: skip
        self.disk, self.settings = disk, settings
        self.clock = clock if clock is not None else SimClock()
        chance = SimRandom(random.Random(identity_seed))
        self.recovered: Recovered = open_store(
            disk,
            self.clock,
            chance,
            settings,
            is_member=is_member,
            joins=None if cluster_id is None else Joins(cluster_id),
        )
        self.store, self.state = self.recovered.store, self.recovered.state
        if is_member and cluster is None:  # a registry said so at once, and says nothing more
            self.recovered.lead(self.store.journal.epoch, self.clock.now_ms(), is_member=True)
        self._follower = Follower(disk.view(), self.recovered.identity.node, self.store.checkpoint_lsn)
        if is_home:
            self.state.order.queue_together()
        chance = SimRandom(random.Random(self.store.journal.epoch))
        now_ms = self.clock.now_ms()
        self.core = Core(self.recovered.identity, settings, self.state, now_ms, chance, cluster=cluster)
        self.pipeline = CommitPipeline(self.core, self.store, settings, self.clock)
        self._pending: PendingCheckpoint | None = None
        self._state_then = b""  # when that was taken
        self._held_kind: type[Step] | None = None
        self._held: tuple[Step, Part] | None = None  # a step that is under way, and its last part

    def lead(self, epoch: int, topic_map: TopicMap, homes: Sequence[HomeEntry], access: Access = NO_ACCESS) -> None:
        """The registry has said that this process leads the home."""
        self.recovered.lead(epoch, self.clock.now_ms(), is_member=True)
        self.core.led(topic_map, homes, access)

    def kill(self) -> SimDisk:
        """The process ends here; the disk as the next one finds it."""
        return self.disk.kill()

    # --- the path of a group ---

    def pump(self) -> None:
        """Commit everything accepted, as the server does at the end of an iteration of its loop."""
        self.context.now_ms = self.clock.now_ms()
        self.core.wake_memory()
        self.run_steps()
        while self.core.next_group() is not None and not self.pipeline.has_failed:
            self.clock.advance(WAIT_S)  # it waits for company
            self.run_steps()

    def run_steps(self, count_max: int = STEPS_MAX) -> None:
        """Every step of the pipeline that is due, and its effects; or the first ``count_max``."""
        for _ in range(count_max):
            step = self.next_step()
            if step is None:
                break
            if type(step) is self._held_kind:
                *parts, last = step.parts()
                for part in parts:
                    self.run_part(step, part)
                self._held = step, last
            elif self.run_part(step, step.run):
                self.step_done(step)
        self.flush()

    def want_checkpoint(self) -> None:
        """Take a checkpoint, which may have to wait for partition files."""
        self.pipeline.want_checkpoint()
        self.run_steps()
        self.force()

    def hold_apply(self) -> None:
        """From now on partition files are written only when ``let_go`` is called: a thread is at it."""
        self._held_kind = Apply

    def hold_checkpoint(self) -> None:
        """Take a checkpoint: its files are synced, and it is written only when ``let_go`` is called."""
        self._held_kind = Checkpoint
        self.checkpoint()

    def let_go(self) -> None:
        """End what is held."""
        held, self._held, self._held_kind = self._held, None, None
        assert held is not None, "nothing is held"
        step, last = held
        if self.run_part(step, last):
            self.step_done(step)
        self.run_steps()

    def next_step(self) -> Step | None:
        """The pipeline's. If it has taken a checkpoint, the state as of now is kept, to compare with."""
        step, pending = self.pipeline.next_step(self.clock.monotonic()), self.pipeline.checkpoint
        if pending is not self._pending:
            self._pending = pending
            self._state_then = b"" if pending is None else encoded(self.state)
        return step

    def run_part(self, step: Step, part: Callable[[], None]) -> bool:
        """Run a step, or a part of it; False if the step is given up."""
        try:
            part()
        except (OSError, StorageError) as error:
            if self.pipeline.failed(step, error, self.clock.monotonic()):
                raise
            return False
        return True

    def step_done(self, step: Step) -> None:
        """Release what it allows, and hand that out."""
        if isinstance(step, JournalStep) and step.syncs:
            self.disk.note(("forced",))
        if isinstance(step, Checkpoint):
            state = checkpoint.read(self.disk, self.store.checkpoint_lsn, node_id=None).state
            assert state == self._state_then, "P10: a checkpoint holds something else than the state when it was taken"
            self._follower.compare(self.store.checkpoint_lsn, bytes(state))
        self.pipeline.done(step, self.clock.monotonic())
        self.flush()

    def compare_follower(self) -> None:
        """Whoever folded all its records has its state; nothing is under way."""
        assert self.pipeline.is_idle, "a request is not in the journal"
        self._follower.compare(self.store.journal.next_lsn, encoded(self.state))

    def count_generations_anew(self) -> None:
        """As in the first life of a directory; this one has just begun."""
        self.state.saved.generation_floor = 0
        self._follower.anew_at = self.store.journal.next_lsn

    def force(self) -> None:
        """Sync what ``sync`` lets wait."""
        self.pipeline.want_sync()
        self.run_steps()

    def _feed_followers(self) -> None:
        """As ``replica_feeds``, at once."""
        followers, journal, reader = self.context.followers, self.store.journal, JournalReader(self.disk)
        waiting, followers.waiting = followers.waiting, []
        for follow in waiting:
            piece = reader.read(follow.lsn, journal.durable_lsn)
            if piece or self.context.now_ms >= follow.until_ms:
                follow_verb.answered(self.context, follow, journal.durable_lsn, piece)
            else:
                followers.waiting.append(follow)
        reader.close()

    # --- what the server does now and then ---

    def checkpoint(self) -> None:
        """Take a checkpoint; a full disk puts it off."""
        self.clock.advance(APPLY_RETRY_S)
        self.pipeline.want_checkpoint()
        self.run_steps()
        self.force()

    def retire(self) -> None:
        """Retention, as the server's timer does it."""
        retire(self.context.state, self.context.group_with_room, self.clock.now_ms())
        self.pump()

    def mark(self) -> None:
        """What an idle broker does."""
        self.pipeline.want_mark()
        self.run_steps()

    # --- looking inside ---

    def partition(self, topic: str, number: int = 0) -> Partition:
        """One partition."""
        return self.state.partitions[topic.encode(), b"%d" % number]

    def messages(self, partition: Partition) -> list[Message]:
        """Everything a reader can see of a partition, every CRC, place and offset checked on the way."""
        found: list[Message] = []
        offset = partition.log_start
        while offset < partition.high_watermark:
            batches = partition.read(self.store.files, offset, 1 << 20)
            found += records.decode(
                batches or b"", partition.topic, partition.number, topic_id=partition.topic_id, expected_offset=offset
            )
            assert found[-1].offset >= offset, "a read brought nothing"
            offset = found[-1].offset + 1
        assert offset == partition.high_watermark
        return found
