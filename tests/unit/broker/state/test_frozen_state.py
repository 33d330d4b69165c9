"""A checkpoint is the state of one moment, whatever happens while it is written; nothing keeps the loop for long."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator

from tools.images.follower import encoded
from tools.images.requests import batch
from tools.simulated.disk import SimDisk
from txmq.broker.commit.prepared_payloads import PayloadFiles
from txmq.broker.commit.redo import restore
from txmq.broker.state.frozen_state import PIECE_SIZE
from txmq.broker.state.session import BrokerSession
from txmq.broker.state.state import Limits, State
from txmq.broker.state.transaction import PreparedPart, Transaction
from txmq.log.memory_partition import MemoryPartition
from txmq.model import Lsn, Storage, TopicConfig
from txmq.redo import entries
from txmq.redo.checkpoint import Checkpoint
from txmq.registry.topics import Topic

MANY, OUTCOMES = 10_000, 20
FREEZE_S_MAX = 0.1  # it takes 4 ms; the rows, formatted, took 300 ms
TEXT_SIZE_MAX = 64 << 10
# What a broker wrote of ``small_state`` when it formatted and encoded all of it at once.
WRITTEN_AT_ONCE = (
    '{"next_topic_id":3,"next_session":3,"next_order":2,"epoch":0,"in_flight_max":2,"outcomes_kept":2,"life":"0000000000000000","topics":[{"t'
    'opic_id":1,"name":"disk","partitions":3,"storage":"disk","retention_ms":null,"retention_size_bytes":'
    'null,"retention_policy":"delete","segment_size_bytes":134217728,"segment_age_ms":604800000,"accept_p'
    'ublish":true,"accept_read":true},{"topic_id":2,"name":"mem","partitions":1,"storage":"memory","reten'
    'tion_ms":null,"retention_size_bytes":null,"retention_policy":"delete","segment_size_bytes":134217728'
    ',"segment_age_ms":604800000,"accept_publish":true,"accept_read":true}],"partitions":[[1,0,[0,6,[["00'
    '00000000000000",0]],[[0,9000,7,9],[6,0,-1,11]]],[[1,3,[[1,1,77],[2,2,77]]]]],[1,1,[0,1,[["0000000000'
    '000000",0]],[[0,10,-1,9]]],[]],[2,0,[1099511627776,1099511627776,[],[]],[]]],"sessions":[[1,1,"cl\\u00'
    'e4ent",5,2,2,[[3,[[1,0,3,1],[1,1,0,1]]],[9,null]],"abababababababababababababababab"],[2,1,"cl\\u00e'
    '4ent",5,0,0,[[3,[[1,0,6,1]]]],"abababababababababababababababab"]],"issued_sessions":[[1,2]],"transactions":[[2,1,0,"open",{},'
    '0,1,3894639090],[2,2,8,"prepared",{"kind":"last-resource","resource":"db","uuid":"0000000000000000'
    '0000000000000000","prepared_ms":8,"keys":[[1,2]],"offsets":[["g",[[1,0,4,null]]]]},1,1,2520715069]'
    '],"decisions":{"undone":[[2,3,{"decided_ms":3,"branches":[{"resource":"r","uuid":"u1","complete":tru'
    'e,"heuristic":"committed"},{"resource":"q","uuid":"u2","complete":false,"heuristic":null}]},[[1,0,6,'
    '1]]]],"holds":[[2,3,false,[[1,0,6,0,9000],[1,1,1,0,10]]]],"heuristics":[[2,3,[{"what":"committed","w'
    'hy":"\\u00fc"}]]]},"groups":[["g",[[1,0,3,"text",12],[1,1,4,null,12]],[[1,0,2]]]],"generation_floor"'
    ':0,"queries":{"last_epoch":4,"named":[["q",4,5,[],[],0]]}}'
)


def small_state() -> State:
    """Something of everything."""
    state = State(Limits(2, 2))
    state.put_topic(Topic(1, TopicConfig("disk", partitions=3)))
    state.put_topic(Topic(2, TopicConfig("mem", storage=Storage.MEMORY)))
    for number in (1, 2):
        state.put_session(BrokerSession(number, 1, "cl\u00e4ent", 5, "ab" * 16))
    one, two, _ = state.partitions_of[1].values()
    for n in range(3):
        one.place(2, 3000, 7, 9)
        state.accept_sequence(one, 1, n, 1, 77, n)
    one._roll(11)
    two.place(1, 10, -1, 9)
    state.accept_sequence(two, 9, 0, 1, 77, 0)
    in_memory = state.partitions_of[2][0]
    assert isinstance(in_memory, MemoryPartition)
    in_memory.began(1)
    in_memory.append(bytearray(batch(b"x")), 1, 7, 0)
    for counter in (1, 2, 3):
        state.settle(1, counter, counter - 1, ((1, 0, counter, 1), (1, 1, 0, 1)))
    state.settle(1, 9, 0, None)
    state.add_part(2, 1, PreparedPart(1, 0, bytearray(batch(b"y")), 1, 7), 6)
    meta = {"kind": "last-resource", "resource": "db", "uuid": "0" * 32, "prepared_ms": 8, "keys": [[1, 2]]}
    state.add_part(2, 2, PreparedPart(1, 0, bytearray(batch(b"z")), 1, 7), 6)
    state.prepare(2, 2, {**meta, "offsets": [["g", [[1, 0, 4, None]]]]})
    branches = [{"resource": "r", "uuid": "u1"}, {"resource": "q", "uuid": "u2"}]
    state.decide(
        2, 3, 0, ((1, 0, 6, 1),), {"decided_ms": 3, "branches": branches}, {one: (6, 0, 9000), two: (1, 0, 10)}
    )
    state.complete((2, 3), "u1", {"what": "committed", "why": "\u00fc"})
    state.saved.save("g", [[1, 0, 3, "text"], [1, 1, 4, None]], 12)
    state.saved.hand_over("g", [[1, 0, 2]], {})
    state.saved.delete("other")
    state.queries.open("q", 4, 5)
    return state


class Payloads(PayloadFiles):
    """What is in ``prepared/`` of ``small_state``."""

    def read(self, transactions: Iterable[Transaction]) -> Iterator[tuple[Transaction, entries.Payload]]:
        for transaction in transactions:
            known = small_state().transactions[transaction.name]
            for number, each in enumerate(known.parts):
                place = (*known.name, number, each.topic_id, each.partition)
                yield transaction, entries.Payload(*place, each.count, each.max_timestamp_ms, each.batch)


def wide_state() -> State:
    """Many sessions, and as many partitions that they write to."""
    state = State(Limits())
    for topic_id in range(1, 11):
        state.put_topic(Topic(topic_id, TopicConfig(f"t{topic_id}", partitions=MANY // 10)))
    for number, partition in enumerate(state.all_partitions(), 1):
        state.put_session(BrokerSession(number, 1, "client", 5, "ab" * 16))
        partition.place(1, 100, 7, 9)
        state.accept_sequence(partition, number, 0, 1, 77, 0)
        for counter in range(OUTCOMES):
            state.settle(number, counter, 0, ((partition.topic_id, partition.number, counter, 1),))
    return state


def _change_everything(state: State) -> None:
    one, two, _ = state.partitions_of[1].values()
    for session in (1, 2):
        state.settle(session, 20, 0, ((1, 0, 90, 1),))
        state.settle(session, 21, 20, None)
        state.take_session(session, 7)
    state.rest_sessions([1, 2])
    state.settle(1, 22, 0, None)
    for number in range(3, 6):
        one.place(2, 500, 70, 90)
        state.accept_sequence(one, 1, number, 1, 78, number)
    two._roll(99)
    two.place(1, 10, 100, 100)
    state.accept_sequence(two, 1, 0, 1, 78, 1)
    one.set_log_start(7)
    state.settle(2, 2, 0, ((1, 0, 12, 1),))
    state.prepare(2, 1, {"kind": "half", "resource": "p", "uuid": "", "prepared_ms": 9, "keys": [[1]]})
    state.complete((2, 3), "u2", {"what": "rolled back", "why": "late"})
    state.decisions.barriers.drop(two)
    state.decisions.forget((2, 3))
    state.saved.save("g", [[1, 0, 9, None], [1, 2, 1, "new"]], 99)
    state.saved.hand_over("g", [[1, 1, 5]], {})
    state.saved.save("h", [[1, 0, 9, None]], 99)
    state.queries.open("q", 5, 9)
    state.end_session(1)
    state.delete_topic(1)
    state.put_topic(Topic(3, TopicConfig("new")))
    state.led(9, 9, 9, Limits(3, 3), is_member=False)


def test_frozen_state_is_written_unchanged_by_later_requests() -> None:
    state = small_state()
    frozen = state.freeze()
    _change_everything(state)
    assert encoded(state).decode() != WRITTEN_AT_ONCE
    assert frozen.encode(lambda: None).decode() == WRITTEN_AT_ONCE


def test_frozen_decision_keeps_its_branches_barrier_and_heuristics() -> None:
    state = small_state()
    frozen = state.freeze()
    state.complete((2, 3), "u1", {"what": "rolled back", "why": "again"})
    assert len(state.decisions.heuristics[2, 3]) == 2
    for partition in list(state.partitions_of[1].values())[:2]:
        state.decisions.barriers.drop(partition)
    assert frozen.encode(lambda: None).decode() == WRITTEN_AT_ONCE


def test_bytes_equal_those_of_a_checkpoint_written_at_once() -> None:
    assert small_state().freeze().encode(lambda: None).decode() == encoded(small_state()).decode() == WRITTEN_AT_ONCE
    restored = State()
    restore(restored, Checkpoint(Lsn(0), 0, 0, WRITTEN_AT_ONCE.encode()), Payloads(SimDisk()))
    assert encoded(restored).decode() == WRITTEN_AT_ONCE


def test_freezing_ten_thousand_sessions_and_partitions_only_copies_references() -> None:
    state = wide_state()
    took_s = []
    for _ in range(3):
        began_s = time.process_time()
        state.freeze()
        took_s.append(time.process_time() - began_s)
    assert min(took_s) < FREEZE_S_MAX


def test_freezing_makes_no_object_for_each_transaction_or_decision() -> None:
    state = State(Limits())
    state.put_topic(Topic(1, TopicConfig("t")))
    state.put_session(BrokerSession(1, 1, "client", 5))
    one = state.partitions_of[1][0]
    meta = {"kind": "last-resource", "resource": "db", "uuid": "0" * 32, "prepared_ms": 8, "keys": [[1]]}
    for counter in range(MANY):
        state.add_part(1, counter, PreparedPart(1, 0, bytearray(batch(b"z")), 1, 7), 6)
        state.prepare(1, counter, meta)
        branches = [{"resource": "r", "uuid": f"{counter}"}]
        decided = {"decided_ms": 3, "branches": branches}
        state.decide(1, MANY + counter, 0, ((1, 0, counter, 1),), decided, {one: (counter, 0, 9)})
    gc.collect()
    gc.disable()
    try:
        before = len(gc.get_objects())
        frozen = state.freeze()
        made = len(gc.get_objects()) - before
    finally:
        gc.enable()
    assert made < MANY / 50
    assert frozen.encode(lambda: None) == encoded(state)


def test_freezing_makes_no_object_for_each_session_or_partition() -> None:
    """The collector would walk over all of them on the event loop: they live until they are written."""
    state = wide_state()
    gc.collect()
    gc.disable()
    try:
        before = len(gc.get_objects())
        frozen = state.freeze()
        made = len(gc.get_objects()) - before
    finally:
        gc.enable()
    assert len(frozen.encode(lambda: None)) > MANY
    assert made < MANY / 50


def test_way_is_given_between_short_pieces_however_long_row_is() -> None:
    state = wide_state()
    crowded = state.partitions_of[1][0]
    for producer in range(1, MANY):
        state.accept_sequence(crowded, producer, producer != 1, 1, 77, 0)
    state.saved.save("g", [[1, number % 1000, 5, "x"] for number in range(MANY)], 9)
    state.put_session(BrokerSession(MANY + 1, 1, "busy", 5))
    for counter in range(MANY):
        state.sessions[MANY + 1].keep(counter, ((1, 0, counter, 1),), 0, MANY)
    expected, ways = encoded(state), 0

    def give_way() -> None:
        nonlocal ways
        ways += 1

    assert max(map(len, state.freeze()._texts())) < TEXT_SIZE_MAX
    assert state.freeze().encode(give_way) == expected
    assert ways > len(expected) / (PIECE_SIZE + TEXT_SIZE_MAX)
