"""The verbs that read: ``get`` (with long poll), ``offset``, ``meta``.

Readers see only what is below the high watermark, which moves when the journal record is durable and applied. An answer
to a put comes before that, if a thread writes to the partition files. A read at the watermark waits for those groups
(``Context.unapplied``), so that it finds every message that was acknowledged before.

The core decides *what* is read; the bytes come from the shell (``Context.reads``), because disks may block.
"""

from __future__ import annotations

import json

from txmq.broker.client_connection import ClientConnection
from txmq.broker.context import Context, Lookup, Read
from txmq.broker.verbs.access.audit_log import refusal_of
from txmq.broker.verbs.access.authorizer import READ, TOPIC, require_seen, sees
from txmq.broker.verbs.partition_lookup import homes_fields, measured, readable
from txmq.errors import BadRequestError, BrokerError, OffsetOutOfRangeError, StaleLogError, UnknownTopicError
from txmq.log.partition import Partition
from txmq.protocol.answers import Records, Reply
from txmq.protocol.requests import Request

READ_SIZE_BYTES_MAX = 1 << 20  # per answer: a longer one would hold the loop for over a millisecond
POLL_WAIT_MS_MAX = 30_000


class Poll:
    """A ``get`` that waits for something to appear at its offset, or for its time to run out."""

    __slots__ = ("client", "deadline_ms", "done", "offset", "opaque", "size_bytes_max")

    def __init__(
        self, client: ClientConnection, opaque: bytes, offset: int, size_bytes_max: int, deadline_ms: int
    ) -> None:
        self.client, self.opaque, self.offset = client, opaque, offset
        self.size_bytes_max, self.deadline_ms, self.done = size_bytes_max, deadline_ms, False


def get(context: Context, client: ClientConnection, request: Request) -> None:
    """Read whole batches, the first of which holds the offset."""
    arguments = request[1]
    partition = readable(context, client, arguments[0], arguments[1])
    context.counters.get_requests += 1
    if int(arguments[2]) < partition.high_watermark or not _waits(context, partition, client, request):
        _get_now(context, client, request, partition)


def _get_now(context: Context, client: ClientConnection, request: Request, partition: Partition) -> None:
    _, arguments, extensions, _body, opaque = request
    offset, size = int(arguments[2]), min(int(arguments[3]), READ_SIZE_BYTES_MAX)
    if extensions and extensions.get(b"log", partition.log) != partition.log:
        raise StaleLogError(f"the log of {partition.topic}-{partition.number} is {partition.log.decode()} now")
    is_ahead = context.leads_never and offset > partition.high_watermark  # the leader has it, and it comes
    if not (is_ahead or partition.log_start <= offset <= partition.high_watermark):
        raise OffsetOutOfRangeError(
            f"offset {offset} of {partition.topic}-{partition.number} is outside "
            f"[{partition.log_start}, {partition.high_watermark}]"
        )
    if offset < partition.high_watermark:
        context.reads.append(Read(client, opaque, partition, offset, size))
        return
    wait_ms = min(int(extensions.get(b"wait", b"0")), POLL_WAIT_MS_MAX) if extensions else 0
    if wait_ms == 0 or context.stopping:
        answer_empty(context, client, opaque)
        return
    if partition.waiters is None:
        partition.waiters = []
    poll = Poll(client, opaque, offset, size, context.now_ms + wait_ms)
    partition.waiters.append(poll)
    if context.answers_before_sync and partition.next_offset > offset and context.undurable:
        context.undurable[-1].is_awaited = True
    context.waiting_polls.add(poll.deadline_ms, (partition, poll))


def was_read(context: Context, read: Read, data: bytes) -> None:
    """A read was carried out. It may have waited: a user who may not read any more is refused."""
    context.counters.get_bytes += len(data)
    client = read.client
    reply: Reply = Records(data)
    if client.permissions is not None:
        reply = refusal_of(context, client, b"get", READ, TOPIC, read.partition.topic) or reply
    context.answer(client, read.opaque, reply)


def answer_empty(context: Context, client: ClientConnection, opaque: bytes) -> None:
    """Nothing new."""
    context.counters.get_empty += 1
    context.answer(client, opaque, Records(b""))


def wake_polls(context: Context, partition: Partition) -> None:
    """The high watermark moved: polls that waited for it become reads."""
    waiters, partition.waiters = partition.waiters, None
    for poll in waiters or ():
        if not poll.done and not poll.client.gone:
            poll.done = True
            if not partition.config.accept_read:
                answer_empty(context, poll.client, poll.opaque)  # closed meanwhile: the next get is refused
                continue
            context.reads.append(Read(poll.client, poll.opaque, partition, poll.offset, poll.size_bytes_max))


def refuse_polls(context: Context, partition: Partition) -> None:
    """The partition was deleted: its polls are refused as a ``get`` is from now on."""
    waiters, partition.waiters = partition.waiters, None
    for poll in waiters or ():
        if poll.done or poll.client.gone:
            continue
        poll.done = True
        error: BrokerError = UnknownTopicError(f"topic {partition.topic!r} was deleted; another one has its name")
        try:
            readable(context, poll.client, partition.topic.encode(), b"%d" % partition.number)
        except BrokerError as refusal:
            error = refusal.with_traceback(None)
        context.counters.errors += 1
        context.answer_from_state(poll.client, poll.opaque, error)


def expire_polls(context: Context) -> None:
    """Answer polls whose time is over with nothing."""
    waiting = context.waiting_polls
    over: dict[Partition, None] = {}
    for partition, poll in waiting.take_all() if context.stopping else waiting.take_due(context.now_ms):
        poll.done = True
        over[partition] = None
        if not poll.client.gone:
            answer_empty(context, poll.client, poll.opaque)
    for partition in over:
        partition.waiters = [waiter for waiter in partition.waiters or () if not waiter.done] or None


def offset(context: Context, client: ClientConnection, request: Request) -> None:
    """Tell start, end, and the offset of ``earliest``, ``latest`` or a time."""
    partition = measured(context, client, request[1][0], request[1][1])
    if not _waits(context, partition, client, request):
        _offset_now(context, client, request, partition)


def _offset_now(context: Context, client: ClientConnection, request: Request, partition: Partition) -> None:
    _, arguments, extensions, _body, opaque = request
    if arguments[2] in (b"earliest", b"latest"):
        found = partition.log_start if arguments[2] == b"earliest" else partition.high_watermark
        history = b" " + partition.history.text.encode() if extensions and b"log" in extensions else b""
        context.answer(client, opaque, _ends_with(partition, found) + history)
    elif arguments[2].isdigit():
        context.lookups.append(Lookup(client, opaque, partition, int(arguments[2])))
    else:
        raise BadRequestError("the third argument is earliest, latest or a time in ms")


def was_looked_up(context: Context, lookup: Lookup, offset: int) -> None:
    """A lookup by time was carried out: answer."""
    context.answer(lookup.client, lookup.opaque, _ends_with(lookup.partition, offset))


def _ends_with(partition: Partition, found: int) -> bytes:
    return b"%d %d %d" % (found, partition.log_start, partition.high_watermark)


def _waits(context: Context, partition: Partition, client: ClientConnection, request: Request) -> bool:
    """Whether messages of the partition are acknowledged, and not in its files yet: the read waits for them."""
    group = context.unapplied.get(partition)
    if group is None:
        return False
    group.waiting_reads.append((client, request))
    return True


def read_waited(context: Context, client: ClientConnection, request: Request) -> None:
    """Carry out a read that has waited for its group; not once more: under load there is always another one."""
    find, carry_out = (readable, _get_now) if request[0] == b"get" else (measured, _offset_now)
    carry_out(context, client, request, find(context, client, request[1][0], request[1][1]))


def meta(context: Context, client: ClientConnection, request: Request) -> None:
    """Describe one topic, or all."""
    _, arguments, _extensions, _body, opaque = request
    topics = context.state.topics
    if arguments[0] == b"*":
        chosen = [topic for topic in topics if sees(context, client, TOPIC, topic.config.name)]
    else:
        require_seen(context, client, TOPIC, arguments[0])
        chosen = [topics.named(arguments[0].decode("ascii", "replace"))]
    fields: dict[str, object] = {"topics": [context.state.topic_fields(topic) for topic in chosen]}
    if context.cluster is not None:
        fields |= {**homes_fields(context), "map_version": context.cluster.map_version}
    context.answer_from_state(client, opaque, json.dumps(fields).encode())
