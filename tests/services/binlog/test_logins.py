"""How the source is logged in to: passwords of any characters, and TLS to a server that proves who it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.services.binlog.reading import Reading
from txmq.addresses import TlsFiles
from txmq.binlog.apply.target import connector
from txmq.binlog.config import ApplySettings, SourceSettings, read_settings
from txmq.binlog.errors import BinlogError
from txmq.binlog.source import BinlogSource
from txmq.binlog.source.connection import DumpConnection
from txmq.binlog.source.options import source_options
from txmq.testing.certificates import CertificateAuthority
from txmq.testing.processes.mariadb import MariaDB

RIGHTS = "GRANT ALL ON *.* TO {}"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> CertificateAuthority:
    return CertificateAuthority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def server(authority: CertificateAuthority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MariaDB]:
    """One that speaks TLS, under a certificate for 127.0.0.1."""
    files = authority.issue("database")
    named = (f"--ssl-ca={files.ca}", f"--ssl-cert={files.cert}", f"--ssl-key={files.key}")
    options = (*named, "--bind-address=127.0.0.1,127.0.0.2")
    with MariaDB(tmp_path_factory.mktemp("binlog"), binary_log=True, options=options) as started:
        yield started


@pytest.mark.parametrize("password", ["grün", "пароль 😀", "plain"], ids=["latin", "beyond", "ascii"])
def test_password_of_any_characters_lets_both_drivers_in(reading: Reading, password: str) -> None:
    user = f"u{reading.number}"
    reading.server.execute(f"CREATE USER {user} IDENTIFIED BY '{password}'")
    reading.server.execute(RIGHTS.format(user))
    with closing(reading.another(user=user, password=password)) as source:
        source.open(source.current_position())
        reading.run("CREATE TABLE t (id INT PRIMARY KEY)", "INSERT INTO t VALUES (1)")
        assert [change.after for part in reading.parts(source) for change in part.changes] == [(1,)]
    settings = ApplySettings(port=reading.server.port, user=user, password=password)
    with closing(connector(settings)()) as target:
        target.ping()


def tls(files: TlsFiles, **more: Any) -> dict[str, Any]:
    """Lines of a configuration."""
    return {"tls_ca": files.ca, "tls_certificate": files.cert, "tls_key": files.key} | more


def test_reader_speaks_tls_as_its_settings_say(reading: Reading, authority: CertificateAuthority) -> None:
    user, files = f"u{reading.number}", authority.issue(f"reader{reading.number}")
    reading.server.execute(f"CREATE USER {user} IDENTIFIED BY 'x' REQUIRE X509")
    reading.server.execute(RIGHTS.format(user))
    lines: dict[str, Any] = {"host": "127.0.0.1", "port": reading.server.port, "user": user, "password": "x"} | tls(
        files
    )
    text = "".join(f"{key} = {value!r}\n".replace("'", '"') for key, value in lines.items())
    options = source_options(read_settings(f'name = "t"\n[source]\n{text}', {}))
    told = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    wanted = ("host", "port", "user", "password", "tls")
    with closing(reading.another(**{name: told[name] for name in wanted})) as source:
        source.open(source.current_position())
        dumps = "SELECT id FROM information_schema.processlist WHERE command LIKE 'Binlog Dump%%' AND user = %s"
        assert len(reading.server.execute(dumps, (user,))) == 1
        reading.run("CREATE TABLE t (id INT PRIMARY KEY)", "INSERT INTO t VALUES (1)")
        assert [change.after for part in reading.parts(source) for change in part.changes] == [(1,)]
    for kind in (SourceSettings, ApplySettings):
        with closing(connector(kind(**lines))()) as connection, closing(connection.cursor()) as cursor:
            cursor.execute("SHOW STATUS LIKE 'Ssl_cipher'")
            assert cursor.fetchall()[0][1]


def test_server_that_does_not_prove_its_name_is_refused(
    reading: Reading, authority: CertificateAuthority, tmp_path: Path
) -> None:
    strange, position = TlsFiles(str(CertificateAuthority(tmp_path / "other").certificate)), reading.begin()
    for files, host in ((strange, "127.0.0.1"), (TlsFiles(str(authority.certificate)), "127.0.0.2")):
        options = dataclasses.replace(reading.source._options, tls=files, host=host)
        with pytest.raises(BinlogError, match=r"(?i)certificate|TLS|SSL"):
            BinlogSource(options).current_position()
        with pytest.raises(BinlogError, match=r"(?i)certificate|TLS|SSL"):
            DumpConnection(options, position)
