"""A group whose requests tolerate a delay waits a moment for others, so that it needs no sync of its own.

Theory of operation. The owner of an XA transaction does not wait for the answer to ``complete``. If one is lost, the
resolver reports the branch again. A ``commit`` says by itself that no caller waits for its answer (``delayable``): the
database of a last resource has decided, or another home. So a group that holds nothing else
(``CommitGroup.may_be_delayed``) is kept for ``WAIT_S``; the first request that is in a hurry takes it along, mostly the
``decide`` or ``prepare`` of another transaction. Readers see the messages that much later.

Invariants:
    * a group waits once, and no longer than ``WAIT_S`` and its driver's own delay;
    * a broker that stops waits for nothing.
"""

from __future__ import annotations

from math import inf
from typing import Final

from txmq.broker.commit.commit_group import CommitGroup

WAIT_S: Final = 0.001


class CommitDelay:
    """See the module's docstring.

    Attributes:
        until: when the group that waits goes; infinite if none waits.
    """

    def __init__(self) -> None:
        self.until = inf

    def keeps(self, group: CommitGroup, now: float) -> bool:
        """Whether the group must wait."""
        if not group.may_be_delayed:
            return False
        if self.until == inf:
            self.until = now + WAIT_S
        return now < self.until

    def end(self) -> None:
        """The group goes."""
        self.until = inf
