"""The reader of the campaign over homes: ``python -m tools.crash.homes.reader DIRECTORY ADDRESS NAME``."""

import sys
from pathlib import Path

from tools.crash.homes.directory import HomesCampaignDirectory
from tools.crash.reader import Reader, follow

if __name__ == "__main__":
    follow(Reader, HomesCampaignDirectory(Path(sys.argv[1])), *sys.argv[2:])
