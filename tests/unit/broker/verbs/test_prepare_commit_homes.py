"""Transactions over homes: the state is the same live and redone."""

from __future__ import annotations

from txmq.broker.verbs.decide import reported

from ..homes_support import commit, live_and_redone, prepare_branch, two_homes


def test_state_is_the_same_live_and_redone_at_each_step() -> None:
    here, there = two_homes()
    for step in range(6):
        here, there = two_homes()
        client, of, txid = there.session(), here.txid(1, 9), there.txid(1, 1)
        prepare_branch(client, txid, of, ("a", 0, b"x"), held=None)
        if step >= 1:
            commit(client, there.txid(1, 2), ("a", 0, b"y"), homes=here.txid(1, 8))
        if step >= 2:
            commit(client, txid)
        if step >= 3:
            client.ask("complete", there.txid(1, 2), extensions={"branch": here.txid(1, 8)})
        if step >= 4:
            there.clock.advance(60)
            there.core.tick(there.clock.now_ms())
        if step >= 5:
            reported(there.context, (1, 1))
        there.pump()
        lived, redone = live_and_redone(there)
        assert lived == redone, step
