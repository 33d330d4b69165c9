"""Where a command's passwords come from: a file, the environment, a terminal; never the command line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from txmq.cli.connecting import NEW_PASSWORD, first_password, new_password, own_password
from txmq.errors import ConfigError


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A terminal where ``pencil`` is typed; what was asked there."""
    questions: list[str] = []

    def prompt(text: str, **options: Any) -> str:
        assert options["hide_input"]
        assert options["err"]  # standard output is for what a command tells
        questions.append(text)
        return "pencil"

    monkeypatch.setattr(typer, "prompt", prompt)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    for name in ("TXMQ_PASSWORD", NEW_PASSWORD):
        monkeypatch.delenv(name, raising=False)
    return questions


def test_user_of_the_address_is_asked_for_the_password(asked: list[str]) -> None:
    assert own_password("txmqs://ops@a") == "pencil"
    assert asked == ["Password of ops"]


@pytest.mark.parametrize(
    "address", ["txmq://a", "zk://me:secret@a", "txmqs://ops@a?password_file=x", "txmqs://ops@a?cert=x&key=y"]
)
def test_nobody_is_asked_without_need(asked: list[str], address: str) -> None:
    assert own_password(address) == ""
    assert asked == []


def test_the_environment_goes_before_the_terminal(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TXMQ_PASSWORD", "crayon")
    monkeypatch.setenv(NEW_PASSWORD, "chalk")
    assert own_password("txmq://ops@a") == ""  # the client reads it
    assert new_password(None) == "chalk"
    assert asked == []


def test_without_a_terminal_nobody_is_asked(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    assert own_password("txmq://ops@a") == ""
    with pytest.raises(ConfigError, match=f"--password-file, or set {NEW_PASSWORD}"):
        new_password(None)
    assert asked == []


def test_new_password_is_of_the_file_or_typed_twice(asked: list[str], tmp_path: Path) -> None:
    assert new_password(None) == "pencil"
    assert asked == ["New password"]
    file = tmp_path / "shop.password"
    file.write_text("swordfish\n")
    file.chmod(0o600)
    assert new_password(str(file)) == "swordfish"
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        new_password(str(file))


def test_password_of_the_first_administrator_is_never_a_known_one(asked: list[str]) -> None:
    drawn = {first_password(None, is_generated=True) for _ in range(100)}
    assert len(drawn) == 100
    assert all(len(password) == 24 and is_generated for password, is_generated in drawn)
    assert first_password(None, is_generated=False) == ("pencil", False)
    with pytest.raises(ConfigError, match="give one of them"):
        first_password("x", is_generated=True)
