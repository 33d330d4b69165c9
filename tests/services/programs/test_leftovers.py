"""Folders of a file's fixtures go with the file, unless something in it failed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CONFTEST = """
import pytest
from tests.leftovers import LASTING, Leftovers

@pytest.fixture(scope="session", autouse=True)
def lasting(request, tmp_path_factory):
    request.config.pluginmanager.register(Leftovers(tmp_path_factory.getbasetemp()))
    (tmp_path_factory.getbasetemp() / ".lock").touch()  # as pytest does where it chooses the folder by itself
    return tmp_path_factory.mktemp(f"{LASTING}-one")

@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
    made = tmp_path_factory.mktemp(request.module.__name__)
    made.with_suffix(".log").touch()
    yield made
    assert "end" not in request.module.__name__
"""
PASSES = "def test_first(folder): pass\ndef test_second(folder): pass\n"
FAILS = "def test_it(folder): assert 'fails' not in folder.name\ndef test_second(folder): pass\n"
FILES = {"test_a": PASSES, "test_b_fails": FAILS, "test_c": PASSES, "test_d_end": PASSES, "test_e": PASSES}


@pytest.mark.parametrize("workers", [(), ("-n", "1", "--dist", "loadfile")], ids=["alone", "worker"])
def test_only_folders_of_files_that_failed_stay(tmp_path: Path, workers: tuple[str, ...]) -> None:
    source, base = tmp_path / "source", tmp_path / "base"
    source.mkdir()
    (source / "conftest.py").write_text(CONFTEST)
    for name, text in FILES.items():
        (source / f"{name}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *workers, f"--basetemp={base}"]
    done = subprocess.run(
        [*command, "--rootdir", str(source), "-c", "/dev/null", "-o", f"pythonpath={ROOT}", str(source)],
        cwd=source, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "1 failed, 9 passed, 1 error" in done.stdout, done.stdout + done.stderr
    left = {path.name for path in (base / "popen-gw0" if workers else base).iterdir() if not path.is_symlink()}
    assert left - {"popen-gw0"} == {
        ".lock", "session-one0", "test_b_fails0", "test_b_fails0.log", "test_d_end0", "test_d_end0.log"
    }  # fmt: skip
