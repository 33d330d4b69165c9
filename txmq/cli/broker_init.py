"""What ``txmq broker init`` makes: a data directory, settings in it, and with ``--tls-dev`` a CA and certificates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlencode

import typer

from txmq.addresses import join_address, split_address
from txmq.config_sources import load_settings
from txmq.errors import ConfigError

_HEAD: Final = (
    "# Made by txmq broker init. Every setting is in docs/configuration.md, certificates in docs/how-to/secure.md.\n"
)


class Made(NamedTuple):
    """What was made."""

    config: str  # path of the settings
    bootstrap: str  # for clients
    certificates: list[str]  # paths; none without TLS


def make(data: Path, listen: str, hosts: Sequence[str], *, has_tls: bool) -> Made:
    """Make it.

    Args:
        hosts: names and addresses of the broker, beside those of this machine's loopback.

    Raises:
        ConfigError: something of it exists, cannot be written, or does not go together.
    """
    data = data.absolute()
    host, port = split_address(listen)
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
            "tls_ca": str(directory / "ca.pem"), "tls_client_certificates": "required",
        }  # fmt: skip
    load_settings(None, {}, dict(settings))
    try:
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
        bootstrap, certificates = f"txmq://{address}", list[str]()
        if has_tls:
            bootstrap, certificates = _certificates(directory, address, [*hosts, host])
        config.write_text(
            _HEAD + "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items()), "utf-8"
        )
    except OSError as error:
        raise ConfigError(f"cannot write below {data}: {error.strerror or error}; name another --data DIR") from error
    return Made(str(config), bootstrap, certificates)


def _certificates(directory: Path, address: str, hosts: Sequence[str]) -> tuple[str, list[str]]:
    from txmq.testing.certificates import LOOPBACK, CertificateAuthority

    authority = CertificateAuthority(directory)
    broker = authority.issue("broker", hosts=list(dict.fromkeys([*LOOPBACK, *hosts])))
    client = authority.issue("client", hosts=[])
    files = {"ca": client.ca, "cert": client.cert, "key": client.key}
    paths = [broker.ca, broker.cert, broker.key, client.cert, client.key]
    return f"txmqs://{address}?{urlencode(files, safe='/')}", paths


def tell(made: Made) -> None:
    """What was made and what comes next, for people."""
    for path in [*made.certificates, made.config]:
        typer.echo(f"wrote {path}")
    typer.echo(f"\nStart the broker:\n  txmq broker --config {made.config}")
    typer.echo(f"\nCommands and clients find it by:\n  export TXMQ_BOOTSTRAP='{made.bootstrap}'")
    typer.echo(f'\nIn Python:\n  client = txmq.connect("{made.bootstrap}")')
    if made.certificates:
        typer.echo("\nFor another machine, copy ca.pem, client.pem and client.key there, and mind who reads them.")
