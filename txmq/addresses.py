"""Addresses as text: HOST:PORT, a client's txmq://HOST[:PORT][,HOST[:PORT]...], an ensemble's zk://HOST[:PORT][,...][/PATH]."""

from __future__ import annotations

import ipaddress
import re
from typing import Final, NamedTuple

from txmq.errors import ConfigError

DEFAULT_PORT = 8123
_SCHEME = "txmq://"
ZOOKEEPER_SCHEME: Final = "zk://"
_ZOOKEEPER_PORT = 2181
_CHROOT = re.compile(r"(?:/[A-Za-z0-9][A-Za-z0-9._-]*)*")


class Ensemble(NamedTuple):
    """A ZooKeeper ensemble, and where in its tree txmq's nodes are: ``""``, or ``/prod``."""

    hosts: str  # HOST:PORT, several separated by commas
    chroot: str


def split_address(text: str) -> tuple[str, int]:
    """Split ``HOST:PORT`` or ``[IPv6]:PORT``.

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
        raise ConfigError(f"listen = {text!r}: expected HOST:PORT such as 127.0.0.1:8123, with a port of 0 to 65535")
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


def parse_bootstrap(text: str) -> list[tuple[str, int]]:
    """Hosts and ports of ``txmq://host[:port][,host[:port]...]``.

    Raises:
        ConfigError: says what is expected.
    """
    expected = f"bootstrap = {text!r}: expected txmq://HOST[:PORT], several separated by commas"
    if not isinstance(text, str):
        raise ConfigError(expected)
    if text.startswith("zk://"):
        raise ConfigError(f"bootstrap = {text!r}: ZooKeeper is not supported yet; give a broker: txmq://HOST:PORT")
    if not text.startswith(_SCHEME):
        raise ConfigError(expected)
    addresses = []
    for part in text.removeprefix(_SCHEME).rstrip("/").split(","):
        try:
            addresses.append(split_address(_with_port(part, DEFAULT_PORT)))
        except ConfigError:
            raise ConfigError(expected) from None
    return addresses


def parse_ensemble(text: str, name: str = "registry") -> Ensemble:
    """Hosts and path of ``zk://host[:port][,host[:port]...][/path]``.

    Raises:
        ConfigError: says what is expected of the argument or setting ``name``.
    """
    expected = f"{name} = {text!r}: expected zk://HOST[:PORT], several separated by commas, and a path if there is one"
    if not isinstance(text, str) or not text.startswith(ZOOKEEPER_SCHEME):
        raise ConfigError(expected)
    hosts, slash, path = text.removeprefix(ZOOKEEPER_SCHEME).partition("/")
    chroot = f"{slash}{path}".rstrip("/")
    if _CHROOT.fullmatch(chroot) is None:
        raise ConfigError(expected)
    try:
        parsed = [split_address(_with_port(part, _ZOOKEEPER_PORT)) for part in hosts.split(",")]
    except ConfigError:
        raise ConfigError(expected) from None
    return Ensemble(",".join(join_address(*address) for address in parsed), chroot)


def _with_port(part: str, port: int) -> str:
    has_port = part.rpartition("]")[2].count(":") == 1 if "]" in part else ":" in part
    return part if has_port else f"{part}:{port}"
