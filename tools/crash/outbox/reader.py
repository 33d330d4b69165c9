"""The outbox campaign's reader: ``python -m tools.crash.outbox.reader DIRECTORY ADDRESS NAME``."""

from __future__ import annotations

import sys
from pathlib import Path

import txmq
from tools.crash.directory import HistoryFile
from tools.crash.outbox.directory import OutboxCampaignDirectory
from tools.crash.reader import Reader, follow
from tools.crash.xa.reader import XAReader


class OutboxReader(Reader):
    """Looks for the rows of what it sees in both databases."""

    def __init__(self, world: OutboxCampaignDirectory, client: txmq.Client, history: HistoryFile) -> None:
        super().__init__(world, client, history)
        self._ledger = XAReader(world, client, history)

    def look_for_rows(self, values: list[str]) -> None:
        super().look_for_rows(values)
        self._ledger.look_for_rows(values)


if __name__ == "__main__":
    follow(OutboxReader, OutboxCampaignDirectory(Path(sys.argv[1])), *sys.argv[2:])
