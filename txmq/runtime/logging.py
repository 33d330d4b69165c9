"""Log lines: JSON objects on standard error, one a line.

``get_logger(**bound).info("constant event text", key=value)``: the event says what happened and never varies; what
varies are fields (xid, txid, topic-partition, connection). No payloads, no secrets.

Invariants:
* A line is one line: control characters, and everything outside ASCII, leave as JSON escapes, so that bytes sent by a
  stranger cannot forge a line or drive a terminal.
* A field is at most ``FIELD_LENGTH_MAX`` characters, a list of them at most ``_ITEMS_MAX`` long.
* Logging never stops the one who logs: a standard error that is gone is passed over.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import MutableMapping
from typing import Any, Protocol, TextIO, cast

import structlog

FIELD_LENGTH_MAX = 1024
_ITEMS_MAX = 20
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class Logger(Protocol):
    """What callers use of a structlog logger."""

    def debug(self, event: str, **fields: object) -> None:
        """For those who change txmq."""

    def info(self, event: str, **fields: object) -> None:
        """Something an operator may want to know."""

    def warning(self, event: str, **fields: object) -> None:
        """Something an operator should look at."""

    def error(self, event: str, **fields: object) -> None:
        """Something an operator must act on."""

    def bind(self, **fields: object) -> Logger:
        """A logger whose lines carry ``fields``."""


class _State:
    """Of this process; as a library, txmq says on standard error what needs attention, and nothing else."""

    level = logging.WARNING
    stream: TextIO | None = None  # None: whatever ``sys.stderr`` is at the moment


def configure(level: str = "info", stream: TextIO | None = None) -> None:
    """Set up logging for this process, which is txmq's own: loggers of structlog itself follow.

    Args:
        level: least severe line that is written: debug, info, warning or error.
        stream: where to; standard error by default.
    """
    _State.level, _State.stream = LEVELS[level], stream
    structlog.configure(
        processors=_PROCESSORS,
        wrapper_class=structlog.make_filtering_bound_logger(logging.NOTSET),
        logger_factory=lambda *_: _Lines(),
        cache_logger_on_first_use=False,
    )


def get_logger(**bound: object) -> Logger:
    """A logger whose lines carry ``bound``. Does not depend on how an application has set up its own structlog."""
    wrapper = structlog.make_filtering_bound_logger(logging.NOTSET)
    logger = structlog.wrap_logger(_Lines(), processors=_PROCESSORS, wrapper_class=wrapper).bind(**bound)
    return cast(Logger, logger)


class _Lines:
    """Writes finished lines; looks the stream up each time, so that it may be redirected."""

    def msg(self, line: str) -> None:
        try:
            stream = _State.stream or sys.stderr
            stream.write(line + "\n")
            stream.flush()
        except (OSError, ValueError):  # ValueError: the stream is closed
            pass

    debug = info = warning = error = msg


def _severe_enough(_logger: object, method: str, fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    if LEVELS.get(method, logging.ERROR) < _State.level:
        raise structlog.DropEvent
    return fields


def _bounded(_logger: object, _method: str, fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for name, value in fields.items():
        if name != "exception":
            fields[name] = [_plain(item) for item in value[:_ITEMS_MAX]] if isinstance(value, list) else _plain(value)
    return fields


def _plain(value: object) -> str | int | float | bool | None:
    if isinstance(value, bytes | bytearray | memoryview):
        value = bytes(value[:FIELD_LENGTH_MAX]).decode("ascii", "backslashreplace")
    elif not isinstance(value, str | int | float | bool | None):
        value = str(value)
    if isinstance(value, str) and len(value) > FIELD_LENGTH_MAX:
        return value[:FIELD_LENGTH_MAX] + "..."
    return value


def _to_json(_logger: object, _method: str, fields: MutableMapping[str, Any]) -> str:
    ordered = {name: fields.pop(name, None) for name in ("timestamp", "level", "event")}
    return json.dumps({**ordered, **fields}, ensure_ascii=True).replace("\x7f", "\\u007f")


_PROCESSORS: list[structlog.typing.Processor] = [
    _severe_enough,
    structlog.processors.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
    structlog.processors.format_exc_info,
    _bounded,
    _to_json,
]
