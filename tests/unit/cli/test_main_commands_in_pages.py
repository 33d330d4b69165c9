"""Every ``txmq`` command that a page or an advice names exists, with the options it is given."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from txmq.cli import tx_explain
from txmq.cli.main import app

ROOT = Path(__file__).resolve().parents[3]
PROGRAMS = [program.relative_to(ROOT).as_posix() for program in sorted((ROOT / "examples").glob("*.py"))]
PAGES = ["README.md", *(page.relative_to(ROOT).as_posix() for page in sorted((ROOT / "docs").rglob("*.md")))]
PAGES += PROGRAMS
_IN_TICKS = re.compile(r"`(txmq [a-z][^`]*)`")
_BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
_SHELL = ("sh", "")
_IN_DOCSTRING = re.compile(r"^    ((?:\S.* \| )?txmq .*)$", re.MULTILINE)  # of an example, which shows how it is run
NOT_RUN = "not run"
_CHOICE = re.compile(r"^[a-z]+(\|[a-z]+)+$")


def _named(text: str) -> Iterator[str]:
    yield from _IN_TICKS.findall(text)
    blocks = [block for language, block in _BLOCK.findall(text) if language in _SHELL]
    for block in blocks + _IN_DOCSTRING.findall(text.partition("from __future__")[0]):
        for line in block.splitlines():
            for command in re.split(r"[|;&](?:\s|$)", line.split(" # ")[0]):
                if command.strip().startswith("txmq "):
                    yield command.strip()


def _expanded(words: list[str]) -> Iterator[list[str]]:
    """``commit|rollback`` is two commands."""
    for place, word in enumerate(words):
        if _CHOICE.match(word):
            for choice in word.split("|"):
                yield from _expanded([*words[:place], choice, *words[place + 1 :]])
            return
    yield words


PROGRAM: Any = typer.main.get_command(app)


def _fault(words: list[str]) -> str | None:
    command, rest = PROGRAM, words[1:]
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):  # a group of commands
        found = command.commands.get(rest[0])
        if found is None:
            return f"no command {rest[0]!r}"
        command, rest = found, rest[1:]
    known = {name for parameter in command.params for name in parameter.opts} | {"--help"}
    unknown = [word for word in rest if word.startswith("-") and word.split("=")[0] not in known]
    return f"no option {unknown}" if unknown else None


def _leaves(command: Any, path: tuple[str, ...] = ("txmq",)) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not hasattr(command, "commands"):
        yield path, command
        return
    for name, inner in command.commands.items():
        yield from _leaves(inner, (*path, name))


LEAVES = list(_leaves(PROGRAM))


@pytest.mark.parametrize(("path", "command"), LEAVES, ids=[" ".join(path) for path, _ in LEAVES])
def test_help_of_every_command_has_example_that_can_be_run(path: tuple[str, ...], command: Any) -> None:
    lines = command.help.replace("\\\n", "").splitlines()  # the shell's: the command goes on
    examples = [line.strip() for line in lines if re.match(r" *(\S.*\| )?txmq ", line)]
    assert any(line.startswith(" ".join(path)) or f"| {' '.join(path)}" in line for line in examples)
    runs = [run for line in examples for run in re.split(r"[|;&](?:\s|$)", line) if run.strip().startswith("txmq ")]
    assert [(run, fault) for run in runs for w in _expanded(shlex.split(run)) if (fault := _fault(w))] == []


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_exist(page: str) -> None:
    found = list(_named((ROOT / page).read_text("utf-8")))
    assert [(text, fault) for text in found for w in _expanded(shlex.split(text)) if (fault := _fault(w))] == []


def test_the_pages_for_operators_name_commands() -> None:
    assert sum(len(list(_named((ROOT / page).read_text("utf-8")))) for page in PAGES) > 20
    assert _fault(["txmq", "tx", "nonsense"]) == "no command 'nonsense'"
    assert _fault(["txmq", "tx", "list", "--nonsense"]) == "no option ['--nonsense']"


def test_each_command_of_operators_pages_is_run_or_told() -> None:
    known = tomllib.loads(Path(__file__).with_name("commands_of_pages.toml").read_text("utf-8"))
    named = {command for page in known["pages"] for command in _named((ROOT / page).read_text("utf-8"))}
    runs = known["commands"]
    assert named ^ runs.keys() == set()
    gone = []
    for command, told in runs.items():
        path, _, name = told.partition("::")
        if not (told.startswith(NOT_RUN) or f"def {name}(" in (ROOT / path).read_text("utf-8")):
            gone.append((command, told))
    assert gone == []


def test_the_commands_of_an_advice_exist() -> None:
    branch = {"resource": "a", "bqual": "b", "connection": 1, "marker": True, "complete": False}
    prepared: dict[str, Any] = {"txid": "t", "state": "prepared", "group": "g"}
    rows: list[dict[str, Any]] = [
        {"txid": "t", "state": "heuristic", "heuristics": [{"what": "heuristic-hazard", "outcome": "committed"}]},
        {"txid": "t", "state": "decided", "branches": [branch]},
        *(prepared | {"kind": kind} for kind in ("half", "foreign", "last-resource")),
    ]
    lines = [line for row in rows for line in tx_explain.next_steps(row)] + tx_explain.next_steps_unknown("t")
    commands = [match for line in lines for match in re.findall(r"txmq [^()]*", line)]
    assert len(commands) >= len(rows)
    assert [(c, fault) for c in commands for w in _expanded(shlex.split(c)) if (fault := _fault(w))] == []
