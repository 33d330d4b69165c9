"""The resolver's file: what it opens, and what it refuses."""

from __future__ import annotations

import inspect
import sqlite3
from contextlib import closing, nullcontext
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tools.simulated.broker import SimulatedBroker
from txmq.cli import resolver
from txmq.cli.main import app
from txmq.errors import ConfigError
from txmq.xa import LastResource, MySQLResource


def _write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "resolver.toml"
    path.write_text(text)
    return path


def test_a_sqlite_file_is_opened_and_never_created(tmp_path: Path) -> None:
    database = tmp_path / "a b?#.db"
    opened = resolver.connector({"driver": "sqlite3", "connect": {"database": str(database)}}, "here")
    with pytest.raises(sqlite3.OperationalError):
        opened()
    assert not database.exists()
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("CREATE TABLE t (a)")
    with closing(opened()) as connection:
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("t",)]


def test_a_relative_sqlite_path_is_refused() -> None:
    with pytest.raises(ConfigError, match="absolute path"):
        resolver.connector({"driver": "sqlite3", "connect": {"database": "orders.db"}}, "here")


def test_a_password_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PLACE", str(tmp_path / "x.db"))
    with closing(sqlite3.connect(tmp_path / "x.db")) as connection, connection:
        connection.execute("CREATE TABLE t (a)")
    table = {"driver": "sqlite3", "connect": {"database": {"env": "PLACE"}}}
    with closing(resolver.connector(table, "here")()) as connection:
        assert connection.execute("SELECT count(*) FROM t").fetchone() == (0,)
    monkeypatch.delenv("PLACE")
    with pytest.raises(ConfigError, match=r"connect\.database: the environment has no variable PLACE"):
        resolver.connector(table, "here")
    with pytest.raises(ConfigError, match=r"connect\.database: expected a value or \{ env ="):
        resolver.connector(table | {"connect": {"database": {"evn": "PLACE"}}}, "here")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "at least one database"),
        ("resource = 3", "at least one database"),
        ("[resource]\nname = 'a'", "at least one database"),
        ("bootstarp = 'x'", "did you mean 'bootstrap'"),
        ("[[resource]]\nname = 'a'\ndriver = 'sqlite3'\nconect = {}", "did you mean 'connect'"),
        ("[[resource]]\nname = 'a'", "name and driver must be text"),
        ("[[resource]]\nname = 1\ndriver = 'sqlite3'", "name and driver must be text"),
        ("[[resource]]\nname = 'a'\ndriver = 'no_such_driver'", "cannot import the driver"),
        (
            "[[resource]]\nname = 'a'\ndriver = 'sqlite3'\nconnect = '/srv/a.db'",
            "give the arguments of sqlite3.connect by name",
        ),
        ("[[resource", "cannot read"),
        ("[[resource]]\nname = 'a'\ndriver = 'sqlite3'\nmarker = true", "unknown key 'marker'; known: name, kind"),
        ("[[resource]]\nname = 'a'\ndriver = 'sqlite3'\nallow_weak_durability = 1", "expected true or false"),
        ("[[resource]]\nname = 'a'\ndriver = 'sqlite3'\nignore_tables = 'log'", "expected a list of names"),
    ],
)
def test_a_bad_file_is_refused_saying_why(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        resolver.read_config(_write(tmp_path, text))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml"):
        resolver.read_config(tmp_path / "absent.toml")


def test_a_good_file_names_the_broker_and_the_resources(tmp_path: Path) -> None:
    text = "bootstrap = 'txmq://127.0.0.1:1'\n[[resource]]\nname = 'shop'\ndriver = 'sqlite3'\n"
    path = _write(tmp_path, f"{text}connect = {{ database = '{tmp_path}/shop.db' }}\n")
    address, [resource] = resolver.read_config(path)
    assert (address, resource.name) == ("txmq://127.0.0.1:1", "shop")


def test_a_resource_takes_every_option_that_its_class_takes(tmp_path: Path) -> None:
    for kind, made in (("last-resource", LastResource), ("mysql-xa", MySQLResource)):
        lines = {"dialect": "'mysql'", "table": "'other'", "marker": "false", "allow_weak_durability": "true"}
        lines |= {"ignore_tables": "['log', 'shop.log']"}
        options = set(inspect.signature(made).parameters) - {"name", "connect", "clock", "random"}
        assert options <= lines.keys(), "an option without a line in this test"
        text = "".join(f"{name} = {lines[name]}\n" for name in sorted(options))
        path = _write(tmp_path, f"[[resource]]\nname = 'shop'\nkind = '{kind}'\ndriver = 'MySQLdb'\n{text}")
        _, [resource] = resolver.read_config(path)
        demands = resource.installation._demands
        assert (demands.allow_weak_durability, demands.ignore_tables) == (True, ["log", "shop.log"])
        assert getattr(resource, "has_marker", False) is False


def test_transaction_in_doubt_names_what_its_resource_needs() -> None:
    listed = {
        "kind": "last-resource", "resource": "shop", "prepared_ms": 0, "age_ms": 5000, "deadline_ms": 9000,
        "owner_connected": False, "owner_gone_ms": 10,
    }  # fmt: skip
    assert "names no resource 'shop'" in resolver.why(listed, {"other"})
    assert "the checker of its producer group" in resolver.why(listed | {"kind": "half"}, {"other"})
    assert "run this again" in resolver.why(listed, {"shop"})
    assert "could not prove" in resolver.why(listed | {"owner_gone_ms": 4000}, {"shop"})


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> SimulatedBroker:
    """The broker that is told."""
    made = SimulatedBroker()
    monkeypatch.setattr("txmq.connect", lambda _address: nullcontext(made))
    return made


def _adopt(tmp_path: Path, *words: str, stdin: str = "") -> tuple[int, str]:
    path = _write(
        tmp_path,
        f'[[resource]]\nname = "shop"\ndriver = "sqlite3"\nconnect = {{ database = "{tmp_path / "shop.db"}" }}\n',
    )
    found = CliRunner().invoke(app, ["resolver", "adopt", "--config", str(path), *words], input=stdin)
    return found.exit_code, f"{found.output} {found.exception}"


def test_adopt_makes_the_file_that_is_there_the_one(tmp_path: Path, home: SimulatedBroker) -> None:
    LastResource("shop", connect=lambda: sqlite3.connect(tmp_path / "shop.db")).install()
    assert _adopt(tmp_path, stdin="n\n")[0] == 1
    assert home.tokens == {}
    status, said = _adopt(tmp_path, "shop", "--yes")
    assert (status, "adopted: shop" in said) == (0, True), said
    with closing(sqlite3.connect(tmp_path / "shop.db")) as database:
        assert database.execute("SELECT drawn FROM txmq_marker_token").fetchall() == [(*home.tokens.values(),)]


@pytest.mark.usefixtures("home")
def test_adopt_refuses_what_is_not_installed_or_not_named(tmp_path: Path) -> None:
    sqlite3.connect(tmp_path / "shop.db").execute("CREATE TABLE orders (id)")
    status, said = _adopt(tmp_path, "--yes")
    assert (status, "call install() once" in said) == (1, True), said
    with closing(sqlite3.connect(tmp_path / "shop.db")) as database:
        assert database.execute("SELECT name FROM sqlite_master").fetchall() == [("orders",)]
    status, said = _adopt(tmp_path, "depot", "--yes")
    assert (status, "names no resource 'depot'" in said) == (1, True), said


@pytest.mark.usefixtures("home")
def test_adopt_says_which_database_it_cannot_reach(tmp_path: Path) -> None:
    LastResource("shop", connect=lambda: sqlite3.connect(tmp_path / "shop.db")).install()
    path = _write(tmp_path, "".join(_table(tmp_path, name) for name in ("shop", "depot")))
    found = CliRunner().invoke(app, ["resolver", "adopt", "--config", str(path), "--yes"])
    assert (found.exit_code, isinstance(found.exception, SystemExit)) == (1, True), found.exception
    assert "resource depot: not reached: OperationalError: unable to open database file" in found.output
    assert "depot.db" in found.output
    assert "adopted before it: shop" in found.output


def _table(tmp_path: Path, name: str) -> str:
    return f'[[resource]]\nname = "{name}"\ndriver = "sqlite3"\nconnect = {{ database = "{tmp_path}/{name}.db" }}\n'


def test_the_resolver_asks_for_its_file() -> None:
    assert "--config FILE is missing" in str(CliRunner().invoke(app, ["resolver"]).exception)
