"""Metadata stands in pyproject.toml. Here: the pages that go into the wheel; with TXMQ_COMPILE=1, compiled modules.

The latter are C extensions of hot modules (docs/compiled.md).
"""

from __future__ import annotations

import os
import shutil
import sys
import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

BUILDS = {"build", "build_ext", "bdist_wheel"}  # not an editable install: there, the source is what runs


def listed(name: str) -> list[str]:
    """A list of pyproject.toml's ``tool.txmq``."""
    found: list[str] = tomllib.loads(Path("pyproject.toml").read_text("utf-8"))["tool"]["txmq"][name]
    return found


def extensions() -> list[object]:
    """The modules that pyproject.toml lists, as extensions; none unless asked for."""
    if os.environ.get("TXMQ_COMPILE", "0") != "1" or not BUILDS.intersection(sys.argv):
        return []
    try:
        from mypyc.build import mypycify
    except ImportError:
        raise SystemExit("TXMQ_COMPILE=1 needs mypy: pip install 'mypy>=2.4' setuptools, and repeat") from None
    modules = listed("compiled")
    options = ["--config-file=", "--python-version=3.11", "--ignore-missing-imports", "--follow-imports=silent"]
    # Of its own name: two copies of txmq in one process would else share one library.
    built: list[object] = mypycify(
        [*options, *modules], opt_level="2", debug_level="0", multi_file=True, group_name="txmq"
    )
    return built


class WithPages(build_py):
    """The package, with its pages and examples as ``txmq/pages``; in an editable install they stay where they are."""

    def run(self) -> None:
        """Build, and copy them."""
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib, "txmq", "pages")
        for name in listed("pages"):
            source, copy = Path(name), target / name
            if source.is_dir():
                shutil.copytree(source, copy, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, copy)


setup(ext_modules=extensions(), cmdclass={"build_py": WithPages})
