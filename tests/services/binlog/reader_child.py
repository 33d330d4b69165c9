"""A process that reads a script's binlog and publishes it; it may be killed. Ends when all of it is published.

If it is endless, it waits for more.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace

import txmq
from tests.services.binlog.scripted import PART_ROWS, Script, ScriptedSource
from txmq.binlog.config import BinlogSettings, PublishSettings
from txmq.binlog.reader import BinlogReader, publisher_of
from txmq.runtime.threads import Signal

SETTINGS = PublishSettings(partitions=3, linger_ms=1, transaction_rows_max=2 * PART_ROWS, session_timeout_ms=2000)
AWAY_AFTER = 25  # parts: the database's connection ends every now and then


def main(address: str, name: str, seed: str, count: str, spool: str = "", endless: str = "") -> None:
    """Publish a script, under a name; in ordered mode if a spool is named."""
    script, opened = Script(int(seed), int(count)), itertools.count(1)
    with txmq.connect(address, lazy=True) as client:
        ended = wait if endless else lambda: reader.stop()
        reader: BinlogReader = BinlogReader(
            lambda: ScriptedSource(script, ended, AWAY_AFTER * next(opened)), client.clock
        )
        publish = replace(SETTINGS, mode="ordered", spool=spool) if spool else SETTINGS
        settings = BinlogSettings(name=name, publish=publish)
        published = reader.run(publisher_of(client, settings, lambda: reader.is_stopped))
    print("published" if published is not None and published.position.gtids == script.end else published, flush=True)


def wait() -> None:
    """The source has nothing for a moment."""
    Signal().wait(0.02)


if __name__ == "__main__":
    main(*sys.argv[1:])
