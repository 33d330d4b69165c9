"""What a broker's child process is reached by; that it serves: tests/services."""

from __future__ import annotations

from pathlib import Path

import pytest

from txmq.addresses import TlsFiles, parse_bootstrap, parse_tls
from txmq.testing.processes.broker import BrokerProcess, address_of

FILES = TlsFiles("/a dir/ca.pem", "/a&b/cert.pem", "/a=b/key.pem")


@pytest.mark.parametrize("tls", [None, FILES, TlsFiles("ca.pem")])
def test_address_of_brokers_names_hosts_and_files(tmp_path: Path, tls: TlsFiles | None) -> None:
    one, other = (BrokerProcess(tmp_path / name, listen=f"[::1]:{name}", tls=tls) for name in ("1", "2"))
    assert parse_tls(one.address) == tls
    assert parse_bootstrap(address_of([other, one])) == [("::1", 2), ("::1", 1)]
    assert parse_tls(address_of([other, one])) == tls


def test_settings_are_the_callers_over_the_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(BrokerProcess, "defaults", {"sync": "never", "in_flight_max": 4})
    monkeypatch.setattr(BrokerProcess, "_spawn", lambda _, command, __: commands.append(command))
    BrokerProcess(tmp_path / "one", settings={"in_flight_max": 2}).launch()
    [command] = commands
    assert [word for word in command if "=" in word] == ["sync=never", "in_flight_max=2"]
