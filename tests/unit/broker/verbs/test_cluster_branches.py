"""What waits for other homes is listed with these homes, and counted; a broker that is alone has none of it."""

from __future__ import annotations

import json
from typing import Any

from tools.images.homes import Cluster, HomeNode

from ..homes_support import commit, prepare_branch, two_homes
from ..support import node


def branches(home: HomeNode) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(home.connect().ask("cluster", "describe").body)["branches"]
    return found


def figures(home: HomeNode) -> dict[str, int]:
    client = home.connect()
    client.send_bytes(b"stats transactions 7\r\n")
    home.pump()
    lines = (line.split(" ", 1) for line in client.received[b"7"].text.splitlines())
    return {name: int(value) for name, value in lines if value.isdecimal()}


def test_each_state_names_the_home_that_it_waits_for() -> None:
    here, there = two_homes()
    one, two = (f"home {home.identity.node:016x}" for home in (here, there))
    client = there.session()
    prepare_branch(client, there.txid(1, 1), here.txid(1, 1), ("a", 0, b"x"))
    commit(client, there.txid(1, 2), ("a", 0, b"behind"))
    prepare_branch(client, there.txid(1, 3), here.txid(1, 3), ("a", 1, b"x"))
    commit(here.session(), here.txid(1, 3), homes=there.txid(1, 3))
    commit(client, there.txid(1, 3))
    there.clock.advance(2)
    there.pump()
    rows = {row["txid"]: row for row in branches(there)}
    assert {txid: row["state"] for txid, row in rows.items()} == {
        there.txid(1, 1): "prepared", there.txid(1, 2): "placing", there.txid(1, 3): "placed",
    }  # fmt: skip
    assert rows[there.txid(1, 1)]["waits_for"] == rows[there.txid(1, 3)]["waits_for"] == one
    assert rows[there.txid(1, 1)]["age_ms"] >= 2000
    assert [(row["state"], row["waits_for"]) for row in branches(here)] == [("decided", two)]
    told = figures(there)
    assert (told["in_doubt_branch"], told["placing"], told["branches_unreported"]) == (1, 1, 1)
    assert figures(here)["decisions_with_homes"] == 1
    Cluster(here, there).later(2)
    assert branches(here) == []
    assert [row["state"] for row in branches(there)] == ["prepared", "placing"]


def test_broker_that_is_alone_says_nothing_of_homes() -> None:
    made = node()
    client = made.connect()
    client.send_bytes(b"stats transactions 7\r\n")
    made.pump()
    assert "branches_unreported" not in client.received[b"7"].text
    assert json.loads(client.ask("cluster", "describe").body)["branches"] == []
