"""``txmq broker``: run a broker in the foreground until SIGTERM or Ctrl-C; ``init`` makes what it needs first.

What it needs is a data directory and settings in it, with ``--tls-dev`` a CA and certificates, with ``--admin`` the
first administrator.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final, NamedTuple
from urllib.parse import urlencode

import typer

from txmq.addresses import join_address, split_address
from txmq.cli import output
from txmq.cli.connecting import PasswordFile, first_password
from txmq.config import BrokerSettings
from txmq.config_sources import load_settings, parse_assignments
from txmq.errors import ConfigError, CorruptRecordError, StorageError
from txmq.model import is_valid_name
from txmq.runtime.private_files import make_private_directory, write_private

_HEAD: Final = (
    "# Made by txmq broker init. Every setting is in docs/configuration.md, certificates in docs/how-to/secure.md.\n"
)
app = typer.Typer(
    invoke_without_command=True, subcommand_metavar="[COMMAND]", help="Run a broker, or make what it needs first."
)
InsecurePlaintext = Annotated[
    bool, typer.Option("--insecure-plaintext", help="Let other machines connect without TLS.")
]
ReplicaOf = Annotated[
    str | None,
    typer.Option(metavar="HOME", help="Copy this home of the cluster, by its id or its broker's name. [none]"),
]
InsecureAnonymous = Annotated[
    bool, typer.Option("--insecure-anonymous", help="Let other machines connect without a client certificate.")
]


# --- what init makes --------------------------------------------------------------------------------------------------


class Administrator(NamedTuple):
    """The first one."""

    name: str
    password: str
    is_generated: bool


class Made(NamedTuple):
    """What was made."""

    config: str  # path of the settings
    bootstrap: str  # for clients
    certificates: list[str]  # paths; none without TLS
    administrator: str = ""
    password: str = ""  # of the administrator, if it was generated: nothing else has it


def make_home(
    data: Path, listen: str, hosts: Sequence[str], *, has_tls: bool, administrator: Administrator | None = None
) -> Made:
    """Make it.

    Args:
        hosts: names and addresses of the broker, beside those of this machine's loopback.

    Raises:
        ConfigError: something of it exists, cannot be written, or does not go together.
    """
    data = data.absolute()
    host, port = split_address(listen)
    for name in hosts:
        split_address(join_address(name, port), "--host")
    settings: dict[str, object] = {"data": str(data), "listen": listen}
    config, directory = data / "broker.toml", data / "tls"
    named = next(iter(hosts), "127.0.0.1" if host in ("0.0.0.0", "::") else host)  # noqa: S104  compared, not listened on
    address = join_address(named, port)
    if config.exists() or directory.exists():
        raise ConfigError(
            f"{config if config.exists() else directory} exists, and is not overwritten: name another --data"
        )
    if has_tls:
        settings |= {
            "tls_certificate": str(directory / "broker.pem"), "tls_key": str(directory / "broker.key"),
            "tls_ca": str(directory / "ca.pem"),
            "tls_client_certificates": "required" if administrator is None else "optional",
        }  # fmt: skip
    if administrator is not None:
        settings["first_administrator"] = str(data / "administrator.json")
    load_settings(None, {}, dict(settings))
    first = None if administrator is None else _first(administrator)
    try:
        make_private_directory(data)
        place, files, certificates = f"txmq://{address}", dict[str, str](), list[str]()
        if has_tls:
            place, files, certificates = _certificates(
                directory, address, [*hosts, host], has_client=administrator is None
            )
        if first is not None:
            write_private(str(settings["first_administrator"]), first)
        write_private(config, _HEAD + "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items()))
    except OSError as error:
        raise ConfigError(f"cannot write below {data}: {error.strerror or error}; name another --data DIR") from error
    bootstrap = f"{place}?{urlencode(files, safe='/')}" if files else place
    if administrator is None:
        return Made(str(config), bootstrap, certificates)
    bootstrap = bootstrap.replace("://", f"://{administrator.name}@", 1)
    return Made(
        str(config), bootstrap, certificates, administrator.name,
        administrator.password if administrator.is_generated else "",
    )  # fmt: skip


def _first(administrator: Administrator) -> str:
    from txmq.broker.shell.first_administrator import content_of
    from txmq.protocol.scram import SALT_SIZE, keys_of

    if not is_valid_name(administrator.name):
        raise ConfigError(
            f"--admin {administrator.name[:80]!r}: 1 to 200 of A-Z a-z 0-9 . _ -, not beginning with . or -"
        )
    return content_of(administrator.name, keys_of(administrator.password, secrets.token_bytes(SALT_SIZE)))


def _certificates(
    directory: Path, address: str, hosts: Sequence[str], *, has_client: bool
) -> tuple[str, dict[str, str], list[str]]:
    """The address with its scheme, the files of a client, and all paths."""
    from txmq.testing.certificates import LOOPBACK, CertificateAuthority

    authority = CertificateAuthority(directory)
    broker = authority.issue("broker", hosts=list(dict.fromkeys([*LOOPBACK, *hosts])))
    files, paths = {"ca": broker.ca}, [broker.ca, broker.cert, broker.key]
    if has_client:
        client = authority.issue("client", hosts=[])
        files |= {"cert": client.cert, "key": client.key}
        paths += [client.cert, client.key]
    return f"txmqs://{address}", files, paths


def tell_made(made: Made) -> None:
    """What was made and what comes next, for people."""
    for path in [*made.certificates, made.config]:
        typer.echo(f"wrote {path}")
    typer.echo(f"\nStart the broker:\n  txmq broker --config {made.config}")
    typer.echo(f"\nCommands and clients find it by:\n  export TXMQ_BOOTSTRAP='{made.bootstrap}'")
    typer.echo(f'\nIn Python:\n  client = txmq.connect("{made.bootstrap}")')
    if made.password:
        typer.echo(f"\nPassword of {made.administrator}, shown this once:\n  export TXMQ_PASSWORD='{made.password}'")
    elif made.administrator:
        typer.echo(
            f"\nCommands ask for {made.administrator}'s password, or read TXMQ_PASSWORD, or ?password_file=FILE behind "
            "the address."
        )
    if made.certificates:
        files = "ca.pem" if made.administrator else "ca.pem, client.pem and client.key"
        typer.echo(f"\nFor another machine, copy {files} there, and mind who reads what.")


# --- the commands -----------------------------------------------------------------------------------------------------


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
    replica_of: ReplicaOf = None,
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
      txmq broker --data copy --listen 127.0.0.1:8124 --registry zk://127.0.0.1/prod --replica-of broker-1
      txmq broker init --tls-dev                     certificates for a first try
    """
    if context.invoked_subcommand is not None:
        if any(value for value in context.params.values()):
            raise ConfigError(f"options stand behind the command: txmq broker {context.invoked_subcommand} --help")
        return
    named = {
        "data": data, "listen": listen, "registry": registry, "replica_of": replica_of, "sync": sync,
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
    first = None
    if admin is not None:
        first = Administrator(admin, *first_password(password_file, is_generated=generate_password))
    elif password_file is not None or generate_password:
        raise ConfigError("--password-file and --generate-password are of --admin NAME: name the administrator")
    made = make_home(Path(data), listen, hosts or [], has_tls=tls_dev, administrator=first)
    if as_json:
        output.print_json(made._asdict())
    else:
        tell_made(made)


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
