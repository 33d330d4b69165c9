"""Metadata stands in pyproject.toml. Here: with TXMQ_COMPILE=1 hot modules become C extensions (docs/compiled.md)."""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path

from setuptools import setup

BUILDS = {"build", "build_ext", "bdist_wheel"}  # not an editable install: there, the source is what runs


def extensions() -> list[object]:
    """The modules that pyproject.toml lists, as extensions; none unless asked for."""
    if os.environ.get("TXMQ_COMPILE", "0") != "1" or not BUILDS.intersection(sys.argv):
        return []
    try:
        from mypyc.build import mypycify
    except ImportError:
        raise SystemExit("TXMQ_COMPILE=1 needs mypy: pip install 'mypy>=2.4' setuptools, and repeat") from None
    modules = tomllib.loads(Path("pyproject.toml").read_text("utf-8"))["tool"]["txmq"]["compiled"]
    options = ["--config-file=", "--python-version=3.11", "--ignore-missing-imports", "--follow-imports=silent"]
    # Of its own name: two copies of txmq in one process would else share one library.
    built: list[object] = mypycify(
        [*options, *modules], opt_level="2", debug_level="0", multi_file=True, group_name="txmq"
    )
    return built


setup(ext_modules=extensions())
