"""What is there at the end besides messages and rows: the money, and what was decided alone."""

from __future__ import annotations

import txmq
from tools.crash.directory import HistoryFile
from tools.crash.xa.directory import TOTAL, XaCampaignDirectory


def write_bank(world: XaCampaignDirectory, address: str, history: HistoryFile) -> None:
    """Write it to the history; the writers are at rest."""
    history.write("bank", "ok", "bank", [world.total(), TOTAL])
    write_heuristics(address, history)


def write_heuristics(address: str, history: HistoryFile) -> None:
    """What the brokers have recorded of lone decisions."""
    with txmq.connect(address) as client:
        found = client.transactions.list(state="heuristic")
    decided = [[item["txid"], fact["what"]] for item in found for fact in item["heuristics"]]
    history.write("heuristics", "ok", "heuristics", decided)
