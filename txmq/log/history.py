"""Which log an offset counts in: the topic's id, and the lives of the broker in which its messages were appended.

Theory of operation. A *life* is what a broker appends between two starts; each start draws its number at random and
journals it. A partition keeps the offset at which each life began in it. If an older copy of a data directory is put
back, what follows is appended in a life that the replaced directory never had. So two histories of one partition say
by themselves how far the two logs are the same: to the nearer end of the newest life that both have. An offset kept
outside of the broker is worth something only with the history under which it was read.

    <topic id>[,<life, 16 hex digits>:<offset at which it began>]...

Invariants:
    * lives are in the order of their offsets; one in which nothing was appended is replaced by the next one;
    * the newest ``LIVES_MAX`` are kept: a position from before those cannot be told apart, and begins anew.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Final, NamedTuple

from txmq.errors import StorageError

Lives = tuple[tuple[str, int], ...]  # each life, and the offset at which it began
LIVES_MAX: Final = 32
NO_LIFE: Final = "0" * 16
_TEXT: Final = re.compile(r"[0-9]{1,10}(?:,[0-9a-f]{16}:[0-9]{1,20}){0,64}")


def with_life(lives: Lives, life: str, offset: int) -> Lives:
    """A life begins at an offset; the one before is forgotten if nothing was appended in it."""
    if lives and lives[-1][1] == offset:
        lives = lives[:-1]
    return (*lives[1 - LIVES_MAX :], (life, offset))


class LogHistory(NamedTuple):
    """See the module's docstring."""

    topic_id: int
    lives: Lives

    @property
    def text(self) -> str:
        """What ``parsed`` reads."""
        return ",".join([str(self.topic_id), *(f"{life}:{offset}" for life, offset in self.lives)])

    @property
    def log(self) -> str:
        """The log as it is now, in its newest life: what ``get`` takes."""
        return log_name(self.topic_id, self.lives[-1][0] if self.lives else NO_LIFE)

    def log_at(self, offset: int) -> str:
        """The log whose message is at an offset: with that, the partition and the offset a message has an identity."""
        life = next((life for life, began in reversed(self.lives) if began <= offset), NO_LIFE)
        return log_name(self.topic_id, life)

    def shared_with(self, other: LogHistory, offset: int) -> int | None:
        """How far what was read below ``offset`` is the same in both; None if one of them is of another topic."""
        if self.topic_id != other.topic_id:
            return None
        ends = _ends(other.lives)
        for life, end in reversed(_ends(self.lives).items()):
            if life in ends:
                return min(at for at in (offset, end, ends[life]) if at is not None)
        return 0

    def has_read(self, log: str, offset: int) -> bool:
        """Whether somebody who read up to ``offset`` in a log, as ``log`` names it, may go on in this one."""
        for life, end in _ends(self.lives).items():
            if log_name(self.topic_id, life) == log:
                return end is None or offset <= end
        return False


def log_name(topic_id: int, life: str) -> str:
    """A topic's log in one life."""
    return f"{topic_id}.{life}"


def parsed(text: str) -> LogHistory:
    """The reverse of ``LogHistory.text``.

    Raises:
        StorageError: it is no history.
    """
    if _TEXT.fullmatch(text) is None:
        raise StorageError(f"{text[:80]!r} is no history of a log: was it written by another program?")
    topic_id, *lives = text.split(",")
    return LogHistory(int(topic_id), tuple((life[:16], int(life[17:])) for life in lives))


def _ends(lives: Lives) -> dict[str, int | None]:
    """By life, the offset at which the next one began; None for the newest."""
    ends: dict[str, int | None] = {life: following for (life, _), (_, following) in pairwise(lives)}
    if lives:
        ends[lives[-1][0]] = None
    return ends
