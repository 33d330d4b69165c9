"""``txmq broker``: run a broker in the foreground until SIGTERM or Ctrl-C; ``init`` makes what it needs first."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from txmq.cli import output
from txmq.cli.access.passwords import PasswordFile, first_password
from txmq.config import BrokerSettings
from txmq.config_sources import load_settings, parse_assignments
from txmq.errors import ConfigError, CorruptRecordError, StorageError

app = typer.Typer(
    invoke_without_command=True, subcommand_metavar="[COMMAND]", help="Run a broker, or make what it needs first."
)


InsecurePlaintext = Annotated[
    bool, typer.Option("--insecure-plaintext", help="Let other machines connect without TLS.")
]
InsecureAnonymous = Annotated[
    bool, typer.Option("--insecure-anonymous", help="Let other machines connect without a client certificate.")
]


@app.callback()
def broker(
    context: typer.Context,
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
    insecure_plaintext: InsecurePlaintext = False,
    insecure_anonymous: InsecureAnonymous = False,
    registry: Annotated[
        str | None,
        typer.Option(
            metavar="zk://HOST,.../PATH",
            help="ZooKeeper ensemble of several brokers; one with a password in the file or TXMQ_REGISTRY. [none]",
        ),
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
      txmq broker init --tls-dev                     certificates for a first try
    """
    if context.invoked_subcommand is not None:
        if any(value for value in context.params.values()):
            raise ConfigError(f"options stand behind the command: txmq broker {context.invoked_subcommand} --help")
        return
    named = {
        "data": data, "listen": listen, "registry": registry, "sync": sync,
        "insecure_plaintext": insecure_plaintext or None, "insecure_anonymous": insecure_anonymous or None,
    }  # fmt: skip
    settings = load_settings(_read(config), os.environ, _flags(named, assignments or []))
    if show_settings:
        _show(settings, as_json=as_json)
    else:
        _run(settings, ready_file)


def _flags(named: Mapping[str, object], assignments: Sequence[str]) -> dict[str, object]:
    flags: dict[str, object] = dict(parse_assignments(assignments))
    for name, value in named.items():
        if value is not None and name in flags:
            raise ConfigError(f"{name} is given twice, by --{name.replace('_', '-')} and by --set; give it once")
        if value is not None:
            flags[name] = value
    return flags


def _run(settings: BrokerSettings, ready_file: Path | None) -> None:
    from txmq.broker.shell import process
    from txmq.runtime import logging

    logging.configure(settings.log_level)
    try:
        raise SystemExit(process.run(settings, ready_file=ready_file))
    except CorruptRecordError as error:
        what_next = 'nothing was changed; docs/operations.md, "When something is wrong", says what can be done'
        raise StorageError(f"{error}; {what_next}") from error


@app.command("init")
def init(
    data: Annotated[str, typer.Option("--data", metavar="DIR", help="Data directory; made if absent.")] = "var/txmq",
    tls_dev: Annotated[
        bool, typer.Option("--tls-dev", help="Make a CA of your own, and certificates for a broker and a client.")
    ] = False,
    hosts: Annotated[
        list[str] | None,
        typer.Option(
            "--host", metavar="NAME", help="Name or address of the broker, beside localhost; may be repeated."
        ),
    ] = None,
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Address to serve on.")] = "127.0.0.1:8123",
    admin: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="First user, who may do everything; nobody else is served."),
    ] = None,
    password_file: PasswordFile = None,
    generate_password: Annotated[
        bool, typer.Option("--generate-password", help="Draw the password of --admin, and print it once.")
    ] = False,
    as_json: output.Json = False,
) -> None:
    """Make a data directory and the settings of a broker in it, and print what to paste into a client.

    With --tls-dev the broker takes TLS only, from clients with a certificate of the CA that is made. That is for a
    first try: whoever reads the CA's key, in the data directory, can be anybody. With --admin a client logs in instead
    of showing a certificate. Nothing that exists is overwritten.

    [bold]Examples[/bold]

      txmq broker init --tls-dev
      txmq broker init --tls-dev --admin ops                asks for a password
      txmq broker init --tls-dev --admin ops --generate-password
      txmq broker init --tls-dev --listen 0.0.0.0:8123 --host broker1.example.org
    """
    from txmq.cli import broker_init

    first = None
    if admin is not None:
        first = broker_init.Administrator(admin, *first_password(password_file, is_generated=generate_password))
    elif password_file is not None or generate_password:
        raise ConfigError("--password-file and --generate-password are of --admin NAME: name the administrator")
    made = broker_init.make(Path(data), listen, hosts or [], has_tls=tls_dev, administrator=first)
    if as_json:
        output.print_json(made._asdict())
    else:
        broker_init.tell(made)


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
