"""The options that all ``txmq binlog`` commands have, and the file that they name."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from txmq.errors import ConfigError

if TYPE_CHECKING:
    from txmq.binlog.config import BinlogSettings

Config = Annotated[
    Path, typer.Option("--config", metavar="FILE", help="TOML file: docs/configuration-binlog.md.", show_default=False)
]
Address = Annotated[
    str | None,
    typer.Option(
        "--bootstrap", "-b", envvar="TXMQ_BOOTSTRAP", metavar="txmq://HOST:PORT", help="Goes before the file's."
    ),
]
Snapshot = Annotated[
    str | None,
    typer.Option(
        "--snapshot", metavar="initial|never|only|TABLES",
        help="Goes before the file's snapshot.mode: which rows are read before their changes.",
    ),
]  # fmt: skip

Skip = Annotated[
    list[str] | None,
    typer.Option(
        "--skip", metavar="GTID",
        help="Pass over this transaction's changes without row events; --snapshot its tables.",
    ),
]  # fmt: skip


def settings_of(
    config: Path, bootstrap: str | None, snapshot: str | None = None, *, unused: str = ""
) -> BinlogSettings:
    """What the file says.

    Args:
        unused: a table of it that the command does not need.

    Raises:
        ConfigError: names the file and the key.
    """
    from txmq.binlog.config import read_settings

    try:
        settings = read_settings(config.read_text("utf-8"), os.environ, unused)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {config}: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{config}: {error}") from None
    if bootstrap is not None:
        settings = replace(settings, bootstrap=bootstrap)
    return settings if snapshot is None else replace(settings, snapshot=replace(settings.snapshot, mode=snapshot))
