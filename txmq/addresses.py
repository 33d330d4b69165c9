"""Addresses as text: HOST:PORT, a client's txmq://HOST[:PORT][,HOST[:PORT]...], an ensemble's zk://... ."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from txmq.errors import ConfigError

DEFAULT_PORT = 8123
ZOOKEEPER_SCHEME: Final = "zk://"
_ZOOKEEPER_PORT = 2181
_SCHEME = "txmq://"
_SECRET = re.compile("://.*@", re.DOTALL)
_CHROOT = re.compile(r"(?:/[A-Za-z0-9][A-Za-z0-9._-]*)*")


def split_address(text: str, setting: str = "listen") -> tuple[str, int]:
    """Split ``HOST:PORT`` or ``[IPv6]:PORT``; the error names the setting.

    Raises:
        ConfigError: not of that form, or the port is over 65535.
    """
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    port_is_valid = port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535
    if (
        not (colon and host and port_is_valid)
        or (":" in host) is not bracketed
        or not host.isprintable()
        or " " in host
    ):
        raise ConfigError(f"{setting} = {text!r}: expected HOST:PORT such as 127.0.0.1:8123, with a port of 0 to 65535")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """The inverse of ``split_address``: an IPv6 address stands in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``. Names other than ``localhost`` are not looked up."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_wildcard(host: str) -> bool:
    """Whether ``host`` stands for all addresses of a machine, and so for none that a client could connect to."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def parse_bootstrap(text: str) -> list[tuple[str, int]]:
    """Hosts and ports of ``txmq://host[:port][,host[:port]...]``.

    Raises:
        ConfigError: says what is expected.
    """
    expected = f"bootstrap = {text!r}: expected txmq://HOST[:PORT], several separated by commas, or zk://..."
    if not isinstance(text, str):
        raise ConfigError(expected)
    if not text.startswith(_SCHEME):
        raise ConfigError(expected)
    addresses = []
    for part in text.removeprefix(_SCHEME).rstrip("/").split(","):
        try:
            addresses.append(split_address(_with_port(part, DEFAULT_PORT)))
        except ConfigError:
            raise ConfigError(expected) from None
    return addresses


class Credentials(NamedTuple):
    """Name and password under which nodes are made; nobody else reads or changes them."""

    name: str
    password: str


@dataclass(frozen=True, slots=True)
class Ensemble:
    """A ZooKeeper ensemble, and where in its tree txmq's nodes are."""

    hosts: str  # HOST:PORT, with commas between several
    chroot: str = ""  # "" or "/prod"
    credentials: Credentials | None = field(default=None, repr=False)


def parse_ensemble(text: str, setting: str = "registry") -> Ensemble:
    """The parts of ``zk://[NAME:PASSWORD@]HOST[:PORT][,HOST[:PORT]...][/PATH]``.

    Raises:
        ConfigError: names the setting, and says what is expected. The password is not in it.
    """
    wrong = ConfigError(
        f"{setting} = {without_secret(str(text))!r}: expected zk://[NAME:PASSWORD@]HOST[:PORT][,HOST[:PORT]...][/PATH] "
        "such as zk://zoo1,zoo2,zoo3/prod"
    )
    if not isinstance(text, str) or not text.startswith(ZOOKEEPER_SCHEME):
        raise wrong
    before, at, rest = text.removeprefix(ZOOKEEPER_SCHEME).rpartition("@")
    name, colon, password = before.partition(":")
    hosts, slash, path = rest.partition("/")
    chroot = (slash + path).rstrip("/")
    if (at and not (name and colon and password)) or _CHROOT.fullmatch(chroot) is None:
        raise wrong
    try:
        servers = [join_address(*split_address(_with_port(host, _ZOOKEEPER_PORT))) for host in hosts.split(",")]
    except ConfigError:
        raise wrong from None
    return Ensemble(",".join(servers), chroot, Credentials(name, password) if at else None)


def without_secret(text: str) -> str:
    """An address that may be shown: without its credentials."""
    return _SECRET.sub("://***@", text)


def _with_port(part: str, port: int) -> str:
    has_port = part.rpartition("]")[2].count(":") == 1 if "]" in part else ":" in part
    return part if has_port else f"{part}:{port}"
