"""The campaign of ``txmq.aio``: that of XA, with workers whose orders are tasks of one loop, and are cancelled.

Four workers with sixteen tasks each use a SQLite file and a MariaDB server as last resources, and two servers by XA.
"""

from __future__ import annotations

from pathlib import Path

from tools.crash.aio.directory import AioCampaignDirectory
from tools.crash.xa.campaign import XACampaign


class AioCampaign(XACampaign):
    """See the module's docstring."""

    worker_module, reader_module = "tools.crash.aio.worker", "tools.crash.aio.reader"

    def make_world(self, directory: Path) -> AioCampaignDirectory:
        return AioCampaignDirectory(directory)
