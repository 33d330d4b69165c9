"""Addresses as text: HOST:PORT, and a client's txmq://HOST[:PORT][,HOST[:PORT]...]."""

from __future__ import annotations

import ipaddress

from txmq.errors import ConfigError

DEFAULT_PORT = 8123
_SCHEME = "txmq://"


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
        has_port = part.rpartition("]")[2].count(":") == 1 if "]" in part else ":" in part
        try:
            addresses.append(split_address(part if has_port else f"{part}:{DEFAULT_PORT}"))
        except ConfigError:
            raise ConfigError(expected) from None
    return addresses
