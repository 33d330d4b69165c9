"""Local, last-resource and XA transactions in one group: each keeps its short way."""

from __future__ import annotations

import random

import pytest

from txmq.broker.verbs import decide as decide_verbs
from txmq.broker.verbs import prepare_commit
from txmq.config import BrokerSettings
from txmq.protocol.requests import Request
from txmq.protocol.transaction_bodies import encode_branch

from .test_fast_path_local import batch_of, new_core, part, sent
from .test_fast_path_prepared import UUIDS, finish, txid

DETAILS = {"bqual": "b", "connection": 1, "wrote": True, "marker": True, "table": "t"}
ROUNDS = 30


def requests_of(number: int, chance: random.Random) -> tuple[list[Request], list[Request]]:
    """The first and the second requests of three transactions, one of each kind, in any partitions, with any keys."""
    local, last_resource, xa = (txid(3 * number + kind) for kind in (1, 2, 3))

    def body() -> bytes:
        keys = b" keys=%d" % chance.randrange(4)
        return b"".join(part(b"open", chance.randrange(3), batch_of(), keys) for _ in range(chance.randint(1, 3)))

    floor = {b"floor": b"%d" % max(0, 3 * number - 9)}
    resource = {b"resource": b"db", b"uuid": UUIDS[0], b"table": b"t", b"deadline": b"99", **floor}
    branch = encode_branch("db", UUIDS[1].decode(), DETAILS)
    first: list[Request] = [
        (b"commit", [local], dict(floor), bytearray(body()), b"l%d" % number),
        (b"prepare", [last_resource, b"last-resource"], resource, bytearray(body()), b"p%d" % number),
        (b"decide", [xa], {b"branches": b"1", **floor}, bytearray(branch + body()), b"d%d" % number),
    ]
    second: list[Request] = [
        (b"commit", [last_resource], {b"delayable": b"", **floor}, bytearray(), b"c%d" % number),
        (b"complete", [xa], {b"uuid": UUIDS[1]}, None, b"x%d" % number),
    ]
    chance.shuffle(first)
    chance.shuffle(second)
    return first, second


@pytest.mark.parametrize("seed", range(5))
def test_a_mixed_load_takes_no_long_way(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)
    core, client, _ = new_core(BrokerSettings())
    for module in (prepare_commit, decide_verbs):
        monkeypatch.setattr(module, "locate", None)  # the long ways would fail here
    open_rounds: list[list[Request]] = []
    for number in range(ROUNDS):
        first, second = requests_of(number, chance)
        core.receive(client, [*first, *(open_rounds.pop(0) if len(open_rounds) > chance.randrange(3) else ())])
        open_rounds.append(second)
        finish(core)
    for second in open_rounds:
        core.receive(client, second)
    finish(core)
    answers = sent(client)
    assert len(answers) == 5 * ROUNDS
    assert all(answer.startswith(b"result 200 ") for answer in answers)
    assert not core.state.decisions.incomplete
    assert not core.state.transactions
