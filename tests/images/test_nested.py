"""Recovery that crashes: images of the recovery of images; and that there are as many images as promised."""

from __future__ import annotations

import pytest

from tools.images.cases import check_nested
from tools.images.check import record
from tools.images.scripts import SCRIPTS
from tools.simulated.crash_images import enumerate_images

IMAGES_MIN = 5000
NESTED = (
    "puts_over_a_restart", "local_with_restart_and_checkpoint", "streamed_with_checkpoints",
    "prepared_over_checkpoints", "topics_come_and_go", "journal_files", "retention_deletes", "retention_archives",
    "everything",
)  # fmt: skip


@pytest.mark.parametrize("name", NESTED)
def test_a_recovery_may_crash_anywhere_and_again(name: str) -> None:
    count = check_nested(name, first_every=29, second_every=7)
    print(f"{count} images of recoveries of {name}")
    assert count > 25


def test_there_are_at_least_5000_images() -> None:
    counts = {name: sum(1 for _ in enumerate_images(record(script))) for name, script in SCRIPTS.items()}
    print(f"{sum(counts.values())} crash images: {counts}")
    assert sum(counts.values()) >= IMAGES_MIN
