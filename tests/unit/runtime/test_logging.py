"""Log lines: one JSON object a line, whatever the fields hold."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator

import pytest
import structlog

from txmq.runtime import logging
from txmq.runtime.logging import FIELD_LENGTH_MAX, configure, get_logger


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    monkeypatch.setattr(logging, "_State", type("_State", (), {}))
    stream = io.StringIO()
    configure("info", stream)
    yield stream
    structlog.reset_defaults()


def test_a_line_is_a_json_object_with_time_level_event_and_fields(stream: io.StringIO) -> None:
    get_logger(connection=7).info("opened", peer="127.0.0.1")
    fields = json.loads(stream.getvalue())
    assert list(fields)[:3] == ["timestamp", "level", "event"]
    assert (fields["level"], fields["event"], fields["connection"], fields["peer"]) == (
        "info",
        "opened",
        7,
        "127.0.0.1",
    )


def test_bytes_of_a_stranger_can_neither_forge_a_line_nor_drive_a_terminal(stream: io.StringIO) -> None:
    hostile = "\n{}\r\x1b[2J\x00\x7f\x9b\u2028é"
    get_logger().warning("refused", name=hostile, raw=b"\xff\n\x1b")
    text = stream.getvalue()
    assert text.count("\n") == 1
    assert all(" " <= char <= "~" for char in text.removesuffix("\n"))
    assert json.loads(text)["name"] == hostile


def test_a_field_is_cut_at_its_limit(stream: io.StringIO) -> None:
    get_logger().info("long", text="x" * 10_000, raw=b"y" * 10_000)
    fields = json.loads(stream.getvalue())
    assert fields["text"] == "x" * FIELD_LENGTH_MAX + "..."
    assert fields["raw"] == "y" * FIELD_LENGTH_MAX


def test_a_list_stays_a_list_of_bounded_fields(stream: io.StringIO) -> None:
    get_logger().info("seen", notes=["a\n", b"\xff", "x" * 10_000, *range(100)])
    notes = json.loads(stream.getvalue())["notes"]
    assert notes[:2] == ["a\n", "\\xff"]
    assert (len(notes[2]), len(notes)) == (FIELD_LENGTH_MAX + 3, 20)


def test_lines_below_the_level_are_not_written(stream: io.StringIO) -> None:
    get_logger().debug("detail")
    assert stream.getvalue() == ""


def test_values_of_other_types_are_written_as_text(stream: io.StringIO) -> None:
    get_logger().info("seen", error=ValueError("bad"), nothing=None, flag=True)
    fields = json.loads(stream.getvalue())
    assert (fields["error"], fields["nothing"], fields["flag"]) == ("bad", None, True)


def test_an_exception_is_logged_with_its_trace_on_one_line(stream: io.StringIO) -> None:
    try:
        raise ValueError("bad")
    except ValueError:
        get_logger().error("failed", exc_info=True)
    assert "ValueError: bad" in json.loads(stream.getvalue())["exception"]
    assert stream.getvalue().count("\n") == 1


def test_a_standard_error_that_is_gone_stops_nobody(stream: io.StringIO) -> None:
    stream.close()
    get_logger().error("nobody reads this")


def test_as_a_library_only_what_needs_attention_is_said_and_on_standard_error(
    capfd: pytest.CaptureFixture[str],
) -> None:
    logger = get_logger(resource="shop")
    logger.info("round")
    logger.warning("away")
    out, err = capfd.readouterr()
    assert (out, err.count("\n"), json.loads(err)["event"]) == ("", 1, "away")


def test_loggers_made_before_follow_what_is_set_up_later(stream: io.StringIO) -> None:
    logger = get_logger()
    configure("debug", stream)
    logger.debug("detail")
    structlog.get_logger("txmq.broker").bind(a=1).debug("also")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["detail", "also"]
