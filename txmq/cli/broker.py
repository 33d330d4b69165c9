"""``txmq broker``: run a broker in the foreground until SIGTERM or Ctrl-C."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from txmq.cli import output
from txmq.config import BrokerSettings
from txmq.config_sources import load_settings, parse_assignments
from txmq.errors import ConfigError, CorruptRecordError, StorageError


def broker(
    data: Annotated[
        str | None, typer.Option("--data", metavar="DIR", help="Data directory; created if absent. [var/txmq]")
    ] = None,
    listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Address; port 0 takes a free one. [127.0.0.1:8123]")
    ] = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="TOML file with settings.")] = None,
    ready_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Appears, holding the real address, once the broker serves.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow an address other than loopback: there is no authentication.")
    ] = False,
    registry: Annotated[
        str | None, typer.Option(metavar="zk://HOST,.../PATH", help="ZooKeeper ensemble of several brokers. [none]")
    ] = None,
    sync: Annotated[
        str | None, typer.Option(metavar="always|interval|never", help="When plain puts are answered. [always]")
    ] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any other setting; may be repeated.")
    ] = None,
    show_settings: Annotated[
        bool, typer.Option("--show-settings", help="Print the settings that would be used, and end.")
    ] = False,
    as_json: output.Json = False,
) -> None:
    """Run a broker until SIGTERM or Ctrl-C.

    Settings come from the TOML file, then the environment (TXMQ_SYNC=interval), then flags; the later one wins.
    Logs are JSON lines on standard error. docs/configuration.md lists every setting.

    [bold]Examples[/bold]

      txmq broker --data var/txmq
      txmq broker --listen 127.0.0.1:0 --ready-file ready.txt
      txmq broker --config broker.toml --set sync_interval_ms=20
      txmq broker --config broker.toml --show-settings
    """
    flags = parse_assignments(assignments or [])
    named = {"data": data, "listen": listen, "registry": registry, "sync": sync, "insecure": insecure or None}
    for name, value in named.items():
        if value is not None and name in flags:
            raise ConfigError(f"{name} is given twice, by --{name} and by --set; give it once")
        if value is not None:
            flags[name] = value
    settings = load_settings(_read(config), os.environ, flags)
    if show_settings:
        _show(settings, as_json=as_json)
        return
    from txmq.broker.shell import process
    from txmq.runtime import logging

    logging.configure(settings.log_level)
    try:
        raise SystemExit(process.run(settings, ready_file=ready_file))
    except CorruptRecordError as error:
        what_next = 'nothing was changed; docs/operations.md, "When something is wrong", says what can be done'
        raise StorageError(f"{error}; {what_next}") from error


def _read(config: Path | None) -> str | None:
    if config is None:
        return None
    try:
        return config.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration file {config}: {error}") from None


def _show(settings: BrokerSettings, *, as_json: bool) -> None:
    fields = settings.shown()
    if as_json:
        output.print_json(fields)
    else:
        output.print_fields("settings", fields)
