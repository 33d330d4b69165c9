"""Whether a decided XA branch has a heuristic outcome: the meaning of its database's answer. No I/O.

======================  =============  ======================================================
the database's answer   marker         verdict
======================  =============  ======================================================
done                                   DONE
not known, rolled back  committed      DONE: it was committed before
not known, rolled back  none           LOST: it was rolled back alone (heuristic rollback)
not known               not kept       HAZARD if the branch wrote, else DONE
rolled back             not kept       LOST if the branch wrote, else DONE
======================  =============  ======================================================

Invariants:
    * "not known" alone never counts as done: a later XA RECOVER must not list the branch either (one that is listed is
      held by its owner's session, and has no verdict yet), and its marker row must be there.
"""

from __future__ import annotations

import enum

from txmq.xa.database import marker_table
from txmq.xa.two_phase.resource_ports import Ended


class Verdict(enum.Enum):
    """The meaning of a database's answer about a decided branch."""

    DONE = "done"
    LOST = "rolled back alone"
    HAZARD = "not known what became of it"


def verdict(ended: Ended, *, outcome: str | None, has_marker: bool, wrote: bool) -> Verdict:
    """Judge a branch that XA RECOVER does not list after the database's answer; see the table above.

    Args:
        outcome: of the marker row, read after XA RECOVER.
    """
    if ended is Ended.DONE:
        return Verdict.DONE
    if has_marker:
        return Verdict.DONE if outcome == marker_table.COMMITTED else Verdict.LOST
    if not wrote:
        return Verdict.DONE
    return Verdict.LOST if ended is Ended.ROLLED_BACK else Verdict.HAZARD
