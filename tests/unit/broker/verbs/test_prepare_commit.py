"""More transactions that end at once than a journal record holds."""

from __future__ import annotations

import pytest

from tools.images.node import Client, Node
from tools.images.requests import batch

from ..support import node, prepare, restarted, values


def _begun() -> tuple[Node, Client]:
    broker = node()
    return broker, broker.session()


def test_more_may_wait_for_one_than_a_journal_record_holds() -> None:
    broker, client = _begun()
    object.__setattr__(broker.settings, "group_size_bytes_max", 4096)  # less than users may set, as its journal files
    txids = [broker.txid(1, counter) for counter in range(1, 302)]
    for txid in txids:
        prepare(client, txid, ("a", 0, batch(b"v")), keys="7")
    waiting = [client.send("commit", txid, body=b"") for txid in txids[1:]]
    broker.pump()
    assert not client.received
    assert client.ask("rollback", txids[0]).code == 200
    assert [client.received[opaque].text for opaque in waiting] == [f"a 0 {offset} 1\n" for offset in range(300)]
    assert len(values(restarted(broker))) == 300


@pytest.mark.parametrize("is_late", [False, True])
def test_more_streams_may_end_at_once_than_journal_record_holds(*, is_late: bool) -> None:
    broker, client = _begun()
    object.__setattr__(broker.settings, "group_size_bytes_max", 4096)  # less than users may set, as its journal files
    txids = [broker.txid(1, counter) for counter in range(1, 601)]
    for txid in txids:
        assert client.ask("put", "a", 0, extensions={"tx": txid}, body=batch(b"v")).code == 200
    if is_late:
        broker.clock.advance(broker.settings.transaction_timeout_ms_max / 1000 + 1)
        broker.core.tick(broker.clock.now_ms())
    else:
        client.disconnect()
    broker.pump()
    assert not broker.state.streams
    again = restarted(broker)
    assert {again.session("1.0").ask("outcome", txid).text for txid in (txids[0], txids[-1])} == {"rolled-back\n"}
