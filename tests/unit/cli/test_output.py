"""What commands print, and what they accept."""

from __future__ import annotations

import io
import subprocess
import sys
from datetime import UTC, datetime

import pytest

from txmq.cli import consume, output, produce, topic
from txmq.errors import ConfigError


def test_what_a_stranger_wrote_cannot_drive_the_terminal() -> None:
    assert output.cell("a\x1b[2J\n\x9b\u202e") == "a\\x1b[2J\\n\\x9b\\u202e"
    assert output.cell(b"\xff\x1b") == "\\xff\\x1b"


@pytest.mark.parametrize(("value", "shown"), [(None, "-"), (True, "yes"), (False, "no"), (0, "0"), ("ä", "ä")])
def test_values_are_shown_for_people(value: object, shown: str) -> None:
    assert output.cell(value) == shown


def test_a_failure_is_one_line_and_a_status(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        output.fail("no\nsuch thing", output.STATUS_USAGE)
    assert (caught.value.code, capsys.readouterr().err) == (2, "txmq: no\\nsuch thing\n")


@pytest.mark.parametrize(
    ("words", "closed", "status", "said"),
    [
        ("version", ">&-", 1, "txmq: standard output is closed; redirect it, if only to /dev/null\n"),
        ("version --json", ">&-", 1, "txmq: standard output is closed; redirect it, if only to /dev/null\n"),
        ("--help", ">&-", 1, "txmq: standard output is closed; redirect it, if only to /dev/null\n"),
        ("user add shop", "<&-", 2, "txmq: no password: name a file with --password-file, or set TXMQ_NEW_PASSWORD\n"),
        ("version", "2>&-", 0, ""),
        ("versio", "2>&-", 2, ""),
    ],
)
def test_a_closed_stream_is_told_in_one_line(words: str, closed: str, status: int, said: str) -> None:
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-m", "txmq", *words.split()]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (status, said)


def test_a_table_that_is_piped_is_not_folded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    output.print_table("things", ("why",), [("w" * 200,)])
    assert "w" * 200 in capsys.readouterr().out


def test_a_table_shows_every_cell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    output.print_table("things", ("name", "count"), [("[bold]x", 1), ("y\x1b", 22)])
    shown = capsys.readouterr().out
    assert "[bold]x" in shown
    assert "y\\x1b" in shown
    assert "22" in shown


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [
        ("@0", 0),
        ("@1700000000000", 1_700_000_000_000),
        ("2023-11-14T22:13:20Z", 1_700_000_000_000),
        ("2023-11-14 22:13:20", 1_700_000_000_000),
        ("2023-11-14T23:13:20+01:00", 1_700_000_000_000),
    ],
)
def test_times_are_read_without_a_zone_as_utc(text: str, milliseconds: int) -> None:
    assert consume.timestamp_ms(text) == milliseconds
    assert datetime.fromtimestamp(milliseconds / 1000, UTC).tzinfo is UTC


@pytest.mark.parametrize("text", ["@", "@x", "@-1", "yesterday", "", "12:00"])
def test_what_is_no_time_is_refused_saying_what_is(text: str) -> None:
    with pytest.raises(ConfigError, match="expected earliest, latest, an offset, a time"):
        consume.timestamp_ms(text)


def test_settings_of_topic_are_read_as_what_they_look_like() -> None:
    words = ["retention_ms=10", "retention_policy=archive", "accept_read=false", "segment_age_ms=none"]
    expected = {"retention_ms": 10, "retention_policy": "archive", "accept_read": False, "segment_age_ms": None}
    assert topic.assignments(words) == expected


@pytest.mark.parametrize("words", [["a"], ["=1"], ["a=1", "a=2"]])
def test_settings_of_a_topic_that_are_none_are_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError):
        topic.assignments(words)


class Pieces(io.BytesIO):
    """A stream that arrives in pieces."""

    def __init__(self, *pieces: bytes) -> None:
        super().__init__()
        self.pieces = list(pieces)

    def read1(self, size: int | None = -1, /) -> bytes:
        assert size == produce.READ_SIZE_BYTES
        return self.pieces.pop(0) if self.pieces else b""


def test_lines_become_values_without_their_ends() -> None:
    batches = list(produce.split(Pieces(b"one\ntwo\r\n\n\xff\x00\nlast"), None))
    assert [value for batch in batches for _, value in batch] == [b"one", b"two", b"", b"\xff\x00", b"last"]


def test_what_has_arrived_is_sent_without_waiting_for_more() -> None:
    pieces = Pieces(b"one\ntw", b"o", b"\nthree\n")
    batches = produce.split(pieces, None)
    assert next(batches) == [(None, b"one")]
    assert len(pieces.pieces) == 2
    assert list(batches) == [[(None, b"two"), (None, b"three")]]


def test_a_key_stands_before_the_first_separator() -> None:
    assert list(produce.split(Pieces(b"a,1\nb,2,3\n,4\n"), b",")) == [[(b"a", b"1"), (b"b", b"2,3"), (b"", b"4")]]


def test_line_without_its_key_ends_it_after_lines_before_it() -> None:
    batches = produce.split(Pieces(b"a,1\nb\nc,3\n"), b",")
    assert next(batches) == [(b"a", b"1")]
    with pytest.raises(produce.BadLineError, match="line 2 has no key"):
        next(batches)


def test_line_beyond_limit_is_refused_before_it_is_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(produce, "LINE_SIZE_BYTES_MAX", 4)
    assert list(produce.split(Pieces(b"1234\n12\n"), None)) == [[(None, b"1234"), (None, b"12")]]
    pieces = Pieces(b"1\n123", b"45", b"never read")
    batches = produce.split(pieces, None)
    assert next(batches) == [(None, b"1")]
    with pytest.raises(produce.BadLineError, match="line 2 is longer than 4 bytes"):
        next(batches)
    assert pieces.pieces == [b"never read"]


def test_a_command_loads_no_more_than_all_commands_need() -> None:
    """What only some of them need, each of those loads by itself: a broker that starts, a topic that is listed."""
    code = "import sys, txmq.cli.main; print([m for m in sys.modules if m in ('txmq.xa', 'txmq.client', 'structlog')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout.strip() == b"[]"
