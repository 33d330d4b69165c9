"""Addresses as text: HOST:PORT, a client's txmq://HOST[:PORT][,HOST[:PORT]...], an ensemble's zk://... .

``txmqs://`` and ``zks://`` say that the other side is spoken to by TLS and by nothing else. Files follow a question
mark: ``txmqs://broker1:8123?ca=/etc/txmq/ca.pem``, and so does that of a user's password:
``txmqs://shop@broker1?password_file=/etc/txmq/shop.password``.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import parse_qsl

from txmq.errors import ConfigError
from txmq.model import is_valid_name

DEFAULT_PORT = 8123
_ZOOKEEPER_PORT = 2181
_SCHEME: Final = "txmq://"
_TLS_SCHEME: Final = "txmqs://"
_ZOOKEEPER_SCHEME: Final = "zk://"
_ZOOKEEPER_TLS_SCHEME: Final = "zks://"
_FILES: Final = ("ca", "cert", "key")
_USER: Final = "user"
_PASSWORD_FILE: Final = "password_file"  # noqa: S105  the name of a parameter
_IPV6_NETWORK_BITS: Final = 64
_SECRET = re.compile("://.*@", re.DOTALL)
_PASSWORD = re.compile(r"(//[^/?#@:]*:|^jdbc:oracle:[a-z0-9]+:[^/@]*/)[^/?#]*@", re.IGNORECASE)  # of a database's URL
_PASSWORD_PARAMETER = re.compile(r"((?:password|passwd|pwd)=)[^&;]*", re.IGNORECASE)
_CHROOT = re.compile(r"(?:/[A-Za-z0-9][A-Za-z0-9._-]*)*")


def split_address(text: str, setting: str = "listen") -> tuple[str, int]:
    """Split ``HOST:PORT`` or ``[IPv6]:PORT``; the error names the setting.

    Raises:
        ConfigError: not of that form, no host could have the name, or the port is over 65535.
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
        or not _may_be_looked_up(host)
    ):
        raise ConfigError(f"{setting} = {text!r}: expected HOST:PORT such as 127.0.0.1:8123, with a port of 0 to 65535")
    return host, int(port)


def _may_be_looked_up(host: str) -> bool:
    """Whether the system takes it for a name or an address: it takes no ``a..b``, and no part of 64 characters."""
    try:
        host.encode("idna")  # what a look-up begins with
    except UnicodeError:
        return False
    return True


def join_address(host: str, port: int) -> str:
    """The inverse of ``split_address``: an IPv6 address stands in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def network_of(address: str) -> str:
    """What counts as one address of HOST:PORT: the host; of IPv6 a network of 64 bits, all of which one host may have.

    Source: RFC 4291, section 2.5.4.
    """
    host = address.rpartition(":")[0].removeprefix("[").removesuffix("]")
    if ":" not in host:
        return host
    found = ipaddress.IPv6Address(host)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(found), _IPV6_NETWORK_BITS), strict=False))


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


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """What one side of TLS shows and trusts: paths of PEM files, each may be empty."""

    ca: str = ""  # certificates of those whose signature counts; the system's, if it is empty
    cert: str = ""  # its own certificate, with those between it and the CA
    key: str = ""  # the certificate's private key, not encrypted

    def __post_init__(self) -> None:
        if bool(self.cert) is not bool(self.key):
            raise ConfigError("cert and key go together: a certificate proves nothing without its private key")


def is_ensemble(text: str) -> bool:
    """Whether a client's address names the ZooKeeper ensemble of a cluster."""
    return text.startswith((_ZOOKEEPER_SCHEME, _ZOOKEEPER_TLS_SCHEME))


def parse_bootstrap(text: str) -> list[tuple[str, int]]:
    """Hosts and ports of ``txmq://host[:port][,host[:port]...]``, and of ``txmqs://`` likewise.

    Raises:
        ConfigError: says what is expected.
    """
    expected = (
        f"bootstrap = {without_secret(str(text))!r}: expected txmq://HOST[:PORT], several separated by commas, "
        "txmqs://... with TLS, or zk://..."
    )
    if not isinstance(text, str):
        raise ConfigError(expected)
    scheme = _TLS_SCHEME if text.startswith(_TLS_SCHEME) else _SCHEME
    if not text.startswith(scheme):
        raise ConfigError(expected)
    place, question, query = text.removeprefix(scheme).partition("?")
    hosts = place.rpartition("@")[2]
    if question and scheme is _SCHEME and not query.startswith(f"{_PASSWORD_FILE}="):
        raise ConfigError(
            f"bootstrap = {without_secret(text)!r}: what stands behind ? is for TLS; begin the address with txmqs://"
        )
    addresses = []
    for part in hosts.rstrip("/").split(","):
        try:
            addresses.append(split_address(_with_port(part, DEFAULT_PORT)))
        except ConfigError:
            raise ConfigError(expected) from None
    return addresses


def parse_user(text: str) -> str:
    """The user of ``txmq[s]://[USER@]HOST...``, or of ``zk[s]://...?user=USER``; empty if it names none.

    Raises:
        ConfigError: it is no user's name. A password stands elsewhere: addresses are in logs and in lists of processes.
    """
    if is_ensemble(text):
        return parse_ensemble(text, "bootstrap").user
    user, at, _ = text.partition("://")[2].partition("?")[0].rpartition("@")
    if at and not is_valid_name(user):
        raise ConfigError(
            f"bootstrap = {without_secret(text)!r}: before @ stands a user's name and nothing else; the password is "
            "read from TXMQ_PASSWORD or ?password_file=FILE, or given as password="
        )
    return user


def parse_tls(text: str) -> TlsFiles | None:
    """How brokers are spoken to: the files of ``txmqs://HOST...[?ca=FILE][&cert=FILE&key=FILE]``, or of an ensemble's
    address; None without TLS.

    Raises:
        ConfigError: says what is expected.
    """
    if is_ensemble(text):
        return parse_ensemble(text, "bootstrap").broker_tls
    if not text.startswith(_TLS_SCHEME):
        return None
    return _files(_of_broker(text))


def parse_password_file(text: str) -> str:
    """The file of ``...?password_file=FILE``; empty if the address names none.

    Raises:
        ConfigError: says what is expected.
    """
    if is_ensemble(text):
        return parse_ensemble(text, "bootstrap").password_file
    return _of_broker(text).get(_PASSWORD_FILE, "")


def _of_broker(text: str) -> dict[str, str]:
    known = (*_FILES, _PASSWORD_FILE) if text.startswith(_TLS_SCHEME) else (_PASSWORD_FILE,)
    return _parameters(text, text.partition("?")[2], known)


def _parameters(text: str, query: str, known: tuple[str, ...]) -> dict[str, str]:
    """What follows the question mark of an address."""
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if query else []
    except ValueError:
        pairs = [("", "")]
    found = dict(pairs)
    if len(found) < len(pairs) or not all(name in known and value for name, value in pairs):
        raise ConfigError(
            f"{without_secret(text)!r}: expected {', '.join(known)} behind ?, each once: ?ca=FILE&cert=FILE"
        )
    return found


def _files(parameters: dict[str, str]) -> TlsFiles:
    return TlsFiles(**{name: parameters[name] for name in _FILES if name in parameters})


@dataclass(frozen=True, slots=True)
class Credentials:
    """Name and password of ZooKeeper's nodes. No text of it shows the password."""

    name: str
    password: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Ensemble:
    """A ZooKeeper ensemble, and where in its tree txmq's nodes are."""

    hosts: str  # HOST:PORT, with commas between several
    chroot: str = ""  # "" or "/prod"
    credentials: Credentials | None = field(default=None, repr=False)
    tls: TlsFiles | None = None  # how ZooKeeper is spoken to
    broker_tls: TlsFiles | None = None  # how a client speaks to the brokers that it finds there
    user: str = ""  # the user that a client logs in as at the brokers
    password_file: str = ""  # of that user


def parse_ensemble(text: str, setting: str = "registry") -> Ensemble:
    """The parts of ``zk[s]://[NAME:PASSWORD@]HOST[:PORT][,HOST[:PORT]...][/PATH][?ca=FILE&cert=FILE&key=FILE]``.

    Before @ stands the name that may write ZooKeeper's nodes; a user of the brokers, and the file of the password,
    follow the question mark: ``?user=shop&password_file=FILE``. With ``zks://`` the ensemble and the brokers are spoken
    to by TLS, with ``zk://...?tls=brokers`` only the brokers.

    Raises:
        ConfigError: names the setting, and says what is expected. The password is not in it.
    """
    wrong = ConfigError(
        f"{setting} = {without_secret(str(text))!r}: expected zk://[NAME:PASSWORD@]HOST[:PORT][,HOST[:PORT]...][/PATH] "
        "such as zk://zoo1,zoo2,zoo3/prod; with TLS zks://... and ?ca=FILE behind it"
    )
    if not isinstance(text, str) or not is_ensemble(text):
        raise wrong
    before, at, rest = text.partition("://")[2].rpartition("@")
    name, colon, password = before.partition(":")
    place, _, query = rest.partition("?")
    hosts, slash, path = place.partition("/")
    chroot = (slash + path).rstrip("/")
    if (at and not (name and colon and password)) or _CHROOT.fullmatch(chroot) is None:
        raise wrong
    try:
        servers = [join_address(*split_address(_with_port(host, _ZOOKEEPER_PORT))) for host in hosts.split(",")]
    except ConfigError:
        raise wrong from None
    parameters = _parameters(text, query, ("tls", *_FILES, _USER, _PASSWORD_FILE))
    user, password_file = parameters.pop(_USER, ""), parameters.pop(_PASSWORD_FILE, "")
    if user and not is_valid_name(user):
        raise ConfigError(f"{setting} = {without_secret(text)!r}: user={user[:80]!r} is no user's name")
    tls, broker_tls = _ensemble_tls(text, parameters)
    credentials = Credentials(name, password) if at else None
    return Ensemble(",".join(servers), chroot, credentials, tls, broker_tls, user, password_file)


def _ensemble_tls(text: str, parameters: dict[str, str]) -> tuple[TlsFiles | None, TlsFiles | None]:
    if text.startswith(_ZOOKEEPER_TLS_SCHEME):
        if "tls" in parameters:
            raise ConfigError(f"{without_secret(text)!r}: tls=brokers is for zk://; zks:// encrypts both")
        return _files(parameters), _files(parameters)
    if parameters.get("tls", "brokers") != "brokers" or (parameters and "tls" not in parameters):
        raise ConfigError(
            f"{without_secret(text)!r}: files are for TLS; write zks://..., or zk://...?tls=brokers&ca=FILE"
        )
    return None, _files(parameters) if parameters else None


def without_secret(text: str) -> str:
    """An address that may be shown: without its credentials."""
    return _SECRET.sub("://***@", text)


def without_password(url: str) -> str:
    """A database's URL that may be shown: without its password, which a JDBC URL may hold as a parameter."""
    return _PASSWORD_PARAMETER.sub(r"\1...", _PASSWORD.sub(r"\1...@", url))


def _with_port(part: str, port: int) -> str:
    has_port = part.rpartition("]")[2].count(":") == 1 if "]" in part else ":" in part
    return part if has_port else f"{part}:{port}"
