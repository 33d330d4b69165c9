"""What the processes of the group campaign agree on: names, numbers, files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import txmq
from tools.checkers.events import History, merge, parse_history
from tools.checkers.groups import GROUP_LINES, GroupHistory, parse_group_history

TOPIC: Final = "work"
GROUP: Final = "workers"
PARTITIONS: Final = 12
MEMBERS: Final = 6
# Shorter than the defaults (6 s and 1 s): a member that is paused is given up, and its partitions are owned again,
# within the 3 s that the campaign allows.
SESSION_TIMEOUT_S: Final = 2.0
HEARTBEAT_S: Final = 0.5
SAVE_S: Final = 0.3


def member_options(name: str) -> txmq.ConsumerOptions:
    """Of every member of the campaign."""
    return txmq.ConsumerOptions(
        name=name, session_timeout=SESSION_TIMEOUT_S, heartbeat_interval=HEARTBEAT_S, offset_save_interval=SAVE_S
    )


@dataclass(frozen=True, slots=True)
class GroupCampaignDirectory:
    """One campaign's directory."""

    directory: Path

    @property
    def broker(self) -> Path:
        """The broker's data directory."""
        return self.directory / "broker"

    @property
    def histories(self) -> Path:
        """One file per process that ever ran."""
        return self.directory / "history"

    def read(self) -> tuple[History, GroupHistory]:
        """What all processes have written so far: messages, and what the group did with them."""
        files = sorted(self.histories.iterdir())
        events = list(merge([file.read_text("utf-8").splitlines(keepends=True) for file in files]))
        return parse_history(event for event in events if event["f"] not in GROUP_LINES), parse_group_history(events)
