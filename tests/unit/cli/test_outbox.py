"""The file of ``txmq outbox``: what it names, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from txmq.cli import outbox, resolver
from txmq.errors import ConfigError

_GOOD = "[[outbox]]\nname = 'a'\ndriver = 'sqlite3'\nconnect = { database = '/srv/a.db' }\n"


def _write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "outbox.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", r"at least one database in a \[\[outbox\]\]"),
        ("outbox = 3", "at least one database"),
        ("[[outbox]]\nname = 'a'\ndriver = 'sqlite3'\nconect = {}", "did you mean 'connect'"),
        ("[[outbox]]\nname = 'a'", "name and driver must be text"),
        ("[[outbox]]\nname = 'a b'\ndriver = 'sqlite3'\nconnect = { database = '/a' }", "outbox name 'a b'"),
        (f"{_GOOD}table = 3", "table must be text"),
        (_GOOD + _GOOD, "'a' stands there twice"),
        ("[[outbox", "cannot read"),
    ],
)
def test_a_bad_file_is_refused_saying_why(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        outbox._read(_write(tmp_path, text), None)


def test_one_file_may_serve_relay_and_resolver(tmp_path: Path) -> None:
    text = f"bootstrap = 'txmq://127.0.0.1:1'\n{_GOOD}table = 'other'\n{_GOOD.replace('outbox', 'resource')}"
    path = _write(tmp_path, text)
    address, [place] = outbox._read(path, None)
    assert (address, place.outbox.name, place.outbox.table) == ("txmq://127.0.0.1:1", "a", "other")
    assert outbox._read(path, "txmq://127.0.0.1:2")[0] == "txmq://127.0.0.1:2"
    assert resolver.read_config(path)[1][0].name == "a"
