"""``--help`` on a terminal of 80 columns."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main

from txmq.cli.main import app, command


def _tree(one: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield words, one
    for name, below in getattr(one, "commands", {}).items():
        yield from _tree(below, (*words, name))


WRITTEN = {words: inspect.cleandoc(one.help or "") for words, one in _tree(typer.main.get_command(app))}


@pytest.mark.parametrize("words", list(WRITTEN), ids=" ".join)
def test_what_is_to_be_pasted_stands_as_it_was_written(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands and files keep their lines and their indentation."""
    lines = _shown(words, capsys, monkeypatch)
    pasted = [line.replace("\\[", "[") for line in WRITTEN[words].splitlines() if line.startswith("  ")]
    assert [line for line in pasted if f" {line}" not in lines] == []
    assert pasted or not words or "COMMAND" in lines[1], "an example of each command"


def test_branch_that_the_words_name_is_built_alone() -> None:
    for name in command().commands:
        assert list(command((name, "more")).commands) == [name]


def test_prose_is_folded_by_the_terminal_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = _shown(("resolver", "adopt"), capsys, monkeypatch)
    assert " good: what a dead client left is rolled back if its marker is missing in the" in lines


def _shown(words: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    with pytest.raises(SystemExit):
        command(words)([*words, "--help"], prog_name="txmq")
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]
