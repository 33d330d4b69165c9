"""The core as the commit pipeline sees it: it makes groups, and hears what became of them."""

from __future__ import annotations

from typing import Protocol

from txmq.broker.commit.commit_group import CommitGroup
from txmq.broker.state.state import State


class Commits(Protocol):
    """See the module's docstring; ``broker/core.py`` is it."""

    @property
    def state(self) -> State:
        """The assigned state."""

    def next_group(self) -> CommitGroup | None:
        """The group that ``seal`` would take; None if nothing is queued."""

    def seal(self) -> CommitGroup:
        """Take that group."""

    def cut(self) -> CommitGroup | None:
        """Close the group in the making. The newest group that is not durable; None if all are."""

    def written(self, group: CommitGroup) -> None:
        """Its record is written: release what does not wait for the sync."""

    def synced(self) -> None:
        """The journal was synced."""

    def durable(self, group: CommitGroup) -> None:
        """Its record is stable: release all its answers."""

    def applied(self, group: CommitGroup) -> None:
        """It is in the partition files: move the watermarks."""

    def put_off(self, group: CommitGroup) -> None:
        """The disk lacks space for it: no read waits for it."""
