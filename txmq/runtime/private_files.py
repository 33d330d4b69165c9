"""Files and directories that only their owner may read: what holds messages or secrets outside a data directory.

Invariants:

* a file that is made here has mode 0600, a directory 0700, from its first moment on and whatever the umask is;
* what is there already keeps the mode that its owner gave it;
* a secret is read from no file that others may read.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from txmq.errors import ConfigError

_FILE_MODE, _DIRECTORY_MODE = 0o600, 0o700


def open_private(path: Path | str, mode: str) -> IO[Any]:
    """As ``open`` for writing: ``x`` a new file, ``w`` in place of what was there, ``a`` after it; with ``b`` bytes.

    Text is UTF-8. Raises OSError: it cannot be opened, or with ``x`` exists.
    """
    encoding = None if "b" in mode else "utf-8"
    return open(path, mode, encoding=encoding, opener=_opened)  # Path.open has no opener


def _opened(path: str, flags: int) -> int:
    return os.open(path, flags, _FILE_MODE)


@contextmanager
def private_umask() -> Iterator[None]:
    """Programs that are started in the block make private files, and none else."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def make_private_directory(path: Path | str, *, exist_ok: bool = True) -> None:
    """Make a directory; those above it, if they are missing, are not private. Raises OSError."""
    Path(path).mkdir(mode=_DIRECTORY_MODE, parents=True, exist_ok=exist_ok)


def read_private(path: Path | str) -> str:
    """The text of a file that only its owner may read.

    Raises:
        ConfigError: others may, or it cannot be read; the text does not hold it.
    """
    try:
        with Path(path).open(encoding="utf-8") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            content = file.read()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "no UTF-8"
        raise ConfigError(f"{path}: cannot be read: {why}") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):  # as PostgreSQL's .pgpass
        raise ConfigError(f"{path}: not its owner alone may read it (mode {mode:04o}); chmod 600 {path}")
    return content


def write_private(path: Path | str, content: str | bytes, mode: str = "x") -> None:
    """Write all of a file; ``mode`` is ``x`` or ``w``. Raises as ``open_private``."""
    with open_private(path, mode if isinstance(content, str) else f"{mode}b") as file:
        file.write(content)
