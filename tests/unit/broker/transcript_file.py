"""The files of transcripts: scenarios, their steps, and the answers that stand there.

Invariant: a step is written the same way by whoever writes it, so a changed answer is a changed line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

WIDTH = 120
EITHER_WAY = "restart either way"
_FOR = re.compile(r"for (\w+) in (.*)")


@dataclass(frozen=True, slots=True)
class Life:
    """One time that a scenario is played: whether restarts come after a checkpoint, and what words stand for."""

    after_checkpoint: bool = False
    words: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return "".join(f", {word}" for word in [*self.words.values(), *["checkpoint"] * self.after_checkpoint])


@dataclass(slots=True)
class Step:
    """One line that does something, with the lines that it brings; ``above`` are comments and empty lines."""

    text: str
    answers: list[str] = field(default_factory=list)
    above: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """As they stand in the file."""
        short = f"{self.text} => {self.answers[0]}" if len(self.answers) == 1 else ""
        if short and len(short) <= WIDTH:
            return [*self.above, short]
        return [*self.above, self.text, *(f"  {answer}" for answer in self.answers)]


@dataclass(slots=True)
class Scenario:
    """What follows a line ``## title``; or ``### title``, which is only begun by others."""

    title: str
    is_part: bool = False
    steps: list[Step] = field(default_factory=list)
    below: list[str] = field(default_factory=list)
    file: list[Scenario] = field(default_factory=list, compare=False, repr=False)
    opening: list[str] = field(default_factory=list, compare=False)

    def lines(self) -> list[str]:
        """As they stand in the file."""
        return [
            f"{'###' if self.is_part else '##'} {self.title}",
            *(line for step in self.steps for line in step.lines()),
            *self.below,
        ]

    @property
    def lives(self) -> list[Life]:
        """The times that it is played."""
        if self.is_part:
            return []
        either_way = any(step.text.endswith(EITHER_WAY) for step in self.steps)
        given = [found.groups() for step in self.steps if (found := _FOR.fullmatch(step.text))]
        choices = [[(name, word.strip()) for word in words.split("|")] for name, words in given]
        return [
            Life(after_checkpoint, dict(chosen))
            for after_checkpoint in (False, True)[: 1 + either_way]
            for chosen in product(*choices)
        ]


def read(path: Path) -> tuple[list[str], list[Scenario]]:
    """What stands at the head of a file, and its scenarios."""
    head: list[str] = []
    found: list[Scenario] = []
    above: list[str] = []
    for line in path.read_text("utf-8").splitlines():
        if line.startswith(("## ", "### ")):
            (found[-1].below if found else head).extend(above)
            marks, _, title = line.partition(" ")
            opening = [step for step in head if step and not step.startswith("#")]
            found.append(Scenario(title, marks == "###", file=found, opening=opening))
            above = []
        elif not found or not line or line.startswith("#"):
            above.append(line)
        elif line.startswith("  "):
            found[-1].steps[-1].answers.append(line[2:])
        else:
            text, arrow, answer = line.partition(" => ")
            found[-1].steps.append(Step(text, [answer] if arrow else [], above))
            above = []
    (found[-1].below if found else head).extend(above)
    return head, found


def rewrite(path: Path, played: Scenario) -> None:
    """Put a scenario as it was played in the place of the one with its title."""
    head, found = read(path)
    lines = [line for one in found for line in (played if one.title == played.title else one).lines()]
    path.write_text("\n".join([*head, *lines]) + "\n", "utf-8")
