"""What the command line says of an error, and of the next step."""

from __future__ import annotations

import sys

import pytest

from txmq.cli import main
from txmq.errors import BrokerAwayError


@pytest.mark.parametrize(
    ("text", "step"),
    [
        ("cannot connect to h:1: refused", ": is a broker running? start one with: txmq broker (or name another with"),
        ("cannot connect to home 0b: refused", ": start the broker that has this home (txmq cluster describe names it"),
    ],
)
def test_broker_that_is_away_comes_with_the_next_step(
    text: str, step: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> None:
        raise BrokerAwayError(text)

    monkeypatch.setattr(main, "command", lambda: run)
    monkeypatch.setattr(sys, "argv", ["txmq"])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith(f"txmq: {text}{step}")
