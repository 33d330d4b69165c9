"""What the processes of the cluster campaign agree on: those of the other campaigns, and a topic that never rests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tools.crash.directory import AUDIT, ORDERS, PAYMENTS, SCRAP, CampaignDirectory
from tools.crash.groups.directory import PARTITIONS as GROUP_PARTITIONS
from tools.crash.groups.directory import TOPIC as GROUP_TOPIC
from tools.crash.ordered.directory import PARTITIONS as ORDERED_PARTITIONS

BROKERS: Final = 3
PULSE: Final = "pulse"
PARTITIONS: Final = {
    ORDERS: 3, PAYMENTS: 3, AUDIT: 2, SCRAP: 1, GROUP_TOPIC: GROUP_PARTITIONS, PULSE: 6, **ORDERED_PARTITIONS,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ClusterCampaignDirectory(CampaignDirectory):
    """One campaign's directory."""

    @property
    def partitions(self) -> Mapping[str, int]:
        """The topics."""
        return PARTITIONS
