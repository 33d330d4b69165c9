"""What the processes of the ordered campaign agree on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import txmq
from tools.checkers.events import merge

TOPIC: Final = "ordered"
PARTITIONS: Final = {TOPIC: 6}
KEYS: Final = tuple(f"k{number}" for number in range(8))
THREADS: Final = 2
SPOOL_SIZE_BYTES_MAX: Final = 40_000  # full after some 400 messages


def options(partitions: Mapping[str, int]) -> txmq.OrderedOptions:
    """Of every life: a short time for an attempt, a spool that fills up in an outage, the topic declared."""
    return txmq.OrderedOptions(timeout=0.5, spool_size_bytes_max=SPOOL_SIZE_BYTES_MAX, partitions=partitions)


@dataclass(frozen=True, slots=True)
class OrderedCampaignDirectory:
    """One campaign's directory."""

    directory: Path

    @property
    def broker(self) -> Path:
        """The broker's data directory."""
        return self.directory / "broker"

    @property
    def spool(self) -> Path:
        """The producer's spool, over all its lives."""
        return self.directory / "spool"

    @property
    def histories(self) -> Path:
        """One file per thread that ever sent."""
        return self.directory / "history"

    def lines(self) -> list[dict[str, Any]]:
        """What everybody wrote so far."""
        files = sorted(self.histories.iterdir())
        return list(merge([file.read_text("utf-8").splitlines(keepends=True) for file in files]))
