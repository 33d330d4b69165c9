"""How descriptors are divided: what the broker needs for itself is never given to connections."""

from __future__ import annotations

import pytest

from txmq.runtime import descriptors


@pytest.mark.parametrize("limit", [64, 100, 256, 1024, 4096, 20_000, 1 << 20])
@pytest.mark.parametrize("connections", [1, 50, 10_000, 1_000_000])
@pytest.mark.parametrize("files", [8, 256, 1_000_000])
def test_parts_fit_limit_and_are_never_more_than_asked_for(limit: int, connections: int, files: int) -> None:
    budget = descriptors.divide(limit, connections, files)
    assert budget is not None
    assert descriptors.OWN + budget.connections + budget.files + budget.backlog <= limit
    assert min(connections, descriptors.CONNECTIONS_MIN) <= budget.connections <= connections
    assert min(files, descriptors.FILES_MIN) <= budget.files <= files


def test_both_have_all_they_want_under_the_requested_limit() -> None:
    limit = descriptors.needed(10_000, 256)
    assert descriptors.divide(limit, 10_000, 256) == (10_000, 256, descriptors.BACKLOG_MAX)


@pytest.mark.parametrize("limit", [0, 20, 55])
def test_a_limit_that_leaves_nothing_for_connections_is_none(limit: int) -> None:
    assert descriptors.divide(limit, 100, 100) is None


def test_a_limit_that_suffices_is_left_as_it_is() -> None:
    now = descriptors.raise_limit(1)
    assert now > 1
    assert descriptors.raise_limit(now) == now
