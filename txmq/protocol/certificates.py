"""The other side of TLS: the names in a client's certificate, the hash of a broker's that logins are bound to.

The only home of ``asn1crypto``, which ``scramp`` brings along.

Source: RFC 5929, 4.1 (``tls-server-end-point``); RFC 4514 (names as text).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Final

_HASHES: Final = frozenset({"sha224", "sha256", "sha384", "sha512"})
_SHORT: Final = {
    "commonName": "CN", "organizationalUnitName": "OU", "organizationName": "O", "localityName": "L",
    "stateOrProvinceName": "ST", "countryName": "C", "domainComponent": "DC", "userId": "UID",
}  # fmt: skip
_KINDS: Final = {"DNS": "DNS", "URI": "URI", "email": "EMAIL"}
_TOLD_LENGTH_MAX: Final = 300
_SPECIAL: Final = frozenset(',+"\\<>;=')


@lru_cache(maxsize=8)
def end_point(certificate: bytes) -> bytes:
    """What a login is bound to: the hash of a broker's certificate, by the hash function of its signature.

    Args:
        certificate: in DER.

    By SHA-256 if that function is MD5 or SHA-1, as the RFC says, or none that it knows.
    """
    from asn1crypto.x509 import Certificate

    try:
        name = str(Certificate.load(certificate).hash_algo)
    except (TypeError, ValueError):
        name = ""
    return hashlib.new(name if name in _HASHES else "sha256", certificate).digest()


def names_of(certificate: Mapping[str, Any]) -> frozenset[str]:
    """The names by which a rule can mean a client's certificate, as ``SSLObject.getpeercert`` tells them.

    They are the whole subject, most specific part first (``CN=shop,OU=sales,O=Example``), its common name if it has
    one and no more (``CN=shop``), and the alternative names (``DNS:shop.example.org``, ``URI:...``, ``EMAIL:...``).
    """
    parts = [part for group in certificate.get("subject", ()) for part in group]
    common = [_written(part) for part in parts if part[0] == "commonName"]
    found = {",".join(_written(part) for part in reversed(parts))}
    found |= {*common} if len(common) == 1 else set()
    found |= {f"{_KINDS[kind]}:{name}" for kind, name in _alternative(certificate) if kind in _KINDS}
    return frozenset(found - {""})


def described(certificate: Mapping[str, Any]) -> str:
    """Which one it is, for people: subject and serial number; empty if none was shown."""
    if not certificate:
        return ""
    parts = [part for group in certificate.get("subject", ()) for part in group]
    subject = ",".join(_written(part) for part in reversed(parts)) or "no subject"
    return f"{subject[:_TOLD_LENGTH_MAX]} serial {certificate.get('serialNumber', '-')}"


def _alternative(certificate: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    names: Iterable[tuple[str, str]] = certificate.get("subjectAltName", ())
    return names


def _written(part: tuple[str, str]) -> str:
    """Escaped: a common name with a comma in it is not taken for a subject of several parts."""
    kind, text = part
    escaped = "".join(f"\\{char}" if char in _SPECIAL else char for char in text)
    return f"{_SHORT.get(kind, kind)}={escaped}"
