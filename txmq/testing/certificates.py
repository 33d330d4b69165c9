"""A certificate authority of one's own, for tests and a first try (the only home of ``cryptography``).

Keys are EC P-256: a handshake costs the broker a tenth of what it costs with RSA. Private keys are files that only
their owner reads, and are not encrypted. Trust such a CA for a try and no longer: anyone who reads ``ca.key`` can be
anybody.

Source: RFC 5280, 4.2.1; CA/Browser Forum baseline requirements for the extensions.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from txmq.addresses import TlsFiles
from txmq.errors import ConfigError
from txmq.runtime.build import how_to_install
from txmq.runtime.private_files import make_private_directory, write_private

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError:
    raise ConfigError(f"certificates are made by the package cryptography; {how_to_install('certificates')}") from None

LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
_AGO: Final = timedelta(hours=1)  # clocks differ


class CertificateAuthority:
    """A new CA over a directory, which gets ``ca.pem`` and ``ca.key``; nothing there is overwritten.

    Args:
        directory: made if it is missing, for its owner alone.
        name: the signer's name in its certificates.
        days: how long its own certificate is valid.

    Attributes:
        certificate: the path of ``ca.pem``.

    Raises:
        ConfigError: the package ``cryptography`` is missing, or there is a CA already.
    """

    def __init__(self, directory: Path | str, name: str = "txmq first try", *, days: int = 3650) -> None:
        self.directory = Path(directory).absolute()
        make_private_directory(self.directory)
        self.certificate = self.directory / "ca.pem"
        self._name, self._key = _named(name), ec.generate_private_key(ec.SECP256R1())
        identifier = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        self._identifier = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier)
        usage = _usage(signs_certificates=True)
        built = (
            self._certificate(self._name, self._key, timedelta(days=days))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(identifier, critical=False)
        )
        _write(self.directory / "ca.key", _private(self._key))
        _write(self.certificate, _public(built.sign(self._key, hashes.SHA256())))

    def issue(
        self,
        file: str,
        *,
        hosts: Sequence[str | bytes] = LOOPBACK,
        name: str | None = None,
        valid: timedelta | None = None,
    ) -> TlsFiles:
        """A certificate for both sides of TLS, in ``<file>.pem`` and ``<file>.key``; the answer names ``ca.pem``, too.

        Args:
            hosts: names and addresses under which clients reach its owner; bytes are a name as a careless CA writes it,
                such as one in Latin-1. Empty: it has no alternative name.
            name: its subject's common name; ``file`` if it is not given.
            valid: from now on; a time below 0 is over. A year if it is not given.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = (
            self._certificate(_named(name or file), key, timedelta(days=365) if valid is None else valid)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .add_extension(self._identifier, critical=False)
        )
        if hosts:
            certificate = certificate.add_extension(_alternative_names(hosts), critical=False)
        files = TlsFiles(str(self.certificate), *(str(self.directory / f"{file}.{end}") for end in ("pem", "key")))
        _write(Path(files.key), _private(key))
        _write(Path(files.cert), _public(certificate.sign(self._key, hashes.SHA256())))
        return files

    def _certificate(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, valid: timedelta
    ) -> x509.CertificateBuilder:
        until = datetime.now(UTC) + valid
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(min(datetime.now(UTC), until) - _AGO)
            .not_valid_after(until)
        )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _alternative_names(hosts: Sequence[str | bytes]) -> x509.ExtensionType:
    """Bytes have a stand-in of their length, so that no length around them changes."""
    raw = [host for host in hosts if isinstance(host, bytes)]
    named = x509.SubjectAlternativeName([_host(host if isinstance(host, str) else "x" * len(host)) for host in hosts])
    content = named.public_bytes()
    for name in raw:
        content = content.replace(b"x" * len(name), name, 1)
    return x509.UnrecognizedExtension(named.oid, content) if raw else named


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text.encode("idna").decode())


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates, key_cert_sign=signs_certificates, crl_sign=signs_certificates,
        content_commitment=False, key_encipherment=False, data_encipherment=False, key_agreement=False,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    data: bytes = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return data


def _public(certificate: x509.Certificate) -> bytes:
    data: bytes = certificate.public_bytes(serialization.Encoding.PEM)
    return data


def _write(path: Path, data: bytes) -> None:
    try:
        write_private(path, data)
    except FileExistsError:
        raise ConfigError(f"{path} exists, and is not overwritten: choose another directory, or delete it") from None
