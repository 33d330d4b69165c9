"""``make pythons``: tests of what leans on the version of Python, on each other one that there is.

On this one they are part of ``make check``. What cannot be had is said, and is no failure: an interpreter that is not
here, or one that packages cannot be installed for.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("python3.11", "python3.12", "python3.13", "python3.14")
PYENV = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
PACKAGES = (
    "pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "cryptography", "mysqlclient", "sqlalchemy", "django",
    "psycopg[binary]", "pymysql",
)  # fmt: skip
TESTS = (
    "tests/vectors", "tests/unit/aio", "tests/unit/client", "tests/unit/runtime", "tests/unit/broker/shell",
    "tests/unit/outbox", "tests/unit/xa", "tests/unit/test_public_api.py",
)  # fmt: skip
_VERSION = "import sys; print(sys.implementation.name, '%d.%d' % sys.version_info[:2])"


def pythons(candidates: Iterable[str]) -> dict[str, str]:
    """The interpreters that run, each version once: what it is, and its path."""
    found: dict[str, str] = {}
    for candidate in candidates:
        path = shutil.which(candidate)
        if path is None:
            continue
        said = subprocess.run([path, "-c", _VERSION], capture_output=True, text=True, check=False)
        if said.returncode == 0:
            found.setdefault(said.stdout.strip(), path)
    return found


def candidates() -> Iterator[str]:
    """Where interpreters may be: on the path, and in pyenv, the newest of each version first."""
    for name in NAMES:
        yield name
        version = name.removeprefix("python")
        newest = sorted(PYENV.glob(f"{version}.*"), key=lambda path: int("0" + path.name.rpartition(".")[2]))
        yield from (str(path / "bin" / name) for path in reversed(newest))


def run(name: str, python: str, workers: int) -> tuple[bool, str]:
    """The tests on one interpreter. Returns whether none failed, and how it went."""
    place = ROOT / "build" / "pythons" / name.replace(" ", "-")
    own = place / "bin" / "python"
    for command in (
        [python, "-m", "venv", str(place)],
        [str(own), "-m", "pip", "install", "-q", "--no-compile", "--disable-pip-version-check", "-e", f"{ROOT}[aio]",
         *PACKAGES],
    ):  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        if done.returncode:
            return True, f"not run, what it needs cannot be installed: {(done.stdout + done.stderr).strip()[-500:]}"
    tests = [str(own), "-m", "pytest", "-q", "-n", str(workers), "--dist", "loadfile", *TESTS]
    status = subprocess.run(tests, check=False, cwd=ROOT).returncode
    return status == 0, "passed" if status == 0 else f"FAILED with status {status}"


def main(arguments: list[str] | None = None) -> int:
    """Run them; 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.pythons", description=__doc__)
    parser.add_argument("--workers", type=int, default=2, help="processes that run tests (default %(default)s)")
    options = parser.parse_args(arguments)
    ours, *_ = pythons([sys.executable])
    found = pythons([sys.executable, *candidates()])
    said = {f"cpython {name.removeprefix('python')}": (True, "not run, it is not here") for name in NAMES}
    for name in found.keys() - {ours}:
        said[name] = run(name, found[name], options.workers)
    said.pop(ours, None)
    for name, (_, text) in sorted(said.items()):
        print(f"{name}: {text}", flush=True)
    return int(not all(is_sound for is_sound, _ in said.values()))


if __name__ == "__main__":
    raise SystemExit(main())
