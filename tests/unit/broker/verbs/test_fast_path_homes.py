"""The short ways of a branch and of a decision with branches leave what the table's ways leave, refusals included."""

from __future__ import annotations

import random

import pytest

from txmq.broker.client_connection import ClientConnection
from txmq.broker.cluster.cluster_view import ClusterView
from txmq.broker.core import VERBS, Core
from txmq.broker.verbs import prepare_commit, transaction_checks
from txmq.protocol.requests import Request

from .test_fast_path_local import batch_of, copied, new_core, part, sent
from .test_fast_path_prepared import SETTINGS, any_body, finish, txid

OTHER_HOME = 3


def one_home() -> tuple[Core, tuple[ClientConnection, ClientConnection]]:
    """One home of a cluster, with two connections, each with a session."""
    core, own, other = new_core(SETTINGS)
    core.context.cluster = ClusterView()
    return core, (own, other)


def elsewhere(counter: int, chance: random.Random) -> bytes:
    """Mostly the id of another home's transaction."""
    kind = chance.random()
    if kind < 0.9:
        return txid(counter, 5, OTHER_HOME)
    return chance.choice([txid(counter), b"no-id", txid(counter, 5, OTHER_HOME).upper(), txid(0, 5, OTHER_HOME)])


def any_extensions(counter: int, chance: random.Random, given: dict[bytes, bytes]) -> dict[bytes, bytes]:
    kind = chance.random()
    if kind < 0.5:
        given[b"floor"] = b"%d" % max(0, counter - 4)
    elif kind < 0.53:
        given.pop(chance.choice(list(given)))
    elif kind < 0.56:
        given |= {b"parts": b"1", b"bytes": b"7", b"crc": b"7"}
    elif kind < 0.58:
        given[b"floor"] = b"9" * 20
    return given


def any_request(number: int, known: list[int], chance: random.Random) -> Request:
    """Branches, decisions that list some, commits of both, in and out of turn; rollbacks and repeats."""
    counter, opaque, kind = number + 1, b"%d" % number, chance.random()
    earlier = chance.choice([*known[:3], *known[-3:], max(1, counter - 5)])
    own = txid(counter if chance.random() < 0.95 else earlier, chance.choice([1] * 30 + [2, 77]))
    body = bytearray(b"" if chance.random() < 0.05 else any_body(chance).replace(b"absent ", b"closed "))
    if kind < 0.4:
        given = {b"of": elsewhere(counter, chance), b"deadline": b"%d" % chance.choice([0, *[99] * 9, 1])}
        if chance.random() < 0.1:
            given[b"held"] = b""
        return (b"prepare", [own, b"branch"], any_extensions(counter, chance, given), body, opaque)
    if kind < 0.65:
        listed = [elsewhere(counter, chance)]
        if chance.random() < 0.3:
            listed.append(txid(counter, 5, chance.choice([4, OTHER_HOME])))
        given = any_extensions(counter, chance, {b"homes": b",".join(listed)})
        return (b"commit", [own], given, body, opaque)
    if kind < 0.7:
        return (b"rollback", [txid(earlier)], None, None, opaque)
    if kind < 0.75:
        return (b"complete", [txid(earlier)], {b"branch": txid(earlier, 5, OTHER_HOME)}, None, opaque)
    return (
        b"commit",
        [txid(earlier)],
        chance.choice([None, {b"floor": b"1"}, {b"delayable": b""}]),
        bytearray(),
        opaque,
    )


@pytest.mark.parametrize("seed", range(30))
def test_the_short_ways_leave_what_the_table_leaves(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)
    monkeypatch.setattr(transaction_checks, "UNFINISHED_OUTCOMES_MAX", 5)
    (core, clients), (reference, others) = one_home(), one_home()
    for number in range(80):
        known = [name[1] for name in (*core.state.transactions, *core.state.decisions.incomplete)]
        request, who = any_request(number, known, chance), int(chance.random() < 0.1)
        core.receive(clients[who], [copied(request)])
        with monkeypatch.context() as without:
            without.setitem(VERBS, b"prepare", prepare_commit.prepare)
            without.setitem(VERBS, b"commit", prepare_commit.commit)
            reference.receive(others[who], [copied(request)])
        if number % 3 == 0:
            assert finish(core) == finish(reference), request
        assert [sent(client) for client in clients] == [sent(client) for client in others], request
        assert core.state.snapshot() == reference.state.snapshot(), request
        assert asked(core, number) == asked(reference, number)
    assert finish(core) == finish(reference)
    assert core.context.counters == reference.context.counters
    assert core.context.counters.committed > 0


def asked(core: Core, number: int) -> list[object]:
    """What other homes are asked; now and then that of the next seconds."""
    if number % 20 == 0:
        core.tick(core.context.now_ms + 1500)
    return [*core.take_branch_asks()]


def test_they_are_taken_by_an_ordinary_transaction(monkeypatch: pytest.MonkeyPatch) -> None:
    core, (client, _) = one_home()
    monkeypatch.setattr(prepare_commit, "locate", None)  # the table's way would fail here
    given = {b"of": txid(9, 5, OTHER_HOME), b"deadline": b"99", b"floor": b"0"}
    body = bytearray(part(b"open", 0, batch_of(), b" keys=7"))
    core.receive(client, [(b"prepare", [txid(1), b"branch"], given, bytearray(body), b"1")])
    given = {b"homes": txid(9, 5, OTHER_HOME), b"floor": b"0"}
    core.receive(client, [(b"commit", [txid(2)], given, body.replace(b"open 0", b"open 1"), b"2")])
    core.receive(client, [(b"commit", [txid(1)], {b"floor": b"0"}, bytearray(), b"3")])
    finish(core)
    assert sent(client) == [
        b"result 200 0 1\r\n",
        b"result 200 11 2\r\nopen 1 0 1\n",
        b"result 200 11 3\r\nopen 0 0 1\n",
    ]
