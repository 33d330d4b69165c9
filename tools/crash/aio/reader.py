"""The aio campaign's reader: ``python -m tools.crash.aio.reader DIRECTORY ADDRESS NAME``; rows of both kinds."""

from __future__ import annotations

import sys
from pathlib import Path

from tools.crash.aio.directory import AioCampaignDirectory
from tools.crash.directory import LAST_RESOURCE
from tools.crash.reader import Reader, follow
from tools.crash.xa.reader import XAReader


class AioReader(XAReader, Reader):
    """Looks into the file for rows of its orders, and into the servers for all others."""

    def look_for_rows(self, values: list[str]) -> None:
        in_file = [value for value in values if value.rpartition(".")[0].endswith(LAST_RESOURCE)]
        Reader.look_for_rows(self, in_file)
        self.reads += 1
        XAReader.look_for_rows(self, [value for value in values if value not in in_file])


if __name__ == "__main__":
    follow(AioReader, AioCampaignDirectory(Path(sys.argv[1])), *sys.argv[2:])
