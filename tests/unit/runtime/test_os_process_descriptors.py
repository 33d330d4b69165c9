"""How descriptors are divided: the broker needs some for itself, and no file gets 0 to 2."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from txmq.runtime import os_process


@pytest.mark.parametrize("limit", [64, 100, 256, 1024, 4096, 20_000, 1 << 20])
@pytest.mark.parametrize("connections", [1, 50, 10_000, 1_000_000])
@pytest.mark.parametrize("files", [8, 256, 1_000_000])
def test_parts_fit_limit_and_are_never_more_than_asked_for(limit: int, connections: int, files: int) -> None:
    budget = os_process.divide_descriptors(limit, connections, files)
    assert budget is not None
    assert os_process.DESCRIPTORS_OWN + budget.connections + budget.files + budget.backlog <= limit
    assert min(connections, os_process.CONNECTIONS_MIN) <= budget.connections <= connections
    assert min(files, os_process.FILES_MIN) <= budget.files <= files


def test_both_have_all_they_want_under_the_requested_limit() -> None:
    limit = os_process.needed(10_000, 256)
    assert os_process.divide_descriptors(limit, 10_000, 256) == (10_000, 256, os_process.BACKLOG_MAX)


@pytest.mark.parametrize("limit", [0, 20, 55])
def test_a_limit_that_leaves_nothing_for_connections_is_none(limit: int) -> None:
    assert os_process.divide_descriptors(limit, 100, 100) is None


def test_a_limit_that_suffices_is_left_as_it_is() -> None:
    now = os_process.raise_descriptor_limit(1)
    assert now > 1
    assert os_process.raise_descriptor_limit(now) == now


PROGRAM = """
import os, sys
from txmq.runtime.os_disk import OSDisk
file = OSDisk(sys.argv[1]).open("file", create=True)
for number in range(3):
    os.write(number, b"last words")
    assert os.get_inheritable(number)
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_no_file_gets_the_number_of_a_closed_stream(closed: str, tmp_path: Path) -> None:
    """Python's faulthandler, ``print`` and child processes write to 1 and 2, whatever these are."""
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert (tmp_path / "file").read_bytes() == b""
    assert done.returncode == 0
