"""Waiting for what was acknowledged to be visible: an answer follows the journal, the watermark the partition files."""

from __future__ import annotations

import txmq

DEADLINE_S = 60.0


def wait_until_visible(client: txmq.Client, topic: str, count: int) -> None:
    """Wait until the ends of the topic's partitions add up to ``count`` messages or more."""
    deadline = client.clock.monotonic() + DEADLINE_S
    while (seen := sum(held["end"] for held in client.topics.watermarks(topic))) < count:
        assert client.clock.monotonic() < deadline, f"{seen} of {count} messages are visible"
        client.clock.sleep(0.01)
