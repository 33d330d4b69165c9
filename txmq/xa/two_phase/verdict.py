"""What a database's answer about a decided XA branch means. No I/O.

======================  ========  =============  =========================================================
the database's answer   listed    marker         verdict
======================  ========  =============  =========================================================
done                                             DONE
not known               yes                      HELD: the owner's session
not known               no        committed      DONE: it was committed before
not known, rolled back  no        none           LOST: it was rolled back alone (heuristic rollback)
not known               no        not kept       HAZARD where it wrote, else DONE
rolled back             no        not kept       LOST where it wrote, else DONE
======================  ========  =============  =========================================================

Invariants:
    * "not known" never counts as done by itself: the branch must be gone from a later XA RECOVER, and its marker row
      must be there.
"""

from __future__ import annotations

import enum

from txmq.xa.database import marker
from txmq.xa.two_phase.branch import Ended


class Verdict(enum.Enum):
    """What a database's answer about a decided branch means."""

    DONE = "done"
    HELD = "held by its owner's session"
    LOST = "rolled back alone"
    HAZARD = "not known what became of it"


def verdict(ended: Ended, *, is_listed: bool, outcome: str | None, has_marker: bool, wrote: bool) -> Verdict:
    """See the table above.

    Args:
        is_listed: by XA RECOVER, asked behind the answer.
        outcome: of the marker row, read behind both.
    """
    if ended is Ended.DONE:
        return Verdict.DONE
    if is_listed:
        return Verdict.HELD
    if has_marker:
        return Verdict.DONE if outcome == marker.COMMITTED else Verdict.LOST
    if not wrote:
        return Verdict.DONE
    return Verdict.LOST if ended is Ended.ROLLED_BACK else Verdict.HAZARD
