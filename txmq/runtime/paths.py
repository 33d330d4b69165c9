"""Paths below a data directory: relative POSIX strings, checked once and the same way by every Disk.

Invariants: no absolute path, no ``.``, ``..`` or empty component, no NUL, no backslash. The data directory itself is
``""`` (``"."`` is accepted for it).
"""

from __future__ import annotations

from functools import lru_cache

ROOT = ""


@lru_cache(maxsize=4096)
def split(path: str) -> tuple[str, ...]:
    """The components of ``path``; empty for the data directory.

    Raises:
        ValueError: the path could leave the data directory, or has more than one form.
    """
    if path in (ROOT, "."):
        return ()
    parts = tuple(path.split("/"))
    if any(part in ("", ".", "..") for part in parts) or "\0" in path or "\\" in path:
        raise ValueError(f"not a relative path below the data directory: {path!r}")
    return parts


def normal(path: str) -> str:
    """The one form of ``path``."""
    return "/".join(split(path))


def parent(path: str) -> str:
    """The directory that holds ``path``."""
    return "/".join(split(path)[:-1])
