"""A real broker with TLS: who gets in, who does not, and that nobody outside disturbs those inside."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

import txmq
import txmq.aio
from txmq.addresses import TlsFiles
from txmq.errors import BrokerAwayError
from txmq.runtime.tls import ClientTls
from txmq.testing.certificates import CertificateAuthority
from txmq.testing.eventually import eventually
from txmq.testing.processes import fork_server
from txmq.testing.processes.broker import BrokerProcess, free_port

from .tls_brokers import address, raw, refusal, settings_of, shake_hands, trusting


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> CertificateAuthority:
    return CertificateAuthority(tmp_path_factory.mktemp("tls") / "ca")


@pytest.fixture(scope="module")
def certificate(authority: CertificateAuthority) -> TlsFiles:
    return authority.issue("broker")


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory, certificate: TlsFiles) -> Iterator[BrokerProcess]:
    """Takes TLS only, from anybody."""
    with BrokerProcess(tmp_path_factory.mktemp("broker") / "data", settings=settings_of(certificate)) as running:
        yield running


@pytest.fixture
def client(broker: BrokerProcess, authority: CertificateAuthority) -> Iterator[txmq.Client]:
    with txmq.connect(address(broker, trusting(authority))) as connected:
        yield connected


def hang_up(broker: BrokerProcess) -> None:
    assert broker.pid is not None
    os.kill(broker.pid, signal.SIGHUP)


# --- inside -----------------------------------------------------------------------------------------------------------


def test_everything_a_client_does_goes_encrypted(client: txmq.Client) -> None:
    client.topics.create("all", partitions=2)
    values = [b"%d" % number * 100 for number in range(2000)]
    with client.producer() as producer:
        for value in values[:100]:
            producer.send("all", value)
        producer.send_many("all", [(None, value) for value in values[100:]])
        large = os.urandom(5_000_000)
        producer.send("all", large, timeout=30)
        with producer.transaction() as tx:
            producer.send("all", b"together")
            tx.send("all", b"with this")
    assert tx.outcome is txmq.Outcome.COMMITTED
    found = [message.value or b"" for message in client.browse("all")]
    assert sorted(found) == sorted([*values, large, b"together", b"with this"])


def test_client_goes_on_where_a_killed_broker_returns(
    tmp_path: Path, certificate: TlsFiles, authority: CertificateAuthority
) -> None:
    settings = settings_of(certificate)
    with (
        BrokerProcess(tmp_path / "data", settings=settings) as broker,
        txmq.connect(address(broker, trusting(authority))) as client,
        client.producer() as producer,
    ):
        client.topics.create("kept", partitions=1)
        for number in range(30):
            if number % 10 == 5:
                broker.restart()
            producer.send("kept", b"%d" % number, timeout=30)
        assert [message.value for message in client.browse("kept")] == [b"%d" % number for number in range(30)]


def test_client_on_an_event_loop_speaks_it(broker: BrokerProcess, authority: CertificateAuthority) -> None:
    async def played() -> None:
        async with await txmq.aio.connect(address(broker, trusting(authority))) as client:
            await client.topics.create("loop", partitions=1)
            async with client.producer() as producer:
                sent = [producer.send("loop", b"%d" % number * 1000) for number in range(500)]
                await asyncio.gather(*sent)
            assert len([message async for message in client.browse("loop")]) == 500

    asyncio.run(played())
    with pytest.raises(BrokerAwayError, match="certificate is refused"):
        asyncio.run(refused_on_a_loop(f"txmqs://{broker.host}:{broker.port}"))


async def refused_on_a_loop(text: str) -> None:
    await txmq.aio.connect(text)


def test_record_of_16_kib_comes_byte_by_byte(broker: BrokerProcess, authority: CertificateAuthority) -> None:
    session = ClientTls(trusting(authority)).session("localhost")
    with raw(broker) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        shake_hands(connection, session)
        wire = session.encrypt(b"ping 1\r\n" * 2048)
        assert len(wire) > 1 << 14
        for at in range(len(wire)):
            connection.sendall(wire[at : at + 1])
        answers, buffer = b"", memoryview(bytearray(1 << 16))
        while answers.count(b"result 200") < 2048:
            session.feed(connection.recv(1 << 16))
            answers += buffer[: session.read_into(buffer)]


# --- the door ---------------------------------------------------------------------------------------------------------


def test_certificate_must_be_valid_for_the_address(broker: BrokerProcess, tmp_path: Path) -> None:
    stranger = CertificateAuthority(tmp_path / "stranger")
    assert "certificate is refused: unable to get local issuer" in refusal(address(broker, trusting(stranger)))
    assert "name its CA (ca=FILE)" in refusal(f"txmqs://{broker.host}:{broker.port}")  # the system's CAs


@pytest.mark.parametrize(
    ("issue", "told"),
    [
        (lambda authority: authority.issue("elsewhere", hosts=["example.org"]), "IP address mismatch"),
        (lambda authority: authority.issue("expired", valid=timedelta(seconds=-10)), "certificate has expired"),
    ],
    ids=["wrong host", "expired"],
)
def test_certificate_that_does_not_hold_is_refused(
    tmp_path: Path, authority: CertificateAuthority, issue: Callable[[CertificateAuthority], TlsFiles], told: str
) -> None:
    with BrokerProcess(tmp_path / "data", settings=settings_of(issue(authority))) as broker:
        assert told in refusal(address(broker, trusting(authority)))


def test_client_must_show_a_certificate_of_the_ca(
    tmp_path: Path, authority: CertificateAuthority, certificate: TlsFiles
) -> None:
    own, strange = authority.issue("client", hosts=[]), CertificateAuthority(tmp_path / "stranger").issue("client")
    settings = settings_of(certificate, tls_ca=str(authority.certificate), tls_client_certificates="required")
    with BrokerProcess(tmp_path / "data", settings=settings) as broker:
        assert "asks for a client certificate" in refusal(address(broker, trusting(authority)))
        unknown = TlsFiles(own.ca, strange.cert, strange.key)
        assert "does not know the CA of this certificate" in refusal(address(broker, unknown))
        with txmq.connect(
            address(broker, trusting(authority)).partition("?")[0], ca=own.ca, cert=own.cert, key=own.key
        ):
            pass


def test_neither_side_falls_back_to_plaintext(broker: BrokerProcess, tmp_path: Path) -> None:
    assert "this port takes TLS only; connect with txmqs://" in refusal(broker.address)
    with BrokerProcess(tmp_path / "plain") as plain:
        told = refusal(plain.address.replace("txmq://", "txmqs://"))
        assert "does not speak TLS there" in told


def test_one_port_takes_both_or_each_has_its_own(
    tmp_path: Path, authority: CertificateAuthority, certificate: TlsFiles
) -> None:
    port, other = free_port(), free_port()
    for plaintext in (port, other):
        settings = settings_of(certificate, listen_plaintext=f"127.0.0.1:{plaintext}")
        with (
            BrokerProcess(tmp_path / "data", listen=f"127.0.0.1:{port}", settings=settings) as broker,
            txmq.connect(address(broker, trusting(authority))) as encrypted,
            txmq.connect(f"txmq://127.0.0.1:{plaintext}") as plain,
        ):
            encrypted.ping()
            plain.ping()
            if plaintext == other:
                assert "takes TLS only" in refusal(broker.address)


def test_hangup_reloads_certificates_for_new_connections(tmp_path: Path) -> None:
    old, new = CertificateAuthority(tmp_path / "old"), CertificateAuthority(tmp_path / "new")
    shown, replacement = old.issue("broker"), new.issue("broker")
    log = tmp_path / "data.log"
    with (
        BrokerProcess(tmp_path / "data", settings=settings_of(shown)) as broker,
        txmq.connect(address(broker, trusting(old))) as client,
    ):
        connection = client.control.live
        Path(replacement.cert).replace(shown.cert)
        hang_up(broker)
        eventually(lambda: "certificates were not reloaded" in log.read_text(), "a wrong pair is told")
        txmq.connect(address(broker, trusting(old))).close()
        Path(replacement.key).replace(shown.key)
        hang_up(broker)
        eventually(lambda: "certificates reloaded" in log.read_text(), "the new ones are read")
        txmq.connect(address(broker, trusting(new))).close()
        assert "certificate is refused" in refusal(address(broker, trusting(old)))
        client.ping()
        assert client.control.live is connection


def test_old_versions_are_refused(broker: BrokerProcess) -> None:
    for version in ("-tls1", "-tls1_1"):
        command = ["openssl", "s_client", "-connect", f"{broker.host}:{broker.port}", version]
        done = subprocess.run([*command, "-cipher", "ALL:@SECLEVEL=0"], input=b"", capture_output=True, timeout=30)
        assert done.returncode != 0
        assert b"alert protocol version" in done.stderr
    for version in ("-tls1_2", "-tls1_3"):
        command = ["openssl", "s_client", "-connect", f"{broker.host}:{broker.port}", version, "-alpn", "txmq"]
        done = subprocess.run(command, input=b"", capture_output=True, timeout=30)
        assert b"ALPN protocol: txmq" in done.stdout


# --- the first try ----------------------------------------------------------------------------------------------------


def test_first_try_by_commands_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listen = f"127.0.0.1:{free_port()}"

    data = str(tmp_path / "data")

    def command(*words: str) -> subprocess.CompletedProcess[bytes]:
        return fork_server.run([sys.executable, "-m", "txmq.cli.main", *words], timeout=60)

    made = command("broker", "init", "--tls-dev", "--data", data, "--listen", listen)
    assert made.returncode == 0, made.stderr
    [line] = [line for line in made.stdout.decode().splitlines() if "export" in line]
    bootstrap = line.partition("=")[2].strip("'")
    for path in (tmp_path / "data").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0
    again = command("broker", "init", "--tls-dev", "--data", data)
    assert again.returncode == 2
    assert b"is not overwritten" in again.stderr
    settings = dict(
        line.replace('"', "").split(" = ")
        for line in (tmp_path / "data" / "broker.toml").read_text().splitlines()
        if " = " in line
    )
    assert settings.pop("data") == data
    assert settings.pop("listen") == listen
    with BrokerProcess(tmp_path / "data", listen=listen, settings=settings):
        assert command("topic", "create", "orders", "--bootstrap", bootstrap).returncode == 0
        assert b'"orders"' in command("topic", "list", "--json", "--bootstrap", bootstrap).stdout
        refused = command("topic", "list", "--bootstrap", bootstrap.partition("&")[0])
        assert refused.returncode == 1
        assert b"asks for a client certificate" in refused.stderr
        monkeypatch.setenv("TXMQ_NEW_PASSWORD", "a pencil")
        assert command("user", "add", "ops", "--bootstrap", bootstrap).returncode == 0
        monkeypatch.setenv("TXMQ_PASSWORD", "a pencil")
        named = bootstrap.replace("://", "://ops@")  # as docs/how-to/secure.md, "Users", says
        assert command("user", "add", "shop", "--bootstrap", named).returncode == 0
        assert b"asks for a client certificate" in command("user", "list", "-b", named.partition("&")[0]).stderr
