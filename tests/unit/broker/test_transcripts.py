"""The transcripts in ``transcripts/``, a test a scenario: see the README there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .transcript import play
from .transcript_file import Life, Scenario, read, rewrite

FOLDER = Path(__file__).with_name("transcripts")
IS_REWRITING = bool(os.environ.get("REWRITE_TRANSCRIPTS"))


def _check(path: Path, scenario: Scenario, life: Life | None = None, *, is_rewriting: bool = False) -> None:
    played = play(scenario, life or Life())
    if not any(step.answers for step in scenario.steps) and not is_rewriting:
        pytest.fail("the scenario has no answers, so it cannot fail: REWRITE_TRANSCRIPTS=1 writes them")
    if is_rewriting and played != scenario and life in (None, scenario.lives[0]):
        rewrite(path, played)
        pytest.fail(f"{path.name} has new answers: look at its diff")
    assert played.lines() == scenario.lines()


@pytest.mark.parametrize(
    ("path", "scenario", "life"),
    [
        pytest.param(path, scenario, life, id=f"{path.stem}: {scenario.title}{life}")
        for path in sorted(FOLDER.glob("*.txt"))
        for scenario in read(path)[1]
        for life in scenario.lives
    ],
)
def test_transcript(path: Path, scenario: Scenario, life: Life) -> None:
    _check(path, scenario, life, is_rewriting=IS_REWRITING)


EXAMPLE = """# example

## two puts
# the first one
> put a 0 {1 2; producer=1} => 200 0
> put a 0 {3} => 200 2

## a get
> get a 0 0 1000 => value
"""


def _written(folder: Path, text: str) -> Path:
    path = folder / "example.txt"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("right", "wrong"), [("200 2", "200 3"), (" => 200 2", ""), ("3} => 200 2", "3} => 200 2\n  get a 0 0: value")]
)
def test_other_answer_or_none_fails_until_it_is_rewritten(tmp_path: Path, right: str, wrong: str) -> None:
    path = _written(tmp_path, EXAMPLE.replace(right, wrong))
    with pytest.raises(AssertionError):
        _check(path, read(path)[1][0])
    with pytest.raises(pytest.fail.Exception, match="look at its diff"):
        _check(path, read(path)[1][0], is_rewriting=True)
    assert path.read_text() == EXAMPLE
    _check(path, read(path)[1][0], is_rewriting=True)


def test_scenario_without_an_answer_cannot_pass(tmp_path: Path) -> None:
    path = _written(tmp_path, "## nothing\nadvance 1s\n")
    with pytest.raises(pytest.fail.Exception, match="cannot fail"):
        _check(path, read(path)[1][0])


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("## one\nfor word in 1 | 2\n> put a 0 {<word>} => 200 0\nshow a/0 => [1]\n", "show a/0"),
        ("### part\n> put z 0 {x}\n\n## one\nbegin part\nshow a/0 => []\n", "unknown-topic"),
        ("> put a 0 {x}\n\n## one\nshow a/0 => []\n", "show a/0"),
    ],
)
def test_scenario_fails_with_any_word_part_or_opening(tmp_path: Path, text: str, error: str) -> None:
    path = _written(tmp_path, text)
    *_, scenario = read(path)[1]
    with pytest.raises(AssertionError, match=error):
        _check(path, scenario, scenario.lives[-1])


def test_next_life_that_finds_another_state_fails(tmp_path: Path) -> None:
    path = _written(tmp_path, "## the end is not durable\n> put a 0 {x} => 200 0\n>> end 0\nrestart either way\n")
    with pytest.raises(AssertionError, match="the next life finds other sessions"):
        _check(path, read(path)[1][0])


def test_titles_in_a_file_differ() -> None:
    for path in FOLDER.glob("*.txt"):
        titles = [scenario.title for scenario in read(path)[1]]
        assert sorted(set(titles)) == sorted(titles)
