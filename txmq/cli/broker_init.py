"""What ``txmq broker init`` makes: a data directory, settings in it, with ``--tls-dev`` a CA and certificates, with
``--admin`` the first administrator.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlencode

import typer

from txmq.addresses import join_address, split_address
from txmq.config_sources import load_settings
from txmq.errors import ConfigError
from txmq.model import is_valid_name
from txmq.runtime.private_files import make_private_directory, write_private

_HEAD: Final = (
    "# Made by txmq broker init. Every setting is in docs/configuration.md, certificates in docs/how-to/secure.md.\n"
)


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


def make(
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


def tell(made: Made) -> None:
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
