"""Branches get their outcome without their client: the home that decides is asked, fenced, and told."""

from __future__ import annotations

import pytest

from tools.images.homes import Cluster, HomeNode
from tools.images.requests import UUID, batch, part
from txmq.protocol.transaction_bodies import encode_branch

from ..homes_support import commit, listed, prepare_branch, two_homes
from ..support import put, values

DETAILS = {"bqual": "b", "connection": 7, "wrote": True, "marker": True, "table": "t"}
both = pytest.mark.parametrize("with_checkpoint", [False, True])


def made() -> tuple[Cluster, HomeNode, HomeNode]:
    """Two homes that ask each other."""
    here, there = two_homes()
    return Cluster(here, there), here, there


def is_quiet(*homes: HomeNode) -> bool:
    """Whether nothing is in doubt, to be reported or owed."""
    return all(
        home.state.unsettled == 0 and not any(session.owed for session in home.state.sessions.values())
        for home in homes
    )


# --- the client says nothing any more --------------------------------------------------------------------------------


@both
def test_branch_of_a_decision_is_placed_and_reported(with_checkpoint: bool) -> None:
    cluster, here, there = made()
    prepare_branch(there.session(), there.txid(1, 1), here.txid(1, 1), ("a", 0, b"x"))
    commit(here.session(), here.txid(1, 1), ("a", 0, b"y"), homes=there.txid(1, 1))
    cluster.restart(there, checkpoint=with_checkpoint)
    cluster.restart(here, checkpoint=with_checkpoint)
    cluster.later(1.5)
    here, there = cluster.homes.values()
    assert (values(here), values(there)) == ([b"y"], [b"x"])
    assert is_quiet(here, there)


def test_branch_that_its_client_commits_is_reported() -> None:
    cluster, here, there = made()
    client = there.session()
    prepare_branch(client, there.txid(1, 1), here.txid(1, 1), ("a", 0, b"x"))
    commit(here.session(), here.txid(1, 1), homes=there.txid(1, 1))
    commit(client, there.txid(1, 1))
    cluster.later(0.25)
    assert is_quiet(here, there)


def test_branch_is_rolled_back_when_its_owner_is_gone() -> None:
    cluster, here, there = made()
    owner, of, txid = here.session(), here.txid(1, 1), there.txid(1, 1)
    prepare_branch(there.session(), txid, of, ("a", 0, b"x"))
    cluster.later(5)
    assert listed(there.connect())[0]["txid"] == txid  # the owner is there
    owner.disconnect()
    cluster.later(10)
    assert is_quiet(there)
    assert there.connect().ask("outcome", txid).text == "rolled-back\n"
    assert commit(here.session("1.0"), of, homes=txid).error == "transaction-conflict"


def test_owner_that_comes_back_within_a_second_is_not_fenced() -> None:
    cluster, here, there = made()
    owner, of, txid = here.session(), here.txid(1, 1), there.txid(1, 1)
    prepare_branch(there.session(), txid, of, ("a", 0, b"x"))
    cluster.later(0.75)
    owner.disconnect()
    cluster.later(0.5)
    owner = here.session("1.0")
    cluster.later(3)
    assert commit(owner, of, homes=txid).code == 200
    cluster.later(31)
    assert (values(there), is_quiet(here, there)) == ([b"x"], True)


def test_owner_past_the_deadline_is_fenced() -> None:
    cluster, here, there = made()
    owner, of, txid = here.session(), here.txid(1, 1), there.txid(1, 1)
    deadline_ms = there.clock.now_ms() + 3000
    prepare_branch(there.session(), txid, of, ("a", 0, b"x"), deadline=deadline_ms)
    cluster.later(2)
    assert not is_quiet(there)
    cluster.later(3)
    assert is_quiet(there)
    assert commit(owner, of, homes=txid).error == "transaction-conflict"


def test_owner_is_asked_again_at_its_deadline() -> None:
    """Found: pauses that double passed it by up to half a minute."""
    cluster, here, there = made()
    here.session()
    deadline_ms = there.clock.now_ms() + 9000
    prepare_branch(there.session(), there.txid(1, 1), here.txid(1, 1), ("a", 0, b"x"), deadline=deadline_ms)
    cluster.later(9.5)
    assert is_quiet(there)


def test_branch_that_a_living_owner_gave_up_is_undone() -> None:
    """Found: keys of it were held until the deadline, though the client had told its caller that nothing happened."""
    cluster, here, there = made()
    owner, of, txid = here.session(), here.txid(1, 1), there.txid(1, 1)
    prepare_branch(there.session(), txid, of, ("a", 0, b"x"))
    cluster.later(1.5)
    assert not is_quiet(there)
    commit(owner, here.txid(1, 2), ("a", 0, b"y"), floor=1)  # it has seen the end of the first one
    cluster.later(1)
    assert (values(there), is_quiet(here, there)) == ([], True)
    assert commit(owner, of, homes=txid).error == "transaction-conflict"


def test_branch_of_a_session_that_ended_is_rolled_back() -> None:
    cluster, here, there = made()
    here.session().ask("end", 0)
    prepare_branch(there.session(), there.txid(1, 1), here.txid(1, 1), ("a", 0, b"x"))
    cluster.later(1.5)
    assert (values(there), is_quiet(there)) == ([], True)


def test_branch_whose_deciding_home_was_restored_stays_prepared() -> None:
    """It may have decided before, and other homes may have committed: no presumed abort, and one alarm."""
    cluster, here, there = made()
    client, txid, of = there.session(), there.txid(1, 1), here.txid(77, 1)
    prepare_branch(client, txid, of, ("a", 0, b"x"))
    cluster.later(100)
    assert listed(there.connect())[0]["txid"] == txid
    (alarm,) = there.context.alarms
    assert (alarm["txid"], alarm["of"]) == (txid, of)
    assert "was restored" in alarm["event"]
    assert there.connect().ask("rollback", txid, extensions={"heuristic": "looked"}).code == 200
    assert values(there) == []


def test_branch_that_the_decision_does_not_list_is_rolled_back() -> None:
    cluster, here, there = made()
    client = there.session()
    for counter in (1, 2):  # the client took another id, because it had no answer to the first
        prepare_branch(client, there.txid(1, counter), here.txid(1, 1), ("a", 0, b"%d" % counter))
    commit(here.session(), here.txid(1, 1), homes=there.txid(1, 2))
    cluster.later(1.5)
    assert (values(there), is_quiet(here, there)) == ([b"2"], True)


def test_prepare_that_arrives_after_everything_is_rolled_back() -> None:
    cluster, here, there = made()
    of, client = here.txid(1, 1), there.session()
    commit(here.session(), of, homes=there.txid(1, 1))
    prepare_branch(client, there.txid(1, 1), of, ("a", 0, b"x"))
    cluster.later(1.5)
    prepare_branch(client, there.txid(1, 2), of, ("a", 0, b"late"))
    cluster.later(1.5)
    assert (values(there), is_quiet(here, there)) == ([b"x"], True)


def test_crossing_transactions_end_without_their_clients() -> None:
    cluster, one, two = made()
    clients = one.session(), two.session()
    mine, its = (one.txid(1, 1), two.txid(1, 2)), (one.txid(1, 2), two.txid(1, 1))
    prepare_branch(clients[1], mine[1], mine[0], ("a", 0, b"mine"))
    prepare_branch(clients[0], its[0], its[1], ("a", 0, b"its"))
    commit(clients[0], mine[0], ("a", 0, b"mine"), homes=mine[1])
    commit(clients[1], its[1], ("a", 0, b"its"), homes=its[0])
    cluster.later(1.5)
    assert (values(one), values(two)) == ([b"its", b"mine"], [b"mine", b"its"])
    assert is_quiet(one, two)


def test_half_message_is_asked_about_until_it_is_decided() -> None:
    cluster, here, there = made()
    owner, of, txid = here.session(), here.txid(1, 1), there.txid(1, 1)
    prepare_branch(there.session(), txid, of, ("a", 0, b"x"))
    owner.ask("prepare", of, "half", extensions={"group": "g", "homes": txid}, body=part("a", 0, batch(b"h")))
    owner.disconnect()
    cluster.later(40)
    assert (values(there), len(listed(there.connect()))) == ([], 1)  # nothing times out
    commit(here.connect(), of)
    cluster.later(32)
    assert (values(here), values(there), is_quiet(here, there)) == ([b"h"], [b"x"], True)


# --- crashes ---------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("steps", range(1, 9))
def test_branch_home_dies_at_any_step_of_placing_and_reporting(steps: int, with_checkpoint: bool) -> None:
    cluster, here, there = made()
    prepare_branch(there.session(), there.txid(1, 1), here.txid(1, 1), ("a", 0, b"x"))
    commit(here.session(), here.txid(1, 1), homes=there.txid(1, 1))
    there.connect().send("commit", there.txid(1, 1), body=b"")
    there.run_steps(steps)
    cluster.restart(there, checkpoint=with_checkpoint)
    cluster.later(2)
    here, there = cluster.homes.values()
    assert (values(there), is_quiet(here, there)) == ([b"x"], True)


def test_report_waits_for_the_record_that_places_the_part() -> None:
    _, here, there = made()
    client = there.session()
    prepare_branch(client, there.txid(1, 1), here.txid(1, 1), ("a", 0, b"x"))
    commit(here.session(), here.txid(1, 1), homes=there.txid(1, 1))
    there.clock.advance(2)
    there.core.tick(there.clock.now_ms())
    client.send("commit", there.txid(1, 1), body=b"")
    assert there.core.take_branch_asks() == []  # accepted, not forced
    there.pump()
    there.core.tick(there.clock.now_ms())
    assert [ask.verb for ask in there.core.take_branch_asks()] == ["complete"]


def test_report_that_the_deciding_home_has_forgotten_is_done() -> None:
    cluster, here, there = made()
    prepare_branch(there.session(), there.txid(1, 1), here.txid(1, 1), ("a", 0, b"x"))
    commit(here.session(), here.txid(1, 1), homes=there.txid(1, 1))
    commit(there.connect(), there.txid(1, 1))
    here.connect().ask("complete", here.txid(1, 1), extensions={"branch": there.txid(1, 1)})
    cluster.restart(there)  # before it has the answer
    cluster.later(1.5)
    assert is_quiet(*cluster.homes.values())


def test_branches_wait_for_a_home_that_is_away() -> None:
    cluster, here, there = made()
    client = there.session()
    prepare_branch(client, there.txid(1, 1), here.txid(1, 1), ("a", 0, b"x"))
    commit(here.session(), here.txid(1, 1), homes=there.txid(1, 1))
    cluster.away.add(here.identity.node)
    assert commit(client, there.txid(1, 2), ("a", 0, b"behind")).text == "a 0 - 1\n"
    assert commit(client, there.txid(1, 3), ("a", 1, b"other")).text == "a 1 0 1\n"
    cluster.later(60)
    assert (values(there), values(there, "a", 1)) == ([], [b"other"])
    cluster.away.clear()
    cluster.later(5)
    assert (values(there), is_quiet(here, there)) == ([b"x", b"behind"], True)


# --- rows before messages --------------------------------------------------------------------------------------------


def held() -> tuple[Cluster, HomeNode, HomeNode]:
    """An XA transaction over two homes, decided and placed; its database has not committed."""
    cluster, here, there = made()
    client, of, txid = there.session(), here.txid(1, 1), there.txid(1, 1)
    prepare_branch(client, txid, of, ("a", 0, b"x"), held=None)
    body = encode_branch("db", UUID, DETAILS) + part("a", 0, batch(b"y"), "7")
    here.session().ask("decide", of, extensions={"branches": 1, "homes": txid}, body=body)
    commit(client, txid)
    put(client, b"behind", producer=1)
    cluster.pump()
    return cluster, here, there


def test_branch_is_shown_when_the_databases_have_committed() -> None:
    cluster, here, there = held()
    cluster.later(3)
    assert (values(here), values(there)) == ([], [])
    here.connect().ask("complete", here.txid(1, 1), extensions={"uuid": UUID})
    cluster.pump()
    assert (values(here), values(there)) == ([b"y"], [b"x", b"behind"])
    assert is_quiet(here, there)


@pytest.mark.parametrize("dies", [(0,), (1,), (0, 1), (1, 0, 1)])
@both
def test_branch_stays_hidden_through_restarts_until_the_rows_are_there(
    dies: tuple[int, ...], with_checkpoint: bool
) -> None:
    cluster, *_ = held()
    for number in dies:
        cluster.restart(list(cluster.homes.values())[number], checkpoint=with_checkpoint)
        cluster.later(1.5)
        assert [values(home) for home in cluster.homes.values()] == [[], []]
    here, there = cluster.homes.values()
    here.connect().ask("complete", here.txid(1, 1), extensions={"uuid": UUID})
    cluster.later(2)
    assert (values(here), values(there)) == ([b"y"], [b"x", b"behind"])
    assert is_quiet(here, there)


def test_hold_ends_at_both_homes_and_the_report_with_it() -> None:
    cluster, here, there = held()
    cluster.later(40)
    assert (values(here), values(there)) == ([b"y"], [b"x", b"behind"])
    assert there.state.branch_parts.unreported == {}
    here.connect().ask("complete", here.txid(1, 1), extensions={"uuid": UUID})
    cluster.pump()
    assert is_quiet(here, there)
