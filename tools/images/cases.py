"""Every image of one script, checked; and how a failing one is told: its label, and the command that repeats it."""

from __future__ import annotations

import itertools

from tools.simulated.crash_images import enumerate_images, image
from tools.simulated.disk import SimDisk

from .check import Player, check_image, check_recovered, promised, record
from .script import Script
from .scripts import SCRIPTS

AGAIN_EVERY = 8  # so many images are followed by another life each


def check_script(name: str) -> int:
    """Check every image of a script. Returns how many there are."""
    script, count = SCRIPTS[name], 0
    for label, disk in enumerate_images(record(script)):
        _check(script, label, disk, again=count % AGAIN_EVERY == 0)
        count += 1
    return count


def check_one(name: str, label: str) -> None:
    """Check one image; of a nested one (two labels with `` / `` between) the image of the recovery."""
    first, _, second = label.partition(" / ")
    script = SCRIPTS[name]
    disk = image(record(script), first)
    if second:
        notes = list(disk.notes)
        trace = disk.start_trace()
        Player(script, disk).start(disk)
        disk = image(trace, second)
        disk.notes = [*notes, *disk.notes]
    _check(script, label, disk, again=True)


def check_nested(name: str, *, first_every: int, second_every: int) -> int:
    """Crash, and crash again in the recovery of that. Returns how many images of recoveries were checked."""
    script, count = SCRIPTS[name], 0
    for label, disk in itertools.islice(enumerate_images(record(script)), 0, None, first_every):
        notes, told = list(disk.notes), promised(script, disk)
        trace = disk.start_trace()
        player = Player(script, disk)
        player.start(disk)
        check_recovered(script, player.node, told)
        for second, again in itertools.islice(enumerate_images(trace), 0, None, second_every):
            again.notes = [*notes, *again.notes]
            _check(script, f"{label} / {second}", again, again=False)
            count += 1
    return count


def _check(script: Script, label: str, disk: SimDisk, *, again: bool) -> None:
    try:
        check_image(script, disk, again=again)
    except Exception as error:
        command = f".venv/bin/python -m tools.images {script.name} '{label}'"
        raise AssertionError(f"image {label} of {script.name}: {error!r}\nrepeat it with: {command}") from error
