"""The files that this process has open."""

from __future__ import annotations

from pathlib import Path


def open_files(folder: Path) -> list[str]:
    """The open files and directories at or below ``folder``, by path."""
    names = [str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.exists()]
    return sorted(name for name in names if Path(name).is_relative_to(folder))
