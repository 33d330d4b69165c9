"""``txmq audit --follow``: round after round, each finding told as soon as it is made.

A round that fails (the broker or the database is away) is said and repeated; nothing is left out. Ctrl-C and SIGTERM
end it: status 1 if this run found something, 2 if there was nothing to judge, else 0.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from txmq.cli import output
from txmq.errors import ConfigError
from txmq.runtime.threads import Signal

if TYPE_CHECKING:
    from txmq.spark.audit.audit import AuditResult
    from txmq.spark.audit.follow import Follower

Say = Callable[[str], None]


class Rounds:
    """Runs a follower every ``interval_ms`` until it is told to stop."""

    def __init__(self, follower: Follower, interval_ms: int, say: Say, cause: Callable[[Exception], str]) -> None:
        self.follower, self.interval_s, self.say, self.cause = follower, interval_ms / 1000, say, cause
        self.found, self.has_judged = 0, False

    def run(self) -> None:
        """Go on until Ctrl-C or SIGTERM; then ``found`` says how many findings there were."""
        # No Event: its ``set`` in a handler may meet the lock of the very ``wait`` that the signal interrupted.
        stop, is_stopped = Signal(), False
        previous = signal.signal(signal.SIGTERM, lambda *_: stop.set())
        with suppress(KeyboardInterrupt):
            self.say(f"auditing every {self.interval_s:g} s; findings are told as they are made; Ctrl-C ends it")
            while not is_stopped:
                began = time.monotonic()
                self._round()
                is_stopped = stop.wait(max(0.0, self.interval_s - (time.monotonic() - began)))
        signal.signal(signal.SIGTERM, previous)
        judged = "" if self.has_judged else "; there was nothing to judge"
        self.say(f"ended; {self.found} findings{judged}")

    def _round(self) -> None:
        try:
            self._judged(self.follower.round())
            late = self.follower.look_again()
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it was, the round is repeated
            self.say(f"this round did not happen and is repeated: {self.cause(error)}")
            return
        if late is not None:
            self.found += late
            self.say(f"rows looked at once more: {late} findings that are new")

    def _judged(self, result: AuditResult | None) -> None:
        if result is None:
            return
        found = sum(result.counts.values())
        self.found += found
        self.has_judged = self.has_judged or not result.blind
        self.say(f"{result.totals.rows} rows, {result.totals.messages} messages: {found} findings")


def line_of(finding: Mapping[str, Any]) -> str:
    """A finding in a line."""
    names = {"identity": "", "partition": "partition ", "offset": "offset ", "txid": "transaction "}
    places = [f"{word}{finding[name]}" for name, word in names.items() if name in finding]
    return f"{', '.join(places)}: {finding.get('detail', '')}"


def tell(finding: dict[str, Any], *, as_json: bool) -> None:
    """One finding on standard output, at once."""
    if as_json:
        output.print_json(finding)
    else:
        sys.stdout.write(output.escaped(f"{finding['kind']}: {line_of(finding)}") + "\n")
    sys.stdout.flush()
