"""Which build of txmq runs, where its pages are, and how what it may need besides is installed.

txmq is on no package index. The wheel holds the pages and examples that help texts and errors name (``setup.py``); in a
checkout they are where they always are.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from txmq.runtime import net

VERSION = "0.1.0"  # pyproject.toml takes it from here


def is_compiled() -> bool:
    """Whether the modules that pyproject.toml lists under ``tool.txmq.compiled`` run as C extensions."""
    return not net.__file__.endswith(".py")


def pages() -> Path:
    """The directory below which ``docs/`` and ``examples/`` are."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "pages"
    return installed if installed.is_dir() else package.parent


def how_to_install(extra: str) -> str:
    """The command that installs what one of txmq's extras needs, whether it came from a checkout or a wheel."""
    from importlib.metadata import requires

    needed = [line.partition(";")[0].strip() for line in requires("txmq") or () if f'extra == "{extra}"' in line]
    return f"pip install {shlex.join(needed)}"
