"""What the command line says of an error, and of the next step."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from txmq.cli import main
from txmq.errors import BrokerAwayError


@pytest.mark.parametrize(
    ("text", "step"),
    [
        ("cannot connect to h:1: refused", ": is a broker running? start one with: txmq broker (or name another with"),
        ("cannot connect to home 0b: refused", ": start the broker that has this home (txmq cluster describe names it"),
        ("no ZooKeeper server answers at h:2181 within 5 s: start it, or correct the address", "\n"),
        (
            "cannot connect to h:1: a replica of home 0b, and no broker",
            ": name the leader, or the registry, with --boot",
        ),
        ("no broker of the cluster in zk://h/p is alive", ": start the brokers of the cluster\n"),
    ],
)
def test_broker_that_is_away_comes_with_the_next_step(
    text: str, step: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _told(BrokerAwayError(text), capsys, monkeypatch).startswith(f"txmq: {text}{step}")


DROPPED = """
import sys, time, weakref
from txmq.cli.main import interrupt_again

sys.unraisablehook = interrupt_again

class Kept: pass

def struck(_reference):
    raise KeyboardInterrupt

kept = Kept()
reference = weakref.ref(kept, struck)
del kept
try:
    time.sleep(60)
except KeyboardInterrupt:
    print("stopped")
"""


def test_ctrl_c_that_python_drops_strikes_once_more() -> None:
    """Found: ``txmq bench`` went on, for its Ctrl-C had struck the callback of a weak reference."""
    ran = subprocess.run([sys.executable, "-c", DROPPED], capture_output=True, text=True, check=True)
    assert (ran.stdout, ran.stderr) == ("stopped\n", "")


def test_notes_of_an_error_stand_behind_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    error = BrokerAwayError("cannot connect to home 0b: refused")
    error.add_note("3 of 5 messages were acknowledged; failed: orders-1")
    told = _told(error, capsys, monkeypatch)
    assert told.endswith("(txmq cluster describe names it); 3 of 5 messages were acknowledged; failed: orders-1\n")


@pytest.mark.parametrize(
    "words",
    [
        ("acl", "add", "shop", "--may", "read", "--topic", "orders", "--topic", "invoices"),
        ("consume", "--topic", "orders", "-t", "invoices"),
        ("broker", "--sync", "never", "--sync=always"),
    ],
)
def test_an_option_that_is_given_twice_is_refused(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _ended(words, monkeypatch) == 2
    assert re.fullmatch(r"txmq: --(topic|sync) is given twice; give it once\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    "words",
    [
        ("broker", "--registry", "zk://brokers:pencil@zoo1/prod"),
        ("broker", "--set", "registry=zks://brokers:pencil@zoo1/prod"),
        ("topic", "list", "--bootstrap=zk://brokers:pencil@zoo1"),
        ("resolver", "-b", "zk://brokers:pen/c@il@zoo1"),
        ("audit", "--topic", "t", "--database", "mysql://app:pencil@db/shop"),
        ("audit", "--topic", "t", "--database=mariadb://app:pen:c@il@db/shop", "--table", "orders"),
        ("audit", "--topic", "t", "--database", "jdbc:postgresql://db/shop?user=app&password=pencil"),
        ("audit", "--topic", "t", "--database", "jdbc:sqlserver://db;user=app;PWD=pencil;x=1"),
        ("audit", "--topic", "t", "--database", "jdbc:oracle:thin:app/pencil@db:1521/shop"),
    ],
)
def test_password_in_an_address_is_for_no_command_line(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _ended(words, monkeypatch) == 2
    said = capsys.readouterr().err
    assert said.startswith("txmq: an address with a password is for no command line")
    assert "pen" not in said


def test_first_word_that_is_no_branch_gets_the_nearest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _ended(("brokr",), monkeypatch) == 2
    assert "Did you mean 'broker'?" in capsys.readouterr().err


def _ended(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setattr(sys, "argv", ["txmq", *words])
    with pytest.raises(SystemExit) as ended:
        main.main()
    return ended.value.code


def _told(error: Exception, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    def run() -> None:
        raise error

    monkeypatch.setattr(main, "command", lambda _words: run)
    monkeypatch.setattr(sys, "argv", ["txmq"])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 1
    return capsys.readouterr().err
