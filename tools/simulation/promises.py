"""What must hold of one broker, or several, that have come to rest: see ``run``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import NamedTuple

from tools.images.node import Node
from txmq.broker.state.transaction import TransactionState
from txmq.log.verify import verify_log
from txmq.model import TopicPartition
from txmq.protocol.transaction_bodies import parse_result_lines

from .client import RETAINED
from .consumers import OWN, Dealt, check_dealt
from .drivers import Written, check_batches
from .history import History, Put, Shared, Transaction
from .members import Consumption, check_groups
from .ordered import SPOOLED
from .world import Violation

Visible = dict[bytes, tuple[TopicPartition, int]]


class Told(NamedTuple):
    """What members and drivers were told."""

    consumption: Consumption
    written: Written
    dealt: Dealt


def check_promises(shared: Shared, told: Told) -> Visible:
    """What must hold at the end; the messages that readers see."""
    for node in shared.nodes():
        check_settled(node)
        node.compare_follower()
    assert shared.bank is not None
    shared.bank.check()
    visible = visible_messages(shared.nodes(), shared.history)
    _check_all(shared, visible)
    check_groups(shared, told.consumption, visible)
    check_batches(shared, told.written, visible)
    check_dealt(shared, told.dealt)
    return visible


def check_settled(node: Node, lost: Collection[str] = ()) -> None:
    """P5: nothing is in doubt. P3: nobody decided alone, but for what a restored broker was told that it has lost."""
    unsettled = (TransactionState.PREPARED, TransactionState.PLACING)
    in_doubt = [number for number, t in node.state.transactions.items() if t.state in unsettled]
    if in_doubt:
        raise Violation(f"P5: in doubt after healing: {sorted(in_doubt)}")
    if node.state.decisions.incomplete:
        raise Violation(f"P5: not completed after healing: {sorted(node.state.decisions.incomplete)}")
    alone = [name for name in node.state.decisions.heuristics if node.txid(*name) not in lost]
    if alone:
        raise Violation(f"P3: nobody decided alone: {sorted(alone)}")


def _check_all(shared: Shared, visible: Visible) -> None:
    history, nodes = shared.history, shared.nodes()
    weak = shared.may_forget
    log_starts = {(p.topic, p.number): p.log_start for node in nodes for p in node.state.all_partitions()}
    for put in history.puts:
        if put.place[0] == RETAINED and isinstance(put.told, int) and put.told < log_starts[put.place]:
            continue
        _check_put(put, visible, history, weak)
    for one in history.transactions.values():
        check_transaction(one, visible, shared, weak and not one.row)
    for (topic, partition, offset), value in history.seen.items():
        if visible.get(value) != ((f"t{topic}", partition), offset):
            raise Violation(f"P1: {value[:12]!r} was read and is gone")
    check_order(history, visible)
    for node in nodes:
        if not (verdict := verify_log(node.disk)).is_sound:
            raise Violation(f"P10: {verdict.findings}")


def visible_messages(nodes: Sequence[Node], history: History) -> Visible:
    """Each message's place."""
    found: Visible = {}
    known = {v for put in history.puts for v in put.values}
    known |= {v for t in history.transactions.values() for _, values in t.parts for v in values}
    for node, partition in [(one, partition) for one in nodes for partition in one.state.all_partitions()]:
        if partition.topic.startswith(OWN):
            continue
        messages = node.messages(partition)
        if len(messages) != partition.high_watermark - partition.log_start:
            raise Violation(f"P2: a hole in {partition.topic}-{partition.number}")
        for message in messages:
            value = message.value or b""
            if value in found:
                raise Violation(f"P6: {value[:12]!r} twice: {found[value]}, {partition.number} {message.offset}")
            if value not in known:
                raise Violation(f"P10: {value[:12]!r} was never sent")
            found[value] = (partition.topic, partition.number), message.offset
    return found


def _stands(values: tuple[bytes, ...], place: TopicPartition, base: int, visible: Visible) -> bool:
    return all(visible.get(value) == (place, base + n) for n, value in enumerate(values))


def _check_put(put: Put, visible: Visible, history: History, weak: bool) -> None:
    if put.place[0] in history.deleted:
        return
    there = [value for value in put.values if value in visible]
    if there and len(there) != len(put.values):
        raise Violation(f"P2: a part of {put}")
    if put.told == "not stored" and there:
        raise Violation(f"P6: told not stored: {put}")
    if put.told == SPOOLED and not weak and not there:
        raise Violation(f"P6: spooled, drained and not there: {put.place} {put.values[0][:12]!r}")
    if isinstance(put.told, int) and not weak and not _stands(put.values, put.place, put.told, visible):
        raise Violation(f"P1: acknowledged and not there: {put.place} {put.told} {put.values[0][:12]!r}")


def check_transaction(transaction: Transaction, visible: Visible, shared: Shared, weak: bool) -> None:
    """P1, P2, P3 and P6 of one transaction; ``weak`` if the broker may have lost it."""
    parts = [(place, values) for place, values in transaction.parts if place[0] not in shared.history.deleted]
    there = {value in visible for _, values in parts for value in values}
    name = f"{transaction.txid[34:]} told {transaction.told}"
    if len(there) > 1:
        raise Violation(f"P2: a part of {name}")
    if there and transaction.row and shared.has_row(transaction.row) not in there:
        raise Violation(f"P3: row and messages differ: {name}, messages {there}")
    if there == {False} and transaction.told == "committed" and not weak:
        raise Violation(f"P1: {name} and not there")
    if there == {True} and transaction.told == "rolled-back":
        raise Violation(f"P6: {name} and there")
    if there == {True}:
        _check_places(transaction, visible, shared, name, weak)


def _check_places(transaction: Transaction, visible: Visible, shared: Shared, name: str, weak: bool) -> None:
    runs: dict[TopicPartition, list[int]] = defaultdict(list)
    for place, values in transaction.parts:
        if place[0] not in shared.history.deleted:
            runs[place] += [visible[value][1] for value in values]
    for place, offsets in runs.items():
        if offsets != list(range(offsets[0], offsets[0] + len(offsets))):
            raise Violation(f"P2: {name} is not contiguous in {place}: {offsets}")
    for value, told in transaction.placed.items():
        if not weak and told[0][0] not in shared.history.deleted and visible[value] != told:
            raise Violation(f"P1: {name}: {value[:12]!r} is at {visible[value]}, told {told}")
    # What a deleted topic had is told as deleted-<id>, or not at all.
    lines = [line for line in parse_result_lines(transaction.lines) if line.topic in shared.history.topics]
    parts = [part for part in transaction.parts if part[0][0] not in shared.history.deleted]
    for line, (place, values) in zip([] if weak else lines, parts, strict=False):
        if line.base_offset is not None and not _stands(values, place, line.base_offset, visible):
            raise Violation(f"P1: {name} is not at {line}")


def check_order(history: History, visible: Visible) -> None:
    """P7 of what is there."""
    last: dict[tuple[TopicPartition, object], int] = {}
    for put in history.puts:
        if put.values[0] in visible and put.place[0] not in history.deleted:
            _in_order(last, put.place, put.values[0].partition(b"-")[0], visible[put.values[0]][1])
    rows = [t for t in history.transactions.values() if t.row]
    for transaction in sorted(rows, key=lambda t: (t.key, t.version)):
        for place, values in transaction.parts:
            if values[0] in visible and place[0] not in history.deleted:
                _in_order(last, place, transaction.key, visible[values[0]][1])


def _in_order(last: dict[tuple[TopicPartition, object], int], place: TopicPartition, who: object, offset: int) -> None:
    if offset <= last.get((place, who), -1):
        raise Violation(f"P7: {who!r} in {place}: {offset} after {last[place, who]}")
    last[place, who] = offset
