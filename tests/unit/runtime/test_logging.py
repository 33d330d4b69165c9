"""Log lines: one JSON object a line, whatever the fields hold."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from tests.logged import said
from tools.simulated.clock import SimClock
from txmq.runtime.logging import FIELD_LENGTH_MAX, Sparingly, configure, get_logger, leave_to_application


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    configure("info", stream)
    yield stream
    leave_to_application()


def test_line_is_json_object_with_time_level_event_and_fields(stream: io.StringIO) -> None:
    get_logger(connection=7).info("opened", peer="127.0.0.1")
    fields = json.loads(stream.getvalue())
    assert list(fields)[:3] == ["timestamp", "level", "event"]
    assert (fields["level"], fields["event"], fields["connection"], fields["peer"]) == (
        "info",
        "opened",
        7,
        "127.0.0.1",
    )


def test_bytes_of_stranger_can_neither_forge_line_nor_drive_terminal(stream: io.StringIO) -> None:
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


# --- in an application -----------------------------------------------------------------------------------------------

LIBRARY = """
import logging, structlog, sys
from txmq.runtime.logging import get_logger
logger = get_logger(resource="shop")
logger.info("round")
logger.warning("away", error="no\\nroute")
assert not structlog.is_configured()
assert not logging.getLogger().handlers
assert not logging.getLogger("txmq").handlers
"""


def test_library_reports_only_what_needs_attention_and_configures_nothing() -> None:
    ended = subprocess.run([sys.executable, "-c", LIBRARY], capture_output=True, text=True, timeout=60, check=True)
    assert (ended.stdout, ended.stderr) == ("", 'away resource=shop error="no\\nroute"\n')


def test_record_has_constant_template_fields_and_where_it_was_made(caplog: pytest.LogCaptureFixture) -> None:
    get_logger(group="billing").warning("100% full", name="a b", number=7)
    [record] = caplog.records
    assert record.msg == "100%% full group=%s name=%s number=%s"
    assert record.getMessage() == '100% full group=billing name="a b" number=7'
    assert vars(record)["txmq"] == {"event": "100% full", "group": "billing", "name": "a b", "number": 7}
    assert (record.module, record.funcName) == ("test_logging", sys._getframe().f_code.co_name)


def test_an_error_tracker_gets_the_exception_itself(caplog: pytest.LogCaptureFixture) -> None:
    error = ValueError("bad")
    get_logger().error("failed", exc_info=error)
    assert caplog.records[0].exc_info == (ValueError, error, None)


def test_levels_are_the_applications(caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger()
    logger.info("quiet")
    caplog.set_level("INFO", "txmq")
    logger.info("heard")
    caplog.set_level("ERROR", "txmq")
    logger.warning("quiet")
    assert [line["event"] for line in said(caplog)] == ["heard"]


def test_loggers_are_named_after_the_module_that_asked(caplog: pytest.LogCaptureFixture) -> None:
    found: dict[str, Any] = {"__name__": "txmq.client.spooling.ordered_producer", "get_logger": get_logger}
    exec("get_logger().warning('away')", found)
    assert [record.name for record in caplog.records] == ["txmq.client.spooling.ordered_producer"]


def test_a_handler_that_raises_stops_nobody() -> None:
    class Broken(logging.Handler):
        def handle(self, record: logging.LogRecord) -> bool:
            raise RuntimeError("no disk")

    root = logging.getLogger("txmq")
    root.addHandler(broken := Broken())
    try:
        get_logger().error("said all the same")
    finally:
        root.removeHandler(broken)


def test_what_happens_thousand_times_is_said_once_and_then_sparingly(caplog: pytest.LogCaptureFixture) -> None:
    clock = SimClock()
    sparingly = Sparingly(get_logger(), clock, interval_s=60.0)
    for _ in range(1000):
        sparingly.warning("spooled", offset=1)
    sparingly.error("of another kind")
    assert {record.module for record in caplog.records} == {"test_logging"}
    assert [line["event"] for line in said(caplog)] == ["spooled", "of another kind"]
    clock.advance(60.0)
    sparingly.warning("spooled", offset=2)
    sparingly.warning("spooled", offset=3)
    [line] = said(caplog)
    assert (line["offset"], line["more"]) == (2, 999)


def test_loggers_made_before_follow_what_is_set_up_later(stream: io.StringIO) -> None:
    logger = get_logger()
    configure("debug", stream)
    logger.debug("detail")
    structlog.get_logger("txmq.broker").bind(a=1).debug("also")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["detail", "also"]
