"""``make wheel``: into dist/, a wheel with compiled modules for each Python there is, and one of the source.

pip takes a compiled one if it fits, and the source's on every other Python, system or processor (docs/compiled.md).
Each is built from a copy of the checkout, because setuptools would add what is left in build/.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.pythons import candidates, pythons

ROOT = Path(__file__).resolve().parents[1]
_NOT_IN_IT = {"build", "dist", "tests", "tools", "bench", "bench-results", "var"}


def copy(target: Path) -> Path:
    """What a wheel is built from, and nothing that a former build has left."""

    def ignored(directory: str, names: list[str]) -> set[str]:
        left = {name for name in names if name in _NOT_IN_IT or name.startswith(".") or name.endswith(".egg-info")}
        return {"__pycache__"} | (left if Path(directory) == ROOT else set())

    return Path(shutil.copytree(ROOT, target, ignore=ignored))


def build(python: str, directory: Path, *, compiled: bool) -> str:
    """One wheel. Returns why it could not be built; empty if it was."""
    with tempfile.TemporaryDirectory(prefix="txmq-wheel-") as name:
        done = subprocess.run(
            [sys.executable, "-m", "pip", "--python", python, "wheel", "-q", "--disable-pip-version-check", "--no-deps",
             "-w", str(directory), str(copy(Path(name, "txmq")))],
            env=os.environ | {"TXMQ_COMPILE": "1" if compiled else "0"}, capture_output=True, text=True, check=False,
        )  # fmt: skip
    return "" if done.returncode == 0 else "\n".join((done.stdout + done.stderr).splitlines()[-15:])


def main(arguments: list[str] | None = None) -> int:
    """Build them; 1 if one could not be built."""
    parser = argparse.ArgumentParser(prog="python -m tools.wheels", description=main.__doc__)
    parser.add_argument("--directory", type=Path, default=Path("dist"), help="where the wheels go")
    parser.add_argument("--source", action="store_true", help="only the wheel of the source")
    options = parser.parse_args(arguments)
    directory: Path = options.directory.resolve()
    chosen = {} if options.source else pythons((sys.executable, *candidates()))
    failed = 0
    for name, python, compiled in [*((n, p, True) for n, p in chosen.items()), ("source", sys.executable, False)]:
        problem = build(python, directory, compiled=compiled)
        print(f"{name}: {problem or 'built'}", flush=True)
        failed += bool(problem)
    print(*sorted(path.name for path in directory.glob("txmq-*.whl")), sep="\n")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
