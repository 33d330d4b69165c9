"""The txid that a streamed or committed batch may carry in its records."""

from __future__ import annotations

from tools.images.requests import part
from txmq.log import records

from ..support import node


def test_first_record_header_holds_the_txid_as_written() -> None:
    broker = node()
    client = broker.session()
    txid = broker.txid(1, 1)
    content = records.encode([(None, b"1", (), 1), (None, b"2", (), 1)], txid=txid)
    client.ask("commit", txid, body=part("a", 0, bytes(content)))
    assert [message.txid for message in broker.messages(broker.partition("a"))] == [txid, txid]
