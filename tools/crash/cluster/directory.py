"""What the processes of the cluster campaign agree on: those of the other campaigns, and a topic that never rests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import txmq
from tools.crash.directory import AUDIT, ORDERS, PAYMENTS, SCRAP, CampaignDirectory
from tools.crash.groups.directory import PARTITIONS as GROUP_PARTITIONS
from tools.crash.groups.directory import TOPIC as GROUP_TOPIC
from tools.crash.ordered.directory import PARTITIONS as ORDERED_PARTITIONS
from tools.crash.xa.directory import XA_PARTITIONS, XaCampaignDirectory

PULSE: Final = "pulse"
PARTITIONS: Final = {
    ORDERS: 3, PAYMENTS: 3, AUDIT: 2, SCRAP: 1, GROUP_TOPIC: GROUP_PARTITIONS, PULSE: 6, **XA_PARTITIONS,
    **ORDERED_PARTITIONS,
}  # fmt: skip
STREAMED: Final = "streamed"  # what the Spark stream makes of the pulse
STREAMED_PARTITIONS: Final = 3  # one at each home: each batch is a transaction over all


class ClusterCampaignDirectory(XaCampaignDirectory):
    """One campaign's directory: both the SQLite file and the two MariaDB servers."""

    @property
    def partitions(self) -> Mapping[str, int]:
        return PARTITIONS

    def make_databases(self) -> None:
        CampaignDirectory.make_databases(self)
        super().make_databases()

    def resolver_resources(self) -> str:
        return f"{CampaignDirectory.resolver_resources(self)}\n{super().resolver_resources()}"

    def install(self, client: txmq.Client) -> dict[str, str]:
        return CampaignDirectory.install(self, client) | super().install(client)

    def rows(self) -> dict[str, list[tuple[str, str]]]:
        return CampaignDirectory.rows(self) | super().rows()
