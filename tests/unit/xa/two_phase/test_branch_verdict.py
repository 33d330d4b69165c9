"""What a database's answer about a decided branch means: every combination."""

from __future__ import annotations

import itertools

import pytest

from txmq.xa.two_phase.branch_verdict import Verdict, verdict
from txmq.xa.two_phase.resource_ports import Ended


@pytest.mark.parametrize(
    ("ended", "outcome", "has_marker", "wrote"),
    list(itertools.product(Ended, ("committed", "rolled-back", "none", None), (False, True), (False, True))),
)
def test_every_verdict(ended: Ended, outcome: str | None, has_marker: bool, wrote: bool) -> None:
    found = verdict(ended, outcome=outcome, has_marker=has_marker, wrote=wrote)
    if ended is Ended.DONE:
        expected = {Verdict.DONE}
    elif has_marker:
        expected = {Verdict.DONE if outcome == "committed" else Verdict.LOST}
    elif not wrote:
        expected = {Verdict.DONE}
    else:
        expected = {Verdict.LOST if ended is Ended.ROLLED_BACK else Verdict.HAZARD}
    assert {found} == expected
