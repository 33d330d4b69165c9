"""The files of transcripts: scenarios, their steps, and the answers that stand there.

Invariant: a step is written the same way by whoever writes it, so a changed answer is a changed line.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

WIDTH = 120
EITHER_WAY = "restart either way"


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
    """What follows a line ``## title``."""

    title: str
    steps: list[Step] = field(default_factory=list)
    below: list[str] = field(default_factory=list)
    file: list[Scenario] = field(default_factory=list, compare=False, repr=False)

    def lines(self) -> list[str]:
        """As they stand in the file."""
        return [f"## {self.title}", *(line for step in self.steps for line in step.lines()), *self.below]

    @property
    def lives(self) -> tuple[bool, ...]:
        """Whether its restarts come after a checkpoint, for each time that it is played."""
        return (False, True) if any(step.text == EITHER_WAY for step in self.steps) else (False,)


def read(path: Path) -> tuple[list[str], list[Scenario]]:
    """What stands at the head of a file, and its scenarios."""
    head: list[str] = []
    found: list[Scenario] = []
    above: list[str] = []
    for line in path.read_text("utf-8").splitlines():
        if line.startswith("## "):
            (found[-1].below if found else head).extend(above)
            found.append(Scenario(line[3:], file=found))
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
