"""The command line against a real broker, as a person or a program uses it."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

import txmq
from txmq.cli.demo import service as demo_service
from txmq.testing.eventually import eventually
from txmq.testing.processes import fork_server
from txmq.testing.processes.broker import BrokerProcess, free_port

TIMEOUT_S = 60


def run(broker: BrokerProcess | None, *words: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    where = ["--bootstrap", broker.address] if broker is not None else []
    command = [sys.executable, "-m", "txmq.cli.main", *words, *where]
    return fork_server.run(command, stdin=stdin, timeout=TIMEOUT_S)


def ok(broker: BrokerProcess | None, *words: str, stdin: bytes = b"") -> bytes:
    result = run(broker, *words, stdin=stdin)
    assert result.returncode == 0, result.stderr.decode()
    return result.stdout


def as_json(broker: BrokerProcess | None, *words: str) -> object:
    return json.loads(ok(broker, *words, "--json"))


def test_topics_are_created_changed_listed_and_deleted(broker: BrokerProcess) -> None:
    created = as_json(broker, "topic", "create", "orders", "--partitions", "3", "--set", "retention_ms=1000")
    assert isinstance(created, dict)
    assert (created["name"], created["partitions"], created["retention_ms"]) == ("orders", 3, 1000)
    ok(broker, "topic", "alter", "orders", "--partitions", "4", "--set", "retention_ms=none")
    described = as_json(broker, "topic", "describe", "orders")
    assert isinstance(described, dict)
    assert (described["partitions"], described["retention_ms"], len(described["ranges"])) == (4, None, 4)
    of_third = {"topic": "orders", "partition": 2, "broker_number": "0-2", "start": 0, "end": 0, "count": 0, "bytes": 0}
    assert described["ranges"][2].pop("log").startswith("1.")
    assert described["ranges"][2] == of_third
    assert b"broker-number" in ok(broker, "topic", "describe", "orders")
    assert b"orders" in ok(broker, "topic", "list")
    ok(broker, "topic", "delete", "orders", "--yes")
    assert as_json(broker, "topic", "list") == []


def test_delete_of_an_unknown_topic_fails_before_the_question(broker: BrokerProcess) -> None:
    ok(broker, "topic", "create", "orders")
    result = run(broker, "topic", "delete", "ordrs")
    assert result.returncode == 1
    assert result.stderr.startswith(b"txmq: ")
    assert result.stderr.endswith(b"did you mean 'orders'?\n")


@pytest.mark.parametrize(
    "words",
    [
        ("spool", "list", "{folder}"), ("spool", "drain", "{folder}"), ("journal", "verify", "--data", "{folder}"),
        ("log", "verify", "--data", "{folder}"), ("resolver", "--config", "{folder}/none"),
        ("topic", "alter", "orders"),
    ],
)  # fmt: skip
def test_wrong_command_line_ends_with_status_2(words: tuple[str, ...], tmp_path: Path) -> None:
    result = run(None, *(word.format(folder=tmp_path) for word in words))
    assert result.returncode == 2
    assert result.stderr.startswith(b"txmq: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "closed", "said"),
    [
        ("produce -t orders", "<&-", "standard input is closed; redirect it, if only to /dev/null"),
        ("topic delete orders", "<&-", "standard input is closed; redirect it, if only to /dev/null"),
        ("consume -t orders", ">&-", "standard output is closed; redirect it, if only to /dev/null"),
        ("consume -t orders --json", ">&-", "standard output is closed; redirect it, if only to /dev/null"),
        ("topic list", ">&-", "standard output is closed; redirect it, if only to /dev/null"),
        ("produce -t orders --key \udcff", "", "--key \\udcff: not UTF-8"),
        ("consume -t \udcff", "", "'\\udcff' cannot name a topic: 1 to 200 of A-Z a-z 0-9 . _ -"),
    ],
)
def test_what_a_shell_gives_wrongly_is_told_in_one_line(
    broker: BrokerProcess, words: str, closed: str, said: str
) -> None:
    ok(broker, "topic", "create", "orders")
    ok(broker, "produce", "-t", "orders", stdin=b"one\n")
    command = [sys.executable, "-m", "txmq", *words.split(), "--bootstrap", broker.address]
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", *command], input=b"a,b\n", capture_output=True, check=False
    )
    assert done.returncode in (1, 2)
    question = "Delete topic orders and all its messages? [y/N]:" if "delete" in words else ""
    assert done.stderr.decode() == f"{question}txmq: {said}\n"


def test_a_host_that_cannot_be_is_told_in_one_line() -> None:
    done = run(None, "topic", "list", "--bootstrap", "txmq://a..b")
    assert (done.returncode, done.stderr.count(b"\n")) == (2, 1)
    assert done.stderr.startswith(b"txmq: bootstrap = 'txmq://a..b': expected txmq://HOST[:PORT]")


def test_a_topic_is_closed_and_opened_for_publishing(broker: BrokerProcess) -> None:
    ok(broker, "topic", "create", "orders")
    closed = as_json(broker, "topic", "close", "orders", "--publish")
    assert isinstance(closed, dict)
    assert (closed["accept_publish"], closed["accept_read"]) == (False, True)
    refused = run(broker, "produce", "--topic", "orders", stdin=b"x\n")
    assert refused.returncode == 1
    assert b"Traceback" not in refused.stderr
    opened = run(broker, "topic", "open", "orders")
    assert (opened.stdout, opened.stderr) == (b"", b"topic orders: open for publishing, open for reading\n")
    ok(broker, "produce", "--topic", "orders", stdin=b"x\n")


def test_what_is_produced_is_consumed_byte_for_byte(broker: BrokerProcess) -> None:
    ok(broker, "topic", "create", "lines")
    sent = b"".join(b"line %d \xff\x00\t\n" % number for number in range(5000))
    said = json.loads(ok(broker, "produce", "--topic", "lines", "--json", stdin=sent))
    assert said == {"topic": "lines", "acknowledged": 5000, "interrupted": False}
    assert ok(broker, "consume", "--topic", "lines") == sent


def test_a_file_with_keys_keeps_the_order_per_key(broker: BrokerProcess, tmp_path: Path) -> None:
    ok(broker, "topic", "create", "keyed", "--partitions", "4")
    file = tmp_path / "lines"
    file.write_text("".join(f"k{number % 7},{number}\n" for number in range(700)))
    ok(broker, "produce", str(file), "--topic", "keyed", "--key", ",")
    messages = [json.loads(line) for line in ok(broker, "consume", "--topic", "keyed", "--json").splitlines()]
    by_key: dict[str, list[int]] = {}
    for message in messages:
        by_key.setdefault(message["key"], []).append(int(message["value"]))
    assert by_key == {f"k{key}": list(range(key, 700, 7)) for key in range(7)}


@pytest.mark.parametrize(
    "words", [("topic", "describe"), ("topic", "close"), ("consume", "--topic"), ("produce", "--topic")]
)
def test_a_misspelt_topic_is_told_with_the_nearest_name(broker: BrokerProcess, words: tuple[str, ...]) -> None:
    ok(broker, "topic", "create", "orders")
    result = run(broker, *words, "ordrs", stdin=b"x\n")
    assert result.returncode == 1
    assert result.stderr.endswith(b"did you mean 'orders'?\n")
    assert b"did you mean" not in run(broker, *words, "zzz", stdin=b"x\n").stderr


def test_consume_says_when_it_cannot_begin_where_it_is_told(broker: BrokerProcess) -> None:
    settings = ("--partitions", "2", "--set", "segment_size_bytes=4096", "--set", "retention_size_bytes=4096")
    ok(broker, "topic", "create", "short", *settings)
    big = b"x" * 3000 + b"\n"
    for _ in range(6):  # one by one: a batch never spans segments
        ok(broker, "produce", "--topic", "short", "--partition", "0", stdin=big)
    beyond = run(broker, "consume", "--topic", "short", "--from", "5", "--partition", "1")
    assert (beyond.returncode, beyond.stdout) == (0, b"")
    assert beyond.stderr == b"--from 5: partition 1 ends at 0, so nothing that is there now is that new\n"
    for_programs = run(broker, "consume", "--topic", "short", "--from", "5", "--json")
    assert [json.loads(line)["offset"] for line in for_programs.stdout.splitlines()] == [5]
    moved = [{"partition": 1, "start": 0, "end": 0, "begins": 0}]
    assert json.loads(for_programs.stderr) == {"from": 5, "moved": moved}
    assert run(broker, "consume", "--topic", "short", "--from", "6", "--partition", "0").stderr == b""


def test_what_retention_took_is_said(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "broker", settings={"retention_check_interval_ms": 10}) as broker:
        ok(broker, "topic", "create", "short", "--set", "segment_size_bytes=4096", "--set", "retention_size_bytes=4096")
        with txmq.connect(broker.address) as client, client.producer() as producer:
            for _ in range(8):
                producer.send("short", bytes(3000))
            eventually(lambda: client.offsets("short", 0).start, "retention removes the first segment")
        said = run(broker, "consume", "--topic", "short", "--from", "0", "--max", "1").stderr.decode()
    assert re.fullmatch(r"--from 0: partition 0 begins at [1-7], older messages are gone \(retention\)\n", said)


def test_a_transaction_is_shown_with_its_parts(broker: BrokerProcess) -> None:
    with txmq.connect(broker.address) as client, client.producer() as producer:
        client.topics.create("orders", partitions=2)
        with producer.transaction() as tx:
            producer.send("orders", b"a", partition=0)
            producer.send("orders", b"b", partition=1)
    shown = as_json(broker, "tx", "show", str(tx.txid))
    assert isinstance(shown, dict)
    assert shown["outcome"] == "committed"
    places = [{"topic": "orders", "partition": number, "base_offset": 0, "count": 1} for number in (0, 1)]
    assert shown["parts"] == places
    text = ok(broker, "tx", "show", str(tx.txid)).decode()
    assert "base_offset" in text
    assert "[{" not in text


def test_consume_begins_and_ends_at_the_given_offsets(broker: BrokerProcess) -> None:
    ok(broker, "topic", "create", "numbers")
    ok(broker, "produce", "--topic", "numbers", "--partition", "0", stdin=b"0\n1\n2\n3\n")
    assert ok(broker, "consume", "--topic", "numbers", "--from", "2") == b"2\n3\n"
    assert ok(broker, "consume", "--topic", "numbers", "--max", "1") == b"0\n"
    assert ok(broker, "consume", "--topic", "numbers", "--from", "latest") == b""
    assert ok(broker, "consume", "--topic", "numbers", "--from", "@0") == b"0\n1\n2\n3\n"
    assert ok(broker, "consume", "--topic", "numbers", "--from", "2999-01-01") == b""


def test_value_that_is_not_text_comes_as_base64_in_json(broker: BrokerProcess) -> None:
    ok(broker, "topic", "create", "bytes")
    ok(broker, "produce", "--topic", "bytes", stdin=b"\xff\x00\n")
    [message] = [json.loads(line) for line in ok(broker, "consume", "--topic", "bytes", "--json").splitlines()]
    assert (message["value_base64"], message["key"], message["offset"]) == ("/wA=", None, 0)


def test_consume_follows_and_ends_cleanly_on_ctrl_c(broker: BrokerProcess) -> None:
    ok(broker, "topic", "create", "news", "--partitions", "2")
    command = [sys.executable, "-m", "txmq.cli.main", "consume", "-t", "news", "--follow", "-b", broker.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as reader:
        try:
            assert reader.stdout is not None
            for number in range(3):
                ok(broker, "produce", "--topic", "news", stdin=b"news %d\n" % number)
                assert reader.stdout.readline() == b"news %d\n" % number
            reader.send_signal(signal.SIGINT)
            _, errors = reader.communicate(timeout=TIMEOUT_S)
            assert errors.decode() == ""
            assert reader.returncode == 0
        finally:
            reader.kill()


def test_ctrl_c_amid_trickling_lines_reports_how_many_were_acknowledged(broker: BrokerProcess) -> None:
    ok(broker, "topic", "create", "trickle")
    command = [sys.executable, "-m", "txmq.cli.main", "produce", "-t", "trickle", "--json", "-b", broker.address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        try:
            assert writer.stdin is not None
            assert writer.stdout is not None
            writer.stdin.write(b"one\ntwo\nhalf a li")
            writer.stdin.flush()
            with txmq.connect(broker.address) as client:
                assert [message.value for message in client.fetch("trickle", 0, 0, timeout=60.0)][:1] == [b"one"]
            writer.send_signal(signal.SIGINT)
            said = json.loads(writer.stdout.read())
            assert said == {"topic": "trickle", "acknowledged": 2, "interrupted": True}
            assert writer.wait(TIMEOUT_S) == 130
        finally:
            writer.kill()
    assert ok(broker, "consume", "--topic", "trickle") == b"one\ntwo\n"


def test_the_reader_of_the_output_may_go(broker: BrokerProcess) -> None:
    ok(broker, "topic", "create", "long")
    ok(broker, "produce", "--topic", "long", stdin=b"x" * 99 + b"\n" + (b"y" * 99 + b"\n") * 20_000)
    pipeline = f'"{sys.executable}" -m txmq.cli.main consume -t long -b {broker.address} | head -n 1'
    result = subprocess.run(["/bin/sh", "-c", pipeline], capture_output=True, timeout=TIMEOUT_S, check=False)
    assert (result.stdout, result.stderr) == (b"x" * 99 + b"\n", b"")


def test_stats_and_transactions_are_shown(broker: BrokerProcess) -> None:
    assert isinstance(as_json(broker, "stats"), dict)
    assert ok(broker, "stats")
    assert as_json(broker, "tx", "list") == []
    assert b"0 in doubt" in ok(broker, "tx", "list")


def test_every_item_of_the_figures_is_whole_in_json(broker: BrokerProcess) -> None:
    ok(broker, "topic", "create", "orders", "--partitions", "2")
    held = [{"topic": "orders", "partition": number, "start": 0, "end": 0, "bytes": 0} for number in (0, 1)]
    assert as_json(broker, "stats", "offsets") == held
    assert json.loads(ok(broker, "stats", "json")).keys() == {
        "broker", "transactions", "resources", "topics", "offsets", "chains", "config"
    }  # fmt: skip
    assert as_json(broker, "stats", "resources") == []
    assert b"in_doubt" in ok(broker, "stats", "transactions")
    of_topic, config, lines = (as_json(broker, "stats", item) for item in ("orders", "config", "help"))
    assert isinstance(of_topic, dict)
    assert (of_topic["accept_read"], of_topic["offsets"]) == (True, held)
    assert isinstance(config, dict)
    assert (config["insecure_plaintext"], config["default_retention_ms"], config["in_flight_max"]) == (False, None, 8)
    assert (config["inline_sync_ms"], config["sync"]) == (1.0, "always")
    assert isinstance(lines, list)
    assert len(lines) == 10


def test_version_is_an_option() -> None:
    assert ok(None, "--version") == ok(None, "version")


def test_without_a_broker_the_error_says_how_to_start_one() -> None:
    result = run(None, "topic", "list", "--bootstrap", f"txmq://127.0.0.1:{free_port()}")
    assert result.returncode == 1
    assert result.stderr.count(b"\n") == 1
    assert result.stderr.count(b"start one with: txmq broker") == 1
    assert b"--bootstrap" in result.stderr


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (("topic", "create", "a b"), 1, b"cannot name a topic"),
        (("topic", "describe", "absent"), 1, b"absent"),
        (("produce", "--topic", "absent"), 1, b"absent"),
        (("produce", "--topic", "absent", "--key", ""), 2, b"separator"),
        (("consume", "--topic", "absent"), 1, b"absent"),
        (("topic", "create", "t", "--set", "colour=red"), 2, b"colour: unknown topic setting; known: partitions"),
        (("topic", "create", "t", "--set", "retention=5"), 2, b"did you mean 'retention_ms'?"),
        (("topic", "alter", "t"), 2, b"nothing to change"),
        (("tx", "show", "nonsense"), 1, b"nonsense"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    shared_broker: BrokerProcess, words: tuple[str, ...], status: int, said: bytes
) -> None:
    result = run(shared_broker, *words)
    assert result.returncode == status
    assert said in result.stderr
    assert result.stderr.count(b"\n") == 1


def test_name_with_line_break_stays_on_one_line_of_error(shared_broker: BrokerProcess) -> None:
    result = run(shared_broker, "topic", "create", "a\nb\x1b[2J")
    assert result.returncode == 1
    assert result.stderr.count(b"\n") == 1
    assert b"\x1b" not in result.stderr


def test_journal_and_log_of_stopped_broker_are_dumped_and_verified(broker: BrokerProcess) -> None:
    data = str(broker.data_dir)
    ok(broker, "topic", "create", "orders")
    ok(broker, "produce", "--topic", "orders", stdin=b"hello\n")
    refused = run(None, "journal", "verify", "--data", data)
    assert refused.returncode == 1
    assert b"process" in refused.stderr
    broker.kill()
    assert b"RUN" in ok(None, "journal", "dump", "--data", data).upper()
    assert b"hello" not in ok(None, "journal", "dump", "--data", data)
    assert b"sound" in ok(None, "journal", "verify", "--data", data)
    broker.start()
    assert broker.stop() == 0
    assert json.loads(ok(None, "log", "verify", "--data", data, "--json"))["sound"] is True


def test_damage_is_found_and_named(broker: BrokerProcess) -> None:
    ok(broker, "topic", "create", "orders")
    for _ in range(3):  # batches: the damaged one must not be taken for a torn tail
        ok(broker, "produce", "--topic", "orders", stdin=b"hello\n" * 100)
    broker.stop()
    [segment] = (broker.data_dir / "log").rglob("*.log")
    damaged = bytearray(segment.read_bytes())
    damaged[100] ^= 1
    segment.write_bytes(damaged)
    result = run(None, "log", "verify", "--data", str(broker.data_dir))
    assert result.returncode == 1
    assert segment.name.encode() in result.stdout


def test_resolver_waits_for_the_broker_settles_and_stops_on_sigterm(broker: BrokerProcess, tmp_path: Path) -> None:
    database = tmp_path / "orders.db"
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, reference TEXT, customer TEXT)")
    with txmq.connect(broker.address) as client:
        for topic in (demo_service.ORDERS, demo_service.PAYMENTS, demo_service.AUDIT):
            client.topics.create(topic)
        demo_service.open_resource(str(database)).install(client)
    service = [sys.executable, "-m", "txmq.cli.demo.service", broker.address, str(database), "1"]
    environment = os.environ | {"TXMQ_CRASH": "client.tx.db_committed:3"}
    killed = subprocess.run(service, env=environment, capture_output=True, timeout=TIMEOUT_S, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert as_json(broker, "tx", "list") != []

    config = tmp_path / "resolver.toml"
    config.write_text(
        f"[[resource]]\nname = {json.dumps(demo_service.RESOURCE_NAME)}\ndriver = 'sqlite3'\n"
        f"connect = {{ database = {json.dumps(str(database))} }}\n"
    )
    command = [sys.executable, "-m", "txmq.cli.main", "resolver", "--config", str(config), "-b", broker.address]
    broker.kill()
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as resolver:
        try:
            assert resolver.stderr is not None
            assert json.loads(resolver.stderr.readline())["event"] == "waiting for the broker"
            broker.restart()
            client = txmq.connect(broker.address)
            assert json.loads(resolver.stderr.readline())["event"] == "transaction resolved"
            eventually(lambda: not list(client.transactions.list(state="in-doubt")), "nothing is in doubt")
            resolver.send_signal(signal.SIGTERM)
            assert resolver.wait(TIMEOUT_S) == 0
        finally:
            resolver.kill()
    with client:
        sent = [json.loads(message.value or b"")["reference"] for message in client.browse(demo_service.ORDERS)]
    with closing(sqlite3.connect(database)) as connection:
        rows = [reference for (reference,) in connection.execute("SELECT reference FROM orders")]
    assert sorted(sent) == sorted(rows)
    done = run(broker, "resolver", "--config", str(config), "--once", "--json")
    assert (done.returncode, json.loads(done.stdout)) == (
        0, {"settled": 0, "in_doubt": 0, "in_database": 0, "heuristic": 0, "problems": {}}
    )  # fmt: skip
