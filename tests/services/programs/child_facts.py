"""What a child sees of itself, said on standard output; for ``test_fork_server.py``."""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
from pathlib import Path

from txmq.runtime.crashpoints import crash_point

POINT = "broker.put.accepted"


def facts() -> dict[str, object]:
    """All that does not differ from one start to the next."""
    return {
        "argv": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "cwd": str(Path.cwd()),
        "path": sys.path[0],
        "env": {name: text for name, text in os.environ.items() if name != "LC_CTYPE"},  # an interpreter may set it
        "is_leader": os.getsid(0) == os.getpid(),
        "nothing_to_read": sys.stdin.read(),
        "descriptors": sorted(int(name) for name in os.listdir("/proc/self/fd"))[:-1],  # noqa: PTH208 - the last is that folder
        "outputs": [Path(f"/proc/self/fd/{number}").readlink().name for number in (1, 2)],
        "is_heard": [signal.getsignal(number) is signal.default_int_handler for number in (2, 15)],
        "children_are_waited_for": signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL,
        "threads": threading.active_count(),
        "name": __name__,
        "main": sys.modules["__main__"].__dict__ is globals(),
    }


if __name__ == "__main__":
    atexit.register(print, "the end")
    print(json.dumps(facts()))
    crash_point(POINT)
    if sys.argv[1] == "raise":
        raise LookupError("as asked")
    sys.exit(int(sys.argv[1]))
