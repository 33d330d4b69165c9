"""``python -m tools.images``: count the images; ``... SCRIPT``: check all of one; ``... SCRIPT LABEL``: check one."""

from __future__ import annotations

import sys

from tools.simulated.crash_images import enumerate_images

from .cases import check_one, check_script
from .check import record
from .scripts import SCRIPTS


def main(words: list[str]) -> None:
    """Do what the words say."""
    if len(words) == 2:
        check_one(*words)
        print("sound")
    elif words:
        print(words[0], check_script(words[0]), "images, all sound")
    else:
        counts = {name: sum(1 for _ in enumerate_images(record(script))) for name, script in SCRIPTS.items()}
        for name, count in counts.items():
            print(f"{count:6d} {name}")
        print(f"{sum(counts.values()):6d}")


if __name__ == "__main__":
    main(sys.argv[1:])
