"""The short way of an outbox's row leaves what the table's way leaves: journal, answers, state, and every refusal."""

from __future__ import annotations

import random

import pytest

from txmq.broker.core import Core
from txmq.broker.verbs import prepare_commit
from txmq.protocol.requests import Request

from .test_fast_path_local import batch_of, finish, new_core, part, sent
from .test_fast_path_prepared import UUIDS, any_body, any_prepare, require_same, txid

SERIES = (b"5e" * 16, b"5f" * 16)


def row(counter: int, number: int, series: bytes = SERIES[0], body: bytes | None = None, **changes: bytes) -> Request:
    given = {b"drained": series, b"number": b"%d" % number, b"row": b"row-%d" % number, b"uuid": UUIDS[0]}
    given |= {word.encode(): value for word, value in changes.items()}
    content = part(b"open", 0, batch_of()) if body is None else body
    return (b"commit", [txid(counter)], given, bytearray(content), b"%d" % counter)


def any_row(counter: int, core: Core, chance: random.Random) -> Request:
    """Mostly the next of its series, or ``drained``; else repeats, voids, out of turn, words that do not fit."""
    series = chance.choice([SERIES[0]] * 6 + [SERIES[1]])
    if chance.random() < 0.3:  # behind a refused number, or one of another connection
        return (b"drained", [series], None, None, b"%d" % counter)
    known = core.context.state.outboxes.series.get(series.decode())
    number, kind = (known.last if known is not None else 0) + 1, chance.random()
    changes = {"uuid": chance.choice([UUIDS[0]] * 4 + [UUIDS[1]]), "floor": b"%d" % max(0, counter - 6)}
    if kind < 0.1:
        number = max(1, number + chance.choice((-2, -1, 1)))
    elif kind < 0.13:
        changes["row"] = chance.choice((b"void", b"R", b"r" * 65, b"other"))
    elif kind < 0.16:
        changes[chance.choice(("parts", "homes", "offsets"))] = b"1"
    elif kind < 0.18:
        changes["floor"] = b"9" * 20
    elif kind < 0.22:
        number = chance.choice((0, 10**20 - 1))
    request = row(counter, number, series, b"" if chance.random() < 0.05 else any_body(chance), **changes)
    if chance.random() < 0.1 and request[2] is not None:
        del request[2][chance.choice([b"floor", b"floor", b"row", b"uuid", b"number", b"drained"])]
    if chance.random() < 0.1:
        strange = (txid(counter, session=2), txid(counter, session=77), txid(counter, home=3), txid(counter) + b"G")
        return (request[0], [chance.choice(strange)], *request[2:])
    return request


@pytest.mark.parametrize("seed", range(60))
def test_the_short_way_leaves_what_the_table_leaves(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)
    prepares = chance.choice((0.0, 0.15))  # rows of some worlds wait for nobody

    def request_of(number: int, core: Core) -> Request:
        counter, kind = number + 1, chance.random()
        earlier = [name[1] for name, known in core.context.state.transactions.items() if "drained" not in known.meta]
        if kind < prepares:
            return any_prepare(counter, chance, b"%d" % counter)
        if kind < 2 * prepares and earlier:
            verb, body = chance.choice(((b"commit", bytearray()), (b"rollback", None)))
            return (verb, [txid(chance.choice(earlier))], None, body, b"%d" % counter)
        return any_row(counter if chance.random() < 0.95 else max(1, counter - 3), core, chance)

    require_same(request_of, 80, {b"commit": prepare_commit.commit}, chance, monkeypatch)


def test_an_ordinary_row_takes_it_once_a_series_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    core, client, _ = new_core()
    core.receive(client, [row(1, 1)])
    monkeypatch.setattr(prepare_commit, "locate", None)  # the table's way would fail here
    core.receive(client, [row(2, 2, floor=b"1"), row(3, 3)])
    finish(core)
    assert sent(client) == [b"result 200 11 %d\r\nopen 0 %d 1\n" % (at, at - 1) for at in (1, 2, 3)]
    assert core.context.state.outboxes.series[SERIES[0].decode()].last == core.context.counters.drained == 3


@pytest.mark.parametrize(("flag", "answer"), [("disk_full", b"result 507 "), ("stopping", b"result 503 ")])
def test_broker_that_refuses_takes_no_number(flag: str, answer: bytes) -> None:
    core, client, _ = new_core()
    core.receive(client, [row(1, 1)])
    setattr(core.context, flag, True)
    core.receive(client, [row(2, 2)])
    finish(core)
    assert sent(client)[0].startswith(answer)  # a refusal waits for nothing
    assert core.context.state.outboxes.series[SERIES[0].decode()].last == 1


def test_an_ended_session_takes_no_number() -> None:
    core, client, _ = new_core()
    core.receive(client, [row(1, 1)])
    core.context.state.end_session(1)
    core.receive(client, [row(2, 2)])
    finish(core)
    assert [answer[:11] for answer in sent(client)] == [b"result 200 ", b"result 410 "]
