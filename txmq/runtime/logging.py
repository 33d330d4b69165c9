"""Log lines: an event, with fields. Written through structlog into the standard library's logging.

``get_logger(**bound).info("constant event text", key=value)``: the event says what happened and never varies; what
varies are fields (xid, txid, topic-partition, connection). No payloads, no secrets.

Theory of operation. A logger is structlog's, over the standard library's logger of the module that asks for it
(``txmq.client.producer.sender``). In an application, levels, handlers and error trackers are the application's:
the library sets up nothing, neither of structlog nor of logging. A record's message is the event and its fields; its
template varies with the event alone, so that error trackers group by it; the fields are in ``record.txmq`` as well, and
a traceback in ``record.exc_info``. In a process of txmq's own (``configure``) records become JSON objects, one a line.

Invariants:
* A message is one line: control characters, and everything outside ASCII, leave as JSON escapes, so that bytes sent by
  a stranger cannot forge a line or drive a terminal.
* A field is at most ``FIELD_LENGTH_MAX`` characters, a list of them at most ``_ITEMS_MAX`` long.
* Logging never raises in the caller: a standard error that is gone is passed over, and so is a handler that raises.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Protocol, TextIO, cast

import structlog

from txmq.runtime.ports import Clock
from txmq.runtime.threads import Lock

FIELD_LENGTH_MAX = 1024
SPARING_S = 60.0
_ITEMS_MAX = 20
_ROOT = "txmq"
_FRAMES = 5  # from the caller that logs to the standard library's ``log``: for the file and line of the record
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class Logger(Protocol):
    """The methods of a structlog logger that are used. ``exc_info=error`` among the fields adds the traceback."""

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


def in_words(value: object) -> str:
    """What an application has made, as text that can be logged and stored, whatever its ``repr`` does."""
    try:
        text = value if isinstance(value, str) else repr(value)
    except Exception:  # noqa: BLE001  its own code
        text = f"a {type(value).__name__} whose repr fails"
    return text.encode("utf-8", "backslashreplace").decode()


def get_logger(**bound: object) -> Logger:
    """A logger whose lines carry ``bound``, named after the caller's module."""
    name = str(sys._getframe(1).f_globals.get("__name__", _ROOT))  # noqa: SLF001  as the standard library does
    logger = structlog.wrap_logger(
        _Standard(name if name.startswith(f"{_ROOT}.") else _ROOT), processors=_PROCESSORS, wrapper_class=_EVERYTHING
    )
    return cast(Logger, logger.bind(**bound))


class Sparingly:
    """For what may happen a thousand times: the first of a kind is said at once, then one in ``interval_s``.

    The next line of a kind that was held back says how many there were (``more``). Thread safety: any thread.
    """

    def __init__(self, log: Logger, clock: Clock, interval_s: float = SPARING_S) -> None:
        self._log, self._clock, self._interval_s = log, clock, interval_s
        self._said: dict[str, tuple[float, int]] = {}  # by event: when, and how many were held back since
        self._lock = Lock()

    def warning(self, event: str, **fields: object) -> None:
        """Say it, or count it."""
        self._say(self._log.warning, event, fields)

    def error(self, event: str, **fields: object) -> None:
        """Say it, or count it."""
        self._say(self._log.error, event, fields)

    def forget(self, event: str) -> None:
        """What comes next of a kind is something new: say it at once."""
        with self._lock:
            self._said.pop(event, None)

    def _say(self, say: Callable[..., None], event: str, fields: dict[str, object]) -> None:
        now = self._clock.monotonic()
        with self._lock:
            said_at, more = self._said.get(event, (float("-inf"), 0))
            is_due = now - said_at >= self._interval_s
            self._said[event] = (now, 0) if is_due else (said_at, more + 1)
        if is_due:
            say(event, **fields, **({"more": more} if more else {}), stacklevel=2)


# --- how a record is made --------------------------------------------------------------------------------------------


class _Standard:
    """The standard library's logger, as structlog calls it."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def is_enabled(self, method: str) -> bool:
        """Whether a line of this level would be written."""
        return self._logger.isEnabledFor(LEVELS.get(method, logging.ERROR))

    def debug(self, event: str, **fields: Any) -> None:
        self._log(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: Any) -> None:
        self._log(logging.INFO, event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._log(logging.WARNING, event, fields)

    def error(self, event: str, **fields: Any) -> None:
        self._log(logging.ERROR, event, fields)

    def _log(self, level: int, event: str, fields: dict[str, Any]) -> None:
        trace, deeper = fields.pop("exc_info", None), fields.pop("stacklevel", 0)
        text = " ".join([event.replace("%", "%%") if fields else event, *(f"{name}=%s" for name in fields)])
        extra = {_ROOT: {"event": event, **fields}}
        with suppress(Exception):  # a handler's, of the application
            self._logger.log(
                level, text, *map(_shown, fields.values()), exc_info=trace, extra=extra, stacklevel=_FRAMES + deeper
            )


def _wanted(logger: Any, method: str, fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    if not logger.is_enabled(method):
        raise structlog.DropEvent
    return fields


def _bounded(_logger: object, _method: str, fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for name, value in fields.items():
        if name != "exc_info":
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


def _shown(value: object) -> str:
    """A field as text: a plain word as it is, everything else as JSON."""
    return value if isinstance(value, str) and _WORD.fullmatch(value) else _json(value)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=True).replace("\x7f", "\\u007f")


_WORD = re.compile(r"[!#-~]+")
_EVERYTHING = structlog.make_filtering_bound_logger(logging.NOTSET)
_PROCESSORS: list[structlog.typing.Processor] = [_wanted, _bounded]


# --- a process of txmq's own -----------------------------------------------------------------------------------------


class _JsonLines(logging.Handler):
    """Writes records as JSON objects; looks the stream up each time, so that it may be redirected."""

    def __init__(self, stream: TextIO | None) -> None:
        super().__init__()
        self._stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError, ValueError):  # ValueError: the stream is closed
            stream = self._stream or sys.stderr
            stream.write(_json(_line(record)) + "\n")
            stream.flush()


def _line(record: logging.LogRecord) -> Mapping[str, object]:
    made_at = datetime.fromtimestamp(record.created, UTC).isoformat().replace("+00:00", "Z")
    fields = getattr(record, _ROOT, {"event": record.getMessage()})
    line = {"timestamp": made_at, "level": record.levelname.lower(), **fields}
    if record.exc_info:
        line["exception"] = logging.Formatter().formatException(record.exc_info)
    return line


def configure(level: str = "info", stream: TextIO | None = None) -> None:
    """Set up logging for this process, which is txmq's own: loggers of structlog itself follow.

    Args:
        level: least severe line that is written: debug, info, warning or error.
        stream: where to; standard error by default.
    """
    root = logging.getLogger(_ROOT)
    root.handlers, root.propagate = [_JsonLines(stream)], False
    root.setLevel(LEVELS[level])
    structlog.configure(
        processors=_PROCESSORS,
        wrapper_class=_EVERYTHING,
        logger_factory=lambda *names: _Standard(*(names or (_ROOT,))),
        cache_logger_on_first_use=False,
    )


def leave_to_application() -> None:
    """The reverse of ``configure``: as in every process that uses txmq as a library."""
    root = logging.getLogger(_ROOT)
    root.handlers, root.propagate = [], True
    root.setLevel(logging.NOTSET)
    structlog.reset_defaults()
