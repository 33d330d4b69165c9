"""The configuration of a sync of the tests' servers is one that the reader takes."""

from __future__ import annotations

from tools.sync_settings import sync_settings
from txmq.binlog.config import read_settings


def test_lines_stand_in_their_sections() -> None:
    text = sync_settings("s", "txmq://127.0.0.1:1", 11, 12, apply="threads = 7\n", publish='by = "table"\n')
    settings = read_settings(text, {})
    assert (settings.name, settings.bootstrap) == ("s", "txmq://127.0.0.1:1")
    assert (settings.source.port, settings.apply.port, settings.apply.threads) == (11, 12, 7)
    assert (settings.source.tables, settings.publish.by) == (("shop.*",), "table")
