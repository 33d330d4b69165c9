"""Tables as plain text: whole words on a terminal, one line a row through a pipe."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from txmq.cli import main, output
from txmq.cli.text_table import display_width, field_lines, paragraph, table_lines

COLUMNS = ("name", "retention_size_bytes", "why")
ROWS = [["orders", "7", "nobody has decided yet"], ["payments", "-", "its owner is connected and may still decide"]]
NUMERIC = (False, True, False)
TEXTS = st.text(alphabet="ab cé漢", max_size=60)


def words(lines: list[str]) -> list[str]:
    return [word for line in lines for word in line.split()]


def test_what_fits_is_a_table_with_numbers_on_the_right() -> None:
    head, rule, first, second = table_lines(COLUMNS, ROWS, NUMERIC, 100)
    assert head == "name      retention_size_bytes  why"
    assert set(rule) == {"\u2500", " "}
    assert first == "orders                       7  nobody has decided yet"
    assert second == "payments                     -  its owner is connected and may still decide"


def test_on_narrow_terminal_cells_and_names_are_folded_between_words() -> None:
    lines = table_lines(COLUMNS, ROWS, NUMERIC, 34)
    assert all(display_width(line) <= 34 for line in lines)
    assert [word for word in words(lines) if word.startswith(("ret", "size", "byt"))] == ["retention_", "size_bytes"]
    for row in ROWS:
        assert set(" ".join(row).split()) <= set(words(lines))


def test_row_that_does_not_fit_takes_a_line_per_value() -> None:
    txid = "3985eba8f49b697f-e2e7465433cb16ec-1-1"
    lines = table_lines(("txid", "other"), [[txid, txid], ["a", "b"]], (False, False), 60)
    assert lines == [f"txid   {txid}", f"other  {txid}", "", "txid   a", "other  b"]


def test_through_pipe_row_is_line_with_word_in_each_column() -> None:
    lines = table_lines(("name", "left", "why"), [["orders", "", "w " * 200], ["x", "1", ""]], NUMERIC, None)
    assert len(lines) == 3
    assert [line.split()[:2] for line in lines] == [["name", "left"], ["orders", "-"], ["x", "1"]]
    assert lines[2].split() == ["x", "1", "-"]
    assert not any(set(line) & set("\u2500\u2502\u2501\u2503") for line in lines)


def test_a_field_is_folded_beside_its_name() -> None:
    assert field_lines([("a", "1"), ("why", "one two three")], 12) == ["a    1", "why  one two", "     three"]
    assert field_lines([("why", "one two three")], None) == ["why  one two three"]


def test_a_paragraph_stands_behind_its_indent() -> None:
    assert paragraph("one two three", 12, "   ", " 1. ") == [" 1. one two", "   three"]


@given(st.lists(st.tuples(TEXTS, TEXTS, TEXTS), max_size=5), st.integers(min_value=10, max_value=120))
def test_no_word_is_ever_broken_and_none_is_lost(rows: list[tuple[str, str, str]], width: int) -> None:
    lines = table_lines(("a", "b", "c"), rows, (False, True, False), width)
    shown = words(lines)
    for word in words([" ".join(row) for row in rows]):
        assert word in shown
    longest = max((display_width(word) for row in rows for word in " ".join(row).split()), default=1)
    assert all(display_width(line) <= max(width, longest + len("a  ")) for line in lines)


def test_a_terminal_has_a_title_and_folded_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "line_width", lambda: 40)
    output.print_table("things", COLUMNS, ROWS)
    assert max(map(display_width, capsys.readouterr().out.splitlines())) <= 40


def _leaves(command: Any) -> list[Any]:
    return [command, *(leaf for below in getattr(command, "commands", {}).values() for leaf in _leaves(below))]


def test_switches_show_without_a_type(capsys: pytest.CaptureFixture[str]) -> None:
    for command in _leaves(main.command()):
        with pytest.raises(SystemExit):
            command.main(["--help"], prog_name="txmq")
        shown = capsys.readouterr().out
        assert "<bool>" not in shown, command.name
        assert "--help" in shown
