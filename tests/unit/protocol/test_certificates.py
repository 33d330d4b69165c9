"""Who the other side is: the names of a certificate, and the hash that a login is bound to."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import NameOID

from txmq.protocol.certificates import described, end_point, names_of

NAME = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "broker")])


def signed(algorithm: Any, key: Any = None) -> bytes:
    key, now = key or ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(NAME).issuer_name(NAME).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now).not_valid_after(now + timedelta(days=1))
    der: bytes = builder.sign(key, algorithm).public_bytes(serialization.Encoding.DER)
    return der


@pytest.mark.parametrize("algorithm", [hashes.SHA256(), hashes.SHA384(), hashes.SHA512(), hashes.SHA224()])
def test_binding_is_the_hash_by_the_signature_s_function(algorithm: hashes.HashAlgorithm) -> None:
    certificate = signed(algorithm)
    assert end_point(certificate) == hashlib.new(algorithm.name, certificate).digest()


def test_binding_of_a_signature_without_a_hash_function() -> None:
    certificate = signed(None, ed25519.Ed25519PrivateKey.generate())
    assert end_point(certificate) == hashlib.sha512(certificate).digest()  # the one in Ed25519


@pytest.mark.parametrize("content", [b"", b"no certificate", bytes(1000)])
def test_what_is_no_certificate_is_hashed_nevertheless(content: bytes) -> None:
    assert end_point(content) == hashlib.sha256(content).digest()


SUBJECT = ((("countryName", "DE"),), (("organizationName", "Example"),), (("commonName", "shop"),))


@pytest.mark.parametrize(
    ("certificate", "names"),
    [
        ({}, set()),
        ({"subject": ((("commonName", "shop"),),)}, {"CN=shop"}),
        ({"subject": SUBJECT}, {"CN=shop", "CN=shop,O=Example,C=DE"}),
        ({"subject": (), "subjectAltName": (("DNS", "a.org"), ("URI", "spiffe://a/b"), ("IP Address", "10.0.0.1"))},
         {"DNS:a.org", "URI:spiffe://a/b"}),
        ({"subject": ((("commonName", "a"),), (("commonName", "b"),))}, {"CN=b,CN=a"}),
        ({"subject": ((("commonName", "shop,O=Example"),),)}, {"CN=shop\\,O\\=Example"}),
    ],
)  # fmt: skip
def test_names_are_those_that_mean_one_owner(certificate: dict[str, Any], names: set[str]) -> None:
    assert names_of(certificate) == names


def test_certificate_is_told_by_subject_and_serial_number() -> None:
    subject = ((("organizationName", "Example, Inc"),), (("commonName", "shop"),))
    assert described({"subject": subject, "serialNumber": "0A1B"}) == "CN=shop,O=Example\\, Inc serial 0A1B"
    assert described({"subject": ((("commonName", "x" * 1000),),)}) == f"CN={'x' * 297} serial -"
    assert described({"subject": (), "serialNumber": "07"}) == "no subject serial 07"
    assert described({}) == ""
