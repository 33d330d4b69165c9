"""What ``txmq broker init`` makes, and for whom it is readable."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509

from txmq.cli import broker
from txmq.errors import ConfigError

LISTEN = "127.0.0.1:8123"


@pytest.fixture(autouse=True)
def _generous() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.parametrize("has_tls", [True, False])
def test_what_is_made_is_its_owners_alone(has_tls: bool, tmp_path: Path) -> None:
    """To ``broker.toml`` an operator adds the registry's password."""
    ops = broker.Administrator("ops", "pencil", False)
    made = broker.make_home(tmp_path / "data", LISTEN, [], has_tls=has_tls, administrator=ops)
    assert Path(made.config).is_file()
    assert [path for path in [*(tmp_path / "data").rglob("*"), tmp_path / "data"] if path.stat().st_mode & 0o077] == []


def test_names_in_a_certificate_are_those_of_a_look_up(tmp_path: Path) -> None:
    made = broker.make_home(tmp_path, LISTEN, ["bücher.example", "::1"], has_tls=True)
    [pem] = [Path(path).read_bytes() for path in made.certificates if path.endswith("broker.pem")]
    names = x509.load_pem_x509_certificate(pem).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "xn--bcher-kva.example" in names.get_values_for_type(x509.DNSName)


@pytest.mark.parametrize("host", ["a..b", "\udcff", ""])
def test_host_that_cannot_be_is_refused_before_anything_is_made(host: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--host = "):
        broker.make_home(tmp_path / "data", LISTEN, [host], has_tls=True)
    assert list(tmp_path.iterdir()) == []
